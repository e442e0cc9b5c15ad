"""The simulator of devices: orders that deadlock under NCCL, among them those that users of others have reported."""

import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from device_simulator import Collective, Deadlock, Group, check_runs, for_all, per_edge, per_pair

from strategies.pipeline.schedule.deadlocks import sources_of
from strategies.pipeline.schedule.operations import Operation, Post, edge_to
from strategies.pipeline.schedule.posting import posting_order
from strategies.pipeline.schedule.program import Programs
from strategies.pipeline.schedule.tables import (
    Action,
    ActionTable,
    Placement,
    gpipe,
    interleaved,
    one_f_one_b,
    v_half,
    zb_h1,
    zbv,
)
from strategies.planning.simulator import ActionCosts, simulate

_POST = re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)")


def operations(text: str, process_of: Sequence[int]) -> list[Operation]:
    """Read a row as torch prints it; parentheses enclose a group, and other words are collectives of both processes."""
    row: list[Operation] = []
    members: list[Post] | None = None
    for word in re.findall(r"[()]|[^\s()]+", text):
        if word == "(":
            members = []
        elif word == ")":
            assert members is not None
            row.append(Group(tuple(members)))
            members = None
        elif match := _POST.fullmatch(word):
            stage, way, kind, m = int(match[1]), match[2], match[3], int(match[4])
            next_one = (way == "SEND") == (kind == "F")
            other = process_of[stage + 1 if next_one else stage - 1]
            post = Post(cast(Any, way), cast(Any, kind), m, stage + next_one, other)
            assert repr(post) == word
            row.append(post) if members is None else members.append(post)
        else:
            row.append(Action.parse(word))
    return row


def rows_of(process_of: Sequence[int], *rows: str) -> list[list[Operation]]:
    return [operations(row, process_of) for row in rows]


def naive(table: ActionTable, placement: Placement | None = None) -> list[list[Operation]]:
    """Each receive directly before the action that needs it, each send directly after its action."""
    placement = placement or Placement.of(table)
    process_of, num = placement.process_of, placement.num_stages
    all_actions = {action for row in table for action in row}
    rows: list[list[Operation]] = []
    for r, actions in enumerate(table):
        row: list[Operation] = []
        for action in actions:
            for source in sources_of(action, num):
                if source in all_actions and isinstance(source, Action) and process_of[source.stage] != r:
                    row.append(Post("RECV", *_value(action), process_of[source.stage]))
            row.append(action)
            for target in all_actions:
                if process_of[target.stage] != r and action in sources_of(target, num):
                    row.append(Post("SEND", *_value(target), process_of[target.stage]))
        rows.append(row)
    return rows


def _value(action: Action) -> tuple[Any, int, int]:
    edge = edge_to(action)
    assert edge is not None
    return edge[0], action.microbatch, edge[1]


def ours(table: ActionTable) -> list[list[Operation]]:
    """The posting order of a table whose last process is the driver, without the driver's code."""
    tables = Programs(lambda m: table, Placement.of(table))
    actions = tables.actions_of_step(1 + max(action.microbatch for action in table[0]))
    return posting_order(actions, len(tables.rank_of))


CROSSING = rows_of(
    [0, 1, 0],
    "0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 2F0 2RECV_F1 2F1",
    "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1",
)
GROUPED = rows_of(
    [0, 1, 0],
    "0F0 0SEND_F0 0F1 (0SEND_F1 2RECV_F0) 2F0 2RECV_F1 2F1",
    "1RECV_F0 1F0 (1SEND_F0 1RECV_F1) 1F1 1SEND_F1",
)


def test_two_sends_that_cross() -> None:
    """NVIDIA/nccl#479: two ranks send, then receive."""
    with pytest.raises(Deadlock) as failure:
        check_runs(CROSSING)
    assert str(failure.value) == (
        "deadlock: 0SEND_F1 (edge 1) of process 0 waits for 1RECV_F1 (edge 1) of process 1 waits for 1SEND_F0 (edge 2) "
        "of process 1 waits for 2RECV_F0 (edge 2) of process 0 waits for 0SEND_F1 (edge 1) of process 0"
    )
    assert [r for r, _ in failure.value.cycle] == [0, 1, 1, 0]
    with pytest.raises(Deadlock, match="0SEND_F1"):
        check_runs(CROSSING, independent_streams=True, communicator=per_pair)
    check_runs(CROSSING, independent_streams=True)  # as the two directions have a communicator each


@pytest.mark.parametrize("communicator", [per_edge, per_pair, for_all])
@pytest.mark.parametrize("independent", [False, True])
def test_a_group_of_send_and_receive_crosses(communicator: Callable[[int, Post], Any], independent: bool) -> None:
    check_runs(GROUPED, communicator=communicator, independent_streams=independent)


def test_a_group_of_two_receives_waits_for_the_later_one() -> None:
    """pytorch/PiPPy#969: a stage receives a skip and its input in one batch, and the skip's sender has a batch, too."""
    skip, skipped = Post("SEND", "F", 0, 3, 2), Post("RECV", "F", 0, 3, 0)
    process_of = [0, 1, 2, 2]
    first = [Action("F", 0, 0), Action("F", 0, 2)]  # the second one stands for the code that stashes the skip
    value, middle = Post("SEND", "F", 0, 1, 1), rows_of(process_of, "1RECV_F0 1F0 1SEND_F0")[1 - 1]
    received, last_actions = Group((Post("RECV", "F", 0, 2, 1), skipped)), [Action("F", 0, 2), Action("F", 0, 3)]
    last: list[Operation] = [received, *last_actions]
    with pytest.raises(
        Deadlock, match=r"\(2RECV_F0 3RECV_F0\) of process 2 waits for 1SEND_F0 \(edge 2\) of process 1"
    ):
        check_runs([[*first, Group((value, skip))], middle, last], communicator=for_all)
    check_runs([[*first, value, skip], middle, [*received.posts, *last_actions]], communicator=for_all)


@pytest.mark.parametrize("make", [one_f_one_b, interleaved, zb_h1, zbv, v_half], ids=lambda make: make.__name__)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8)])
def test_receives_right_before_their_actions_deadlock(make: Callable[[int, int], ActionTable], p: int, m: int) -> None:
    """pytorch/pytorch#172668: two ranks wait for their sends, and neither has posted its receive.

    So do devices that run one operation at a time, and independent streams with one communicator per pair of ranks
    (NVIDIA/nccl#783, #1347) or for all (pytorch/pytorch#186173, #195760). With one per edge and direction, independent
    streams run.
    """
    rows = naive(make(p, m))
    others: dict[str, Any]
    for others in (
        {},
        {"independent_streams": True, "communicator": per_pair},
        {"independent_streams": True, "communicator": for_all},
    ):
        with pytest.raises(
            ValueError, match=r"^deadlock: .* \(edge \d+\) of process \d+ waits for |would get the wrong"
        ):
            check_runs(rows, **others)
    check_runs(rows, independent_streams=True)


def test_which_order_needs_no_care() -> None:
    check_runs(naive(gpipe(4, 8)))


def test_two_neighbours_that_are_the_same_process() -> None:
    """NVIDIA/Megatron-LM#750, #1451: between two ranks, next and previous are one, and values are mixed up."""
    with pytest.raises(ValueError, match=r"2SEND_B0 \(edge 2\) of process 0 meets 1RECV_F1 \(edge 1\) of process 1"):
        check_runs(
            rows_of(
                [0, 1, 0],
                "0F0 0SEND_F0 0F1 2RECV_F0 2F0 2B0 (2SEND_B0 0SEND_F1)",
                "1RECV_F0 1F0 1SEND_F0 (1RECV_F1 1RECV_B0) 1B0 1F1",
            ),
            communicator=per_pair,
        )


def test_a_fixed_order_of_four_exchanges() -> None:
    """NVIDIA/Megatron-LM#5100: shapes go in the order send back, receive, send on, receive back on every rank."""
    table = one_f_one_b(4, 8)
    rows = naive(table)
    for row in rows:  # in the steady state: send on what was computed before the gradient was sent back
        for k in range(len(row) - 1):
            first, second = row[k], row[k + 1]
            if isinstance(first, Post) and isinstance(second, Post) and first.way == "RECV":
                row[k], row[k + 1] = second, first
    with pytest.raises(Deadlock):
        check_runs(rows)
    check_runs(ours(table))


def test_communicators_that_are_created_when_they_are_needed() -> None:
    """NVIDIA/Megatron-LM#5240, pytorch/pytorch#160210: creation waits for both ranks, and a ring waits for itself."""
    ring = rows_of(
        [0, 1, 2, 0],
        "0F0 0SEND_F0 3RECV_F0 3F0",
        "1RECV_F0 1F0 1SEND_F0",
        "2RECV_F0 2F0 2SEND_F0",
    )
    pairs = [Collective(f"create {r} {s}", (r, s)) for r, s in ((0, 1), (1, 2), (0, 2))]
    eager = [[*(pair for pair in pairs if r in pair.ranks), *row] for r, row in enumerate(ring)]
    check_runs(eager)
    for collective, at in ((pairs[0], [0, 1]), (pairs[1], [1, 2]), (pairs[2], [2, 0])):
        for place, r in enumerate(at):
            eager[r].remove(collective)
            eager[r].insert(place, collective)  # each rank first connects to the next one
    with pytest.raises(Deadlock, match="create 0 1 of process 0 waits for create 0 1 of process 1"):
        check_runs(eager)


def test_a_receive_ahead_of_time_blocks_the_warm_up() -> None:
    """pytorch/pytorch#188833: with one stream, a receive of a later chunk delays sends that are ready."""
    table = interleaved(4, 8)
    seconds = {"F": 1.0, "B": 2.0}
    least = simulate(table, ActionCosts(backward=2.0)).total_time

    def time(rows: list[list[Operation]], **others: Any) -> float:
        return check_runs(rows, independent_streams=True, seconds=lambda step: seconds.get(step[0], 0.0), **others)

    rows = ours(table)
    one_stream = time(rows, communicator=for_all)
    assert time(rows) == one_stream == least
    wanted = next(k for k, operation in enumerate(rows[0]) if repr(operation) == "4RECV_F0")
    assert [repr(operation) for operation in rows[0][wanted - 1 : wanted + 3]] == ["0F3", "4RECV_F0", "0SEND_F3", "4F0"]
    receive = rows[0].pop(wanted)
    place = next(k for k, operation in enumerate(rows[0]) if repr(operation) == "0F2")  # does not need it
    ahead = [[*rows[0][:place], receive, *rows[0][place:]], *rows[1:]]
    assert time(ahead) == least  # it has a stream of its own
    assert time(ahead, communicator=for_all) > one_stream
    at_once = [*rows[0][:2], receive, *rows[0][2:]]
    with pytest.raises(Deadlock, match="4RECV_F0"):  # process 0 waits for the shape, and posts no other micro-batch
        time([at_once, *rows[1:]])


def test_a_cyclic_table() -> None:
    """Stage 0 wants the first gradient before it sends the second input, which stage 1 wants before it goes back."""
    table = [
        [Action("F", 0, 0), Action("B", 0, 0), Action("F", 1, 0), Action("B", 1, 0)],
        [Action("F", 0, 1), Action("F", 1, 1), Action("B", 0, 1), Action("B", 1, 1)],
    ]
    with pytest.raises(ValueError, match="deadlock: process 0 is at 0B0"):
        simulate(table)
    for independent in (False, True):
        with pytest.raises(Deadlock) as failure:
            check_runs(naive(table), independent_streams=independent)
        assert {repr(operation) for _, operation in failure.value.cycle} >= {"0RECV_B0", "1RECV_F1"}


def test_what_cannot_be_right() -> None:
    def check(*rows: str) -> None:
        check_runs(rows_of([0, 1], *rows))

    with pytest.raises(
        ValueError, match=r"process 0 posts 0SEND_F0 \(edge 1\) before the action whose result it sends"
    ):
        check("0SEND_F0 0F0", "1RECV_F0 1F0")
    with pytest.raises(ValueError, match=r"process 1 posts 1RECV_F0 \(edge 1\), but no action after it that needs"):
        check("0F0 0SEND_F0", "1F0 1RECV_F0")
    with pytest.raises(ValueError, match=r"process 1 does not post the counterpart of 0SEND_F0 \(edge 1\)"):
        check("0F0 0SEND_F0", "1F0")
    with pytest.raises(ValueError, match=r"process 0 does not post the counterpart of 1RECV_F0 \(edge 1\)"):
        check("0F0", "1RECV_F0 1F0")
    with pytest.raises(ValueError, match=r"0SEND_F1 \(edge 1\) of process 0 meets 1RECV_F0 \(edge 1\) of process 1"):
        check("0F0 0F1 0SEND_F1 0SEND_F0", "1RECV_F0 1F0 1RECV_F1 1F1")
