"""From which snapshots the pipelines of a run continue together: pipelines on threads, over a store in memory."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import distributed as dist

from strategies.launch.rounds import Rounds
from strategies.pipeline.control.client import Failures
from strategies.pipeline.recovery.together import Together
from strategies.pipeline.state.snapshots import Snapshot

Snapshots = Sequence[tuple[int, int]]
"""The number and the period of each snapshot."""


def pipelines(*in_step: Sequence[int]) -> list[Together]:
    """One for each argument, the pipelines that are in step with it."""
    store, num = dist.HashStore(), len(in_step)
    return [Together(Rounds(store, rank, num, 10.0), Failures(), ranks) for rank, ranks in enumerate(in_step)]


def agreed(members: Sequence[Together], own: Sequence[Snapshots]) -> list[Snapshot]:
    def agree(member: Together, numbers: Snapshots) -> Snapshot:
        snapshots = [Snapshot(number, number % 2, period) for number, period in numbers]
        return member.agree("lost", snapshots, Failures(), Failures())

    with ThreadPoolExecutor(len(members)) as executor:
        return [*executor.map(agree, members, own)]


def test_replicas_start_from_their_last_snapshots_of_one_period() -> None:
    """The first replica has taken a further snapshot in period 4, the other one has no snapshot of period 5 yet."""
    members = pipelines([0], [1])
    first, second = agreed(members, [[(7, 4), (8, 5)], [(4, 3), (5, 4)]])
    assert (first.number, second.number) == (7, 5)
    first, second = agreed(members, [[(7, 4), (9, 4)], [(5, 4)]])
    assert (first.number, second.number) == (9, 5)
    assert [member.agreed for member in members] == [first, second]


def test_pipelines_in_step_start_from_one_snapshot() -> None:
    """The second pipeline has not completed the further snapshot of period 4."""
    members = pipelines([0, 1], [0, 1])
    assert [each.number for each in agreed(members, [[(7, 4), (8, 4)], [(7, 4)]])] == [7, 7]


def test_two_replicas_of_two_pipelines() -> None:
    members = pipelines([0, 1], [0, 1], [2, 3], [2, 3])
    found = agreed(members, [[(7, 4), (8, 4)], [(7, 4)], [(5, 4), (6, 5)], [(5, 4), (6, 5)]])
    assert [each.number for each in found] == [7, 7, 5, 5]
    assert [member.has_others for member in members] == [True] * 4


def test_no_snapshot_in_common() -> None:
    with pytest.raises(RuntimeError, match="the replicas have no snapshots of the same step"):
        agreed(pipelines([0], [1]), [[(1, 1), (2, 2)], [(3, 3)]])


def test_whether_pipelines_have_returned_to_a_snapshot() -> None:
    """A further snapshot concerns only the pipelines in step with this one, which have the same numbers."""
    regular, further = Snapshot(7, 1, 4), Snapshot(8, 0, 4)
    of_replicas, of_parts = pipelines([0], [1])[0], pipelines([0, 1], [0, 1])[0]
    of_both = pipelines([0, 1], [0, 1], [2, 3], [2, 3])[0]
    for each in (of_replicas, of_parts, of_both):
        assert not each.have_returned_to(regular, is_extra=False)
        each.agreed = regular
        assert each.have_returned_to(regular, is_extra=False)
    found = [
        [each.have_returned_to(further, is_extra=is_extra) for is_extra in (False, True)]
        for each in (of_replicas, of_parts, of_both)
    ]
    assert found == [[True, False], [False, False], [True, False]]
    assert not of_replicas.have_returned_to(regular, is_extra=True) and of_both.have_returned_to(regular, is_extra=True)
