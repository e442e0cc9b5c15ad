"""Evaluate the records of the processes of a pipeline in a step: times, a timetable, a prediction, a trace.

All times are seconds of one clock.

Index letters: ``m`` micro-batch, ``i`` stage of a table (a chunk of layers), ``r`` process.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from strategies.pipeline.schedule.operations import Computation, UserCode
from strategies.pipeline.schedule.tables import Action, ActionTable, Placement
from strategies.pipeline.stage.records import Record, RecordKind
from strategies.planning.simulator import (
    ActionCosts,
    DriverCosts,
    Simulation,
    simulate,
    with_driver_between,
)

PARTS: dict[RecordKind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward",
    "W": "weight_gradients",
    "b": "code",
    "feed": "code",
    "loss": "code",
    "a": "code",
    "step": "optimizer",
}
"""The part of a step to which each kind of record belongs."""


def parts_of(records: Sequence[Record]) -> dict[str, float]:
    """Return the seconds that a process spent in each part of a step.

    Waiting includes the wait for input and, within a pass, for the command to continue.
    """
    parts = dict.fromkeys((*PARTS.values(), "waiting", "sending"), 0.0)
    for before, record in zip([None, *records], records, strict=False):
        ready = before.end if before is not None and before.number == record.number >= 0 else record.begin
        parts["waiting"] += record.received - ready
        parts[PARTS[record.kind]] += record.computed - record.received
        parts["sending"] += record.end - record.computed
    return parts


def measured_timetable(rows: Sequence[Sequence[Record]], num_lists: int = 1) -> Simulation | None:
    """Return the last pass of a step that has a backward part, in the form of a simulation that begins at 0.

    If there are several lists of layers, this is the last such pass through each list.

    A step of the timetable lasts until the process has handed its output to the transport. The code after the call of
    the module belongs to the last stage's forward pass, as in a simulation.

    Args:
        rows: The records of each process, the driver's last.
        num_lists: The number of lists of layers.

    Returns:
        The timetable; ``None`` if there is no such pass.
    """
    if not (numbers := last_passes(rows, num_lists)):
        return None
    start: dict[Computation, float] = {}
    end: dict[Computation, float] = {}
    steps: list[list[Computation]] = [[] for _ in rows]
    process_of: dict[int, int] = {}
    for r, row in enumerate(rows):
        for kind, m, i, own, _, received, _, ended in row:
            if own not in numbers:
                continue
            step: Computation
            if kind == "loss":
                end[Action("F", m, i)] = ended
                continue
            if kind == "feed":
                if UserCode("b", m, i) in end:  # the code runs once per micro-batch, or the first one follows it
                    end[UserCode("b", m, i)] = ended
                continue
            if kind == "b" or kind == "a":
                step = UserCode(kind, m, i)
            elif kind == "step":
                continue
            else:
                step, process_of[i] = Action(kind, m, i), r
            start[step], end[step] = received, ended
            steps[r].append(step)
    first = min(start.values())
    start, end = ({step: time - first for step, time in times.items()} for times in (start, end))
    total, idle = _total_and_idle(steps, start, end)
    return Simulation(
        rows=steps,
        placement=Placement(tuple(process_of[i] for i in range(len(process_of))), num_lists),
        start=start,
        end=end,
        total_time=total,
        bubble_fraction=idle,
        peak_activations=[],
        peak_bytes=[],
    )


def last_passes(rows: Sequence[Sequence[Record]], num_lists: int) -> set[int]:
    """Return the number of the last pass through each list of layers that has a backward part.

    Schedules that interleave passes have one pass for all lists.

    Args:
        rows: The records of each process.
        num_lists: The number of lists of layers.

    Returns:
        The numbers; none of them if there is no such pass through one of the lists.
    """
    num_stages = 1 + max((record.stage for row in rows for record in row if record.kind == "F"), default=-1)
    last: dict[int, int] = {}
    for record in (record for row in rows for record in row if record.kind in ("B", "I")):
        of_list = record.stage * num_lists // num_stages
        last[of_list] = max(record.number, last.get(of_list, -1))
    return {*last.values()} if len(last) == num_lists else set()


def from_first_forward(timetable: Simulation) -> Simulation:
    """Return a timetable from the start of the first forward pass on.

    Before that, stages may be busy with the previous step. Earlier work of the driver is left out, and so is code of
    the driver that takes no time because there is none.
    """
    first = min(start for step, start in timetable.start.items() if isinstance(step, Action))
    shown = {
        step
        for step, end in timetable.end.items()
        if isinstance(step, Action) or end > max(first, timetable.start[step])
    }
    start = {step: max(0.0, timetable.start[step] - first) for step in shown}
    end = {step: timetable.end[step] - first for step in shown}
    rows = [[step for step in row if step in shown] for row in timetable.rows]
    total, idle = _total_and_idle(rows, start, end)
    return replace(timetable, rows=rows, start=start, end=end, total_time=total, bubble_fraction=idle)


def _total_and_idle(
    rows: list[list[Computation]], start: dict[Computation, float], end: dict[Computation, float]
) -> tuple[float, float]:
    """Return the total time, and the idle share of the time of all processes."""
    total = max(end.values())
    busy = sum(end[step] - start[step] for step in end)
    return total, 1 - busy / (total * len(rows))


def uses_of(timetable: Simulation) -> list[float]:
    """Return the share of the time in which each process has work, 0 to 1."""
    busy = [sum(timetable.end[step] - timetable.start[step] for step in row) for row in timetable.rows]
    return [seconds / timetable.total_time for seconds in busy]


def predicted_timetable(
    rows: Sequence[Sequence[Record]], measured: Simulation, table: ActionTable, *, whole_batch: bool
) -> Simulation:
    """Simulate a table with the measured costs of a step: the mean of each kind of action of each stage.

    The difference from the measured timetable comes from the deviation of single actions from their mean, and from the
    engine's work between actions.

    Args:
        rows: The records of each process, the driver's last.
        measured: The timetable of these records.
        table: The actions of each process, in the order of ``rows``.
        whole_batch: Whether the driver's code runs once, between forward and backward passes.
    """
    num_stages = measured.placement.num_stages
    seconds: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for step, end in measured.end.items():
        seconds[step[0], step.stage].append(end - measured.start[step])

    def mean(kind: str, i: int = 0) -> float:
        return statistics.fmean(seconds[kind, i] or [0.0])

    def means(kind: str) -> list[float]:
        return [mean(kind, i) for i in range(num_stages)]

    forward, loss, placement = means("F"), 0.0, measured.placement
    if whole_batch:
        i, m = num_stages - 1, max(step.microbatch for step in measured.end)
        numbers = last_passes(rows, placement.num_lists)
        own = (record for row in rows for record in row if record.number in numbers)
        loss = sum(record.end - record.begin for record in own if record.kind == "loss")
        forward[i] = (sum(seconds["F", i]) - loss) / (m + 1)
    between = [(mean("b", first), mean("a", first)) for first in placement.firsts[1:]]
    costs = ActionCosts(
        forward=forward,
        backward=means("B"),
        input_grad=means("I"),
        weight_grad=means("W"),
        transfer=transfer_seconds(rows),
        driver=DriverCosts() if whole_batch else DriverCosts(mean("b"), 0.0, mean("a"), between),
    )
    simulation = simulate(table, costs, placement=placement, at_once=whole_batch)
    return with_driver_between(simulation, DriverCosts(after=loss, between=between)) if whole_batch else simulation


def transfer_seconds(rows: Sequence[Sequence[Record]]) -> float:
    """Return the median time from the end of a send until a process that already waited for the value has it."""
    return statistics.median([seconds for _, seconds in transfers(rows)] or [0.0])


def transfers(rows: Sequence[Sequence[Record]]) -> Iterator[tuple[Record, float]]:
    """Yield each send for whose value a process already waited, with the time until the process has the value."""
    for (_, sent), (_, received) in _messages(rows):
        if received.begin <= sent.end:
            yield sent, max(0.0, received.received - sent.end)


def _messages(rows: Sequence[Sequence[Record]]) -> Iterator[tuple[tuple[int, Record], tuple[int, Record]]]:
    """Return the sender's and the receiver's record of each value between stages of two processes, with the process.

    Values that the code between two lists of layers takes from one stage and sends to the next are left out.
    """
    firsts = {record.stage for row in rows for record in row if record.kind == "feed"}
    done = {
        (record.number, "F" if record.kind == "F" else "B", record.microbatch, record.stage): (r, record)
        for r, row in enumerate(rows)
        for record in row
        if record.kind in ("F", "B", "I")
    }
    for (number, direction, m, i), (r, record) in done.items():
        sent = done.get((number, direction, m, i - 1 if direction == "F" else i + 1))
        if sent is not None and sent[0] != r and (i if direction == "F" else i + 1) not in firsts:
            yield sent, (r, record)


def trace_of(rows: Sequence[Sequence[Record]], names: Sequence[str]) -> dict[str, Any]:
    """Return a trace in the JSON format of Chrome's trace events, which Perfetto shows, with arrows for messages.

    Args:
        rows: The records of each process.
        names: The names of the processes.
    """
    events: list[dict[str, Any]] = []
    for r, (row, name) in enumerate(zip(rows, names, strict=True)):
        for kind, value in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": r})):
            events.append({"ph": "M", "name": kind, "pid": r, "tid": 0, "args": value})
        for record in row:
            what = {"microbatch": record.microbatch, "stage": record.stage, "pass": record.number}
            for label, category, start, end in (
                (f"wait for {record!r}", "waiting", record.begin, record.received),
                (repr(record), PARTS[record.kind], record.received, record.computed),
                (f"send of {record!r}", "sending", record.computed, record.end),
            ):
                if end > start:
                    events.append(_event("X", label, category, r, start, dur=_micro(end - start), args=what))
    for number, ((sender, sent), (receiver, received)) in enumerate(_messages(rows)):
        middle = (sent.computed + sent.end) / 2
        events.append(_event("s", "message", "message", sender, middle, id=number))
        events.append(_event("f", "message", "message", receiver, received.received, id=number, bp="e"))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _event(phase: str, name: str, category: str, process: int, time: float, **others: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "cat": category, "pid": process, "tid": 0, "ts": _micro(time), **others}


def _micro(seconds: float) -> float:
    return round(1e6 * seconds, 3)
