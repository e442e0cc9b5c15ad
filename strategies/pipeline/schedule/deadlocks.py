"""Prove that the rows of all processes can run: they are complete and free of deadlocks.

A process runs its row in order, and a computation waits for the results that it needs (:func:`sources_of`). So rows can
run if and only if all computations have one common order that preserves the order of each row and has each computation
after its sources::

    process 0  0F0 0F1         0B0     0B1
    process 1          1F0 1B0     1F1     1B1        one running order of the rows 0F0 0F1 0B0 0B1 and 1F0 1B0 1F1 1B1

Index letters: ``m`` micro-batch, ``i`` stage of a table (a chunk of layers), ``r`` process (the number of a row).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from strategies.pipeline.schedule.operations import Computation, UserCode
from strategies.pipeline.schedule.tables import Action, ActionTable, Placement

ASSUMED_SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "b": 0.0, "a": 0.0}
"""The assumed duration of computations without measurements, in an arbitrary unit."""


class Running(NamedTuple):
    """A computation in a running order.

    Attributes:
        row: The number of its process.
        computation: The computation.
        awaited: The computation of another process whose result it needs; ``None`` if there is none.
    """

    row: int
    computation: Computation
    awaited: Computation | None


def check_complete(table: ActionTable, placement: Placement | None = None) -> Placement:
    """Check that each stage is on one process, and runs each micro-batch forward once and backward once.

    A backward pass is whole (``B``) or in two parts (``I`` and ``W``).

    Args:
        table: The table.
        placement: The required process of each stage; by default the one that has its actions.

    Returns:
        The process of each stage.

    Raises:
        ValueError: If the table lacks or repeats an action, or has one on the wrong process.
    """
    placement = _checked_placement(table, placement)
    num_microbatches = 1 + max(action.microbatch for row in table for action in row)
    seen: set[Action] = set()
    for process, row in enumerate(table):
        for action in row:
            if action in seen:
                raise ValueError(f"process {process} has {action} more than once\n{_table(table)}")
            seen.add(action)
    for i, process in enumerate(placement.process_of):
        for m in range(num_microbatches):
            whole, parts = Action("B", m, i), [Action("I", m, i), Action("W", m, i)]
            excess = next((part for part in parts if part in seen), None)
            if whole in seen and excess is not None:
                raise ValueError(
                    f"process {process} has {whole} and {excess}; a backward pass is either whole (B) or in two parts "
                    f"(I, then W)\n{_table(table)}"
                )
            needed = [Action("F", m, i), *(parts if excess else [whole])]
            lacking = next((action for action in needed if action not in seen), None)
            if lacking is not None:
                raise ValueError(f"process {process} lacks {lacking}\n{_table(table)}")
    return placement


def running_order(rows: Sequence[Sequence[Computation]], num_stages: int) -> list[Running]:
    """Return an order in which all computations can run. Sources that are in no row exist from the start.

    Args:
        rows: The computations of each process.
        num_stages: The number of stages.

    Raises:
        ValueError: If there is no such order.
    """
    row_of = {computation: r for r, row in enumerate(rows) for computation in row}
    ended: set[Computation] = set()
    order: list[Running] = []
    position = [0] * len(rows)
    waiting: dict[Computation, list[int]] = {}  # computation that has not ended -> rows that wait for it
    runnable = list(range(len(rows)))
    while runnable:
        r = runnable.pop()
        for place in range(position[r], len(rows[r])):
            computation = rows[r][place]
            awaited = missing = None
            for source in sources_of(computation, num_stages):
                source_row = row_of.get(source)
                if source_row is None:
                    continue
                if source not in ended:
                    missing = source
                    break
                awaited = source if source_row != r else None
            if missing is not None:
                waiting.setdefault(missing, []).append(r)
                break
            order.append(Running(r, computation, awaited))
            ended.add(computation)
            position[r] += 1
            if computation in waiting:
                runnable += waiting.pop(computation)
    waits = []
    for r, row in enumerate(rows):
        if position[r] < len(row):
            computation = row[position[r]]
            sources = sources_of(computation, num_stages)
            missing = next(source for source in sources if source in row_of and source not in ended)
            waits.append(f"process {r} is at {computation} and waits for {missing} of process {row_of[missing]}")
    if waits:
        raise ValueError(f"deadlock: {'; '.join(waits)}\n{_table(rows)}")
    return order


def assumed_times(order: Sequence[Running]) -> tuple[dict[Computation, float], dict[Computation, float]]:
    """Return when each computation starts and ends if it takes :data:`ASSUMED_SECONDS` and a transfer takes no time."""
    start: dict[Computation, float] = {}
    end: dict[Computation, float] = {}
    free: dict[int, float] = {}
    for r, computation, awaited in order:
        start[computation] = max(free.get(r, 0.0), 0.0 if awaited is None else end[awaited])
        end[computation] = free[r] = start[computation] + ASSUMED_SECONDS[computation[0]]
    return start, end


def sources_of(computation: Computation, num_stages: int) -> tuple[Computation, ...]:
    """Return the computations whose results a computation needs, both for whole and for split backward passes.

    A row contains either ``B`` or ``I`` of a stage and micro-batch. ``b`` is a source of stage 0, and of the first
    stage of each list, if the driver runs code before the call of the list; the backward pass ``a`` of this code is a
    source of the stage before. The last source in any row is the one whose result the computation takes.
    """
    m = computation.microbatch
    if isinstance(computation, UserCode):
        _, _, i = computation
        if computation.part == "b":
            return (Action("F", m, i - 1),) if i > 0 else ()
        return Action("B", m, i), Action("I", m, i)
    kind, _, i = computation
    if kind == "F":
        return (Action("F", m, i - 1), UserCode("b", m, i)) if i > 0 else (UserCode("b", m),)
    if kind == "W":
        return (Action("I", m, i),)
    own = Action("F", m, i)
    if i + 1 == num_stages:
        return (own,)
    return own, Action("B", m, i + 1), Action("I", m, i + 1), UserCode("a", m, i + 1)


def _checked_placement(table: ActionTable, given: Placement | None) -> Placement:
    if given is None:
        return Placement.of(table)
    num_processes = 1 + max(given.process_of)
    if len(table) != num_processes:
        raise ValueError(f"the table has {len(table)} rows for {num_processes} processes\n{_table(table)}")
    for process, row in enumerate(table):
        for action in row:
            if action.stage >= given.num_stages:
                raise ValueError(f"process {process} has {action}, but there are {given.num_stages} stages")
            if given.process_of[action.stage] != process:
                raise ValueError(
                    f"process {process} has {action}, but stage {action.stage} is on process "
                    f"{given.process_of[action.stage]}\n{_table(table)}"
                )
    return given


def _table(rows: Sequence[Sequence[Computation]]) -> str:
    return "\n".join(f"process {r}: {' '.join(map(repr, row))}" for r, row in enumerate(rows))
