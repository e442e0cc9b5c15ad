"""Records of a step: times by part, the timetable and its bubble, the prediction, and the trace."""

from dataclasses import replace
from itertools import chain

import pytest

from strategies.pipeline.schedule.operations import UserCode
from strategies.pipeline.schedule.tables import SCHEDULES, Action, ActionTable, Placement, loop
from strategies.pipeline.stage.records import Record
from strategies.planning.measured import (
    from_first_forward,
    measured_timetable,
    parts_of,
    predicted_timetable,
    trace_of,
    uses_of,
)
from strategies.planning.simulator import ActionCosts, DriverCosts, Simulation, simulate, with_driver_between

LOSS = 0.25
"""What the driver's code after the call of the module takes, per micro-batch."""


def recorded(simulation: Simulation) -> list[list[Record]]:
    """What processes would record if they ran a timetable in which the loss is a part of the last stage's forward."""
    last = simulation.placement.num_stages - 1
    rows = []
    for steps in simulation.rows:
        row, free = [], 0.0
        for step in steps:
            start, end = simulation.start[step], simulation.end[step]
            if isinstance(step, UserCode):
                row.append(Record(step.part, step.microbatch, step.stage, 0, free, start, end, end))
            else:
                ends = end - LOSS if step.kind == "F" and step.stage == last else end
                row.append(Record(step.kind, step.microbatch, step.stage, 0, free, start, ends, ends))
                if ends < end:
                    row.append(Record("loss", step.microbatch, last, 0, ends, ends, end, end))
            free = end
        rows.append([*row, Record("step", -1, -1, -1, free, free, free + 1.0, free + 1.0)])
    return rows


def table_of(name: str, microbatches: int = 4, num_lists: int = 1) -> ActionTable:
    """The table of a schedule for three processes."""
    return SCHEDULES[name].of(3, microbatches, SCHEDULES[name].chunks[1], num_lists)


PER_MICROBATCH = {name: named for name, named in SCHEDULES.items() if name != "gpipe"}


@pytest.mark.parametrize(
    ("name", "num_lists"),
    [
        *((name, 1) for name in PER_MICROBATCH),
        *((name, 2) for name, named in PER_MICROBATCH.items() if named.lists is not None),
    ],
)
def test_a_step_without_noise_is_as_predicted(name: str, num_lists: int) -> None:
    table = table_of(name, num_lists=num_lists)
    num = 1 + max(action.stage for action in chain(*table))
    forward = [1.0 + i / 8 for i in range(num)]
    between = [(0.25, 0.375)] * (num_lists - 1)
    driver = DriverCosts(before=0.125, after=LOSS, before_backward=0.0625, between=between)
    costs = ActionCosts(forward, 2.0, 1.0, 1.25, transfer=0.03125, driver=driver)
    expected = simulate(table, costs, placement=replace(Placement.of(table), num_lists=num_lists))
    rows = recorded(expected)
    measured = measured_timetable(rows, num_lists)
    assert measured is not None
    assert measured.end == pytest.approx(expected.end) and measured.start == pytest.approx(expected.start)
    assert measured.bubble_fraction == pytest.approx(expected.bubble_fraction)
    predicted = predicted_timetable(rows, measured, table, whole_batch=False)
    assert predicted.end == pytest.approx(expected.end)
    shown = from_first_forward(measured)
    assert 1 - sum(uses_of(shown)) / 3 == pytest.approx(shown.bubble_fraction)
    assert min(shown.start.values()) == 0 and shown.total_time < measured.total_time


def test_under_gpipe_the_loss_is_between() -> None:
    table = table_of("gpipe", 2)
    rows: list[list[Record]] = [[], [], []]
    plain = simulate(table, ActionCosts(1.0, 2.0))
    for r, row in enumerate(table):
        for action in row:
            wait = 0.0 if action.kind == "F" else 5.0  # what the loss takes
            start, end = plain.start[action] + wait, plain.end[action] + wait
            rows[r].append(Record(*action, 3, start, start, end, end))
            if r == 2 and action[:2] == ("F", 1):
                rows[r].append(Record("loss", 1, 2, 3, end, end, end + 5, end + 5))
    measured = measured_timetable(rows)
    assert measured is not None and measured.total_time == plain.total_time + 5
    assert measured.bubble_fraction == pytest.approx(1 - (3 * 6 + 5) / (3 * 17))
    predicted = predicted_timetable(rows, measured, table, whole_batch=True)
    assert predicted.end == pytest.approx(measured.end)
    assert predicted.bubble_fraction == pytest.approx(measured.bubble_fraction)


def test_under_gpipe_the_passes_of_all_lists_are_one_timetable() -> None:
    """Each list is a pass with a number of its own; the code between two lists runs once."""
    table, placement = table_of("gpipe", 2, 2), loop(3).repeated(2)
    plain = simulate(table, ActionCosts(1.0, 2.0), placement=placement, at_once=True)
    expected = with_driver_between(plain, DriverCosts(after=5.0, between=[(3.0, 4.0)]))
    rows: list[list[Record]] = [[], [], []]
    for r, row in enumerate(expected.rows):
        for step in row:
            start, end, number = expected.start[step], expected.end[step], 7 + placement.list_of(step.stage)
            is_last = isinstance(step, Action) and step == Action("F", 1, 5)
            ends = end - 5.0 if is_last else end
            rows[r].append(Record(step[0], step.microbatch, step.stage, number, start, start, ends, ends))
            if is_last:
                rows[r].append(Record("loss", 1, 5, number, ends, ends, end, end))
    measured = measured_timetable(rows, 2)
    assert measured is not None and measured.placement == placement
    assert measured.start == expected.start and measured.end == expected.end
    predicted = predicted_timetable(rows, measured, table, whole_batch=True)
    assert predicted.end == pytest.approx(measured.end) and predicted.start == pytest.approx(measured.start)
    assert measured_timetable([[record for record in row if record.number == 8] for row in rows], 2) is None


def test_parts_add_up() -> None:
    row = [
        Record("F", 0, 0, 7, 0.0, 1.0, 3.0, 3.5),
        Record("I", 0, 0, 7, 4.0, 4.5, 6.0, 6.25),  # from 3.5 to 4.0 it waited for a command
        Record("W", 0, 0, 7, 6.25, 6.25, 7.0, 7.0),
        Record("step", -1, -1, -1, 8.0, 8.0, 9.0, 9.0),
    ]
    parts = parts_of(row)
    assert parts == {
        "forward": 2.0,
        "backward": 1.5,
        "weight_gradients": 0.75,
        "code": 0.0,
        "optimizer": 1.0,
        "waiting": 2.0,
        "sending": 0.75,
    }
    assert sum(parts.values()) == 9.0 - 1.0  # between the last action and the optimizer's step it did none of these


def test_a_step_without_backward_pass_has_no_timetable() -> None:
    assert measured_timetable([[Record("F", 0, 0, 0, 0.0, 0.0, 1.0, 1.0)], []]) is None


def test_only_the_last_training_pass_is_drawn() -> None:
    def of_pass(number: int, begin: float) -> list[Record]:
        times = (begin, begin, begin + 1, begin + 1)
        return [Record("F", 0, 0, number, *times), Record("B", 0, 0, number, *(time + 1 for time in times))]

    evaluated = Record("F", 0, 0, 3, 9.0, 9.0, 10.0, 10.0)
    measured = measured_timetable([[*of_pass(1, 0.0), *of_pass(2, 5.0), evaluated]])
    assert measured is not None and measured.total_time == 2.0 and measured.bubble_fraction == 0.0


def test_trace() -> None:
    rows = [
        [Record("F", 0, 0, 0, 10.0, 10.0, 10.002, 10.003)],
        [Record("F", 0, 1, 0, 10.0, 10.004, 10.006, 10.006)],
    ]
    events = trace_of(rows, ["stage 0", "driver"])["traceEvents"]
    slices = [(e["name"], e["pid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert slices == [
        ("0F0", 0, 10_000_000.0, 2000.0),
        ("send of 0F0", 0, 10_002_000.0, 1000.0),
        ("wait for 1F0", 1, 10_000_000.0, 4000.0),
        ("1F0", 1, 10_004_000.0, 2000.0),
    ]
    (start,), (finish,) = ([e for e in events if e["ph"] == phase] for phase in "sf")
    assert start["id"] == finish["id"] and (start["pid"], finish["pid"]) == (0, 1)
    assert 10_002_000 < start["ts"] < 10_003_000 and finish["ts"] == 10_004_000
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "stage 0", 1: "driver"}


def test_records_move_to_another_clock() -> None:
    record = Record("F", 1, 2, 3, 1.0, 2.0, 3.0, 4.0)
    assert record.shifted(-1.0) == Record("F", 1, 2, 3, 0.0, 1.0, 2.0, 3.0)
    assert repr(record) == repr(Action("F", 1, 2))
