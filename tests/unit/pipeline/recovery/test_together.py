"""From which snapshots the pipelines of a run continue together: pipelines on threads, over a store in memory."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import distributed as dist

from strategies.launch.rounds import Rounds
from strategies.pipeline.control.client import Failures
from strategies.pipeline.recovery.together import InStep, Together
from strategies.pipeline.state.snapshots import Snapshot

Snapshots = Sequence[tuple[int, int]]
"""The number and the period of each snapshot."""


def pipelines(num: int, in_step: Sequence[InStep | None]) -> list[Together]:
    store = dist.HashStore()
    return [Together(Rounds(store, rank, num, 10.0), Failures(), in_step[rank]) for rank in range(num)]


def agreed(members: Sequence[Together], own: Sequence[Snapshots]) -> list[Snapshot]:
    def agree(member: Together, numbers: Snapshots) -> Snapshot:
        snapshots = [Snapshot(number, number % 2, period) for number, period in numbers]
        return member.agree("lost", snapshots, Failures(), Failures())

    with ThreadPoolExecutor(len(members)) as executor:
        return [*executor.map(agree, members, own)]


def together(*ranks: int) -> InStep:
    return InStep(ranks, lambda flags: [*map(int, flags)])


def test_replicas_start_from_their_last_snapshots_of_one_period() -> None:
    """The first replica has taken a further snapshot in period 4, the other one has no snapshot of period 5 yet."""
    members = pipelines(2, [None, None])
    first, second = agreed(members, [[(7, 4), (8, 5)], [(4, 3), (5, 4)]])
    assert (first.number, second.number) == (7, 5)
    first, second = agreed(members, [[(7, 4), (9, 4)], [(5, 4)]])
    assert (first.number, second.number) == (9, 5)
    assert [member.agreed for member in members] == [first, second]


def test_pipelines_in_step_start_from_one_snapshot() -> None:
    """The second pipeline has not completed the further snapshot of period 4."""
    members = pipelines(2, [together(0, 1)] * 2)
    assert [each.number for each in agreed(members, [[(7, 4), (8, 4)], [(7, 4)]])] == [7, 7]


def test_two_replicas_of_two_pipelines() -> None:
    members = pipelines(4, [together(0, 1), together(0, 1), together(2, 3), together(2, 3)])
    found = agreed(members, [[(7, 4), (8, 4)], [(7, 4)], [(5, 4), (6, 5)], [(5, 4), (6, 5)]])
    assert [each.number for each in found] == [7, 7, 5, 5]
    assert [member.has_others for member in members] == [True] * 4


def test_no_snapshot_in_common() -> None:
    with pytest.raises(RuntimeError, match="the replicas have no snapshots of the same step"):
        agreed(pipelines(2, [None, None]), [[(1, 1), (2, 2)], [(3, 3)]])


@pytest.mark.parametrize(
    ("counts", "takes"), [([0, 0], False), ([1, 0], True), ([2, 0], True), ([1, 1], False), ([2, 2], False)]
)
def test_a_further_snapshot_is_taken_if_a_pipeline_needs_it_and_all_can_take_it(counts: list[int], takes: bool) -> None:
    assert InStep([0, 1], lambda flags: counts).take_extra(wants=False, can=True) is takes


def test_whether_pipelines_have_returned_to_a_snapshot() -> None:
    """A further snapshot concerns only the pipelines in step with this one, which have the same numbers."""
    (alone, _), (member, _) = pipelines(2, [None, None]), pipelines(2, [together(0, 1)] * 2)
    regular, further = Snapshot(7, 1, 4), Snapshot(8, 0, 4)
    for each in (alone, member):
        assert not each.have_returned_to(regular, is_extra=False)
        each.agreed = regular
        assert each.have_returned_to(regular, is_extra=False)
    assert not alone.have_returned_to(regular, is_extra=True)
    assert member.have_returned_to(regular, is_extra=True) and not member.have_returned_to(further, is_extra=True)
