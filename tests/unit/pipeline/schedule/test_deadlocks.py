"""Tables that cannot run are refused, and others have an order in which they can; no process is needed to know."""

import pytest

from strategies.pipeline.schedule import deadlocks
from strategies.pipeline.schedule.deadlocks import assumed_times, check_complete, running_order
from strategies.pipeline.schedule.tables import SCHEDULES, Action, gpipe, interleaved, loop, one_f_one_b, v, zb_h1, zbv


def check(table, placement=None):
    return running_order(table, check_complete(table, placement).num_stages)


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_computation_comes_after_its_sources_and_in_the_order_of_its_row(name):
    table = SCHEDULES[name].table(3, 5, SCHEDULES[name].chunks[0])
    order = check(table)
    assert [[computation for r, computation, _ in order if r == row] for row in range(3)] == table
    place = {computation: k for k, (_, computation, _) in enumerate(order)}
    for k, (r, computation, awaited) in enumerate(order):
        sources = deadlocks.sources_of(computation, max(action.stage for action in place) + 1)
        assert all(place[source] < k for source in sources if source in place)
        elsewhere = [source for source in sources if source in place and source not in table[r]]
        assert elsewhere == ([] if awaited is None else [awaited])


def test_assumed_times():
    start, end = assumed_times(check(one_f_one_b(2, 1)))
    first, last = Action("F", 0, 0), Action("B", 0, 0)
    assert (start[first], start[last], end[last]) == (0, 4, 6)  # F0 F0 B0 B0, and B takes twice as long


def test_what_no_row_contains_is_there_from_the_beginning():
    backward = [[action for action in row if action.kind == "B"] for row in gpipe(2, 2)]
    assert len(running_order(backward, 2)) == 4


def test_deadlock_names_who_waits_for_what():
    backward_before_forward = [[Action("B", 0, 0), Action("F", 0, 0)]]
    with pytest.raises(
        ValueError, match=r"deadlock: process 0 is at 0B0 and waits for 0F0 of process 0\nprocess 0: 0B0 0F0"
    ):
        check(backward_before_forward)
    # Stage 0 wants the first gradient before it sends the second input, which stage 1 wants before it goes back.
    table = [
        [Action("F", 0, 0), Action("B", 0, 0), Action("F", 1, 0), Action("B", 1, 0)],
        [Action("F", 0, 1), Action("F", 1, 1), Action("B", 0, 1), Action("B", 1, 1)],
    ]
    with pytest.raises(
        ValueError,
        match="deadlock: process 0 is at 0B0 and waits for 1B0 of process 1; process 1 is at 1F1 and waits for 0F1 of ",
    ):
        check(table)


def test_incomplete_tables():
    with pytest.raises(ValueError, match="the schedule has no actions"):
        check([[], []])
    table = gpipe(2, 3)
    table[1].remove(Action("B", 2, 1))
    with pytest.raises(
        ValueError, match=r"process 1 lacks 1B2\nprocess 0: 0F0 0F1 0F2 0B2 .*\nprocess 1: 1F0 1F1 1F2 1B1 1B0"
    ):
        check(table)
    table = gpipe(2, 3)
    table[0].append(Action("F", 1, 0))
    with pytest.raises(ValueError, match="process 0 has 0F1 more than once"):
        check(table)


def test_wrong_placement():
    with pytest.raises(ValueError, match=r"process 0 has 2F0, but stage 2 is on process 1\nprocess 0: 0F0"):
        check(interleaved(2, 2), v(2))
    with pytest.raises(ValueError, match="the table has 2 rows for 3 processes"):
        check(interleaved(2, 2), loop(3))
    with pytest.raises(ValueError, match="process 0 has 2F0, but there are 2 stages"):
        check(interleaved(2, 2), loop(2))
    table = gpipe(2, 2)
    table[0].append(table[1].pop())
    with pytest.raises(ValueError, match="process 1 has 1F0, but process 0 has other actions of stage 1; all actions"):
        check(table)
    with pytest.raises(ValueError, match="no process has actions of stage 1, but there is a stage 2"):
        check([row for i, row in enumerate(gpipe(3, 2)) if i != 1])


def test_parts_of_a_backward_pass():
    table = zb_h1(2, 2)
    table[0].remove(Action("W", 1, 0))
    with pytest.raises(ValueError, match="process 0 lacks 0W1"):
        check(table)
    table = zb_h1(2, 2)
    table[0].append(Action("B", 1, 0))
    with pytest.raises(ValueError, match=r"process 0 has 0B1 and 0I1; a backward pass is either whole \(B\) or in two"):
        check(table)
    table = [[Action("F", 0, 0), Action("W", 0, 0), Action("I", 0, 0)]]
    with pytest.raises(ValueError, match="process 0 is at 0W0 and waits for 0I0 of process 0"):
        check(table)


def test_deadlock_of_several_stages():
    table = zbv(2, 3)
    first, second = table[1].index(Action("F", 0, 1)), table[1].index(Action("F", 0, 2))
    table[1][first], table[1][second] = table[1][second], table[1][first]
    with pytest.raises(
        ValueError,
        match="process 0 is at 3F0 and waits for 2F0 of process 1; process 1 is at 2F0 and waits for 1F0 of process 1",
    ):
        check(table)


def test_preparation_is_linear_in_the_actions(monkeypatch):
    """Rows are not searched again for each action that waits."""
    calls = 0
    sources_of = deadlocks.sources_of

    def counted(*arguments):
        nonlocal calls
        calls += 1
        return sources_of(*arguments)

    monkeypatch.setattr(deadlocks, "sources_of", counted)
    table = zbv(4, 200)
    check(table)
    assert calls < 3 * sum(map(len, table))
