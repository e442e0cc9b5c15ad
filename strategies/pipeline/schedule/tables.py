"""Schedules as data: tables of actions per stage, and a simulator that proves and times them without running them.

A schedule says in which order a stage does its work and nothing about when: each stage takes the next action of its row
as soon as the input of that action is there. Four micro-batches on three stages, forward and backward of equal cost
(``render`` prints these; ``F3`` is the forward pass of micro-batch 3, ``B3`` its backward pass, ``.`` is idle)::

    gpipe: fill, then drain                           1f1b: as soon as a stage can go backward, it does

    stage 0  F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0      stage 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    stage 1  .  F0 F1 F2 F3 .  .  B3 B2 B1 B0 .       stage 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    stage 2  .  .  F0 F1 F2 F3 B3 B2 B1 B0 .  .       stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

    live activations: 4, 4, 4                         live activations: 3, 2, 1

Both take the same time; the bubble, the idle share of the grid, is (p - 1) / (m + p - 1) with p stages and m
micro-batches. They differ in memory: ``gpipe`` holds every micro-batch on every stage, ``1f1b`` at most p - i of them
on stage i.

Legend: m micro-batch, i stage, p number of stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["F", "B"]
_KINDS: tuple[Kind, ...] = ("F", "B")


class Action(NamedTuple):
    """One pass of one micro-batch through one stage.

    The stage is part of the action, not only of its place in the table, so that a row may come to hold the actions of
    several stages; ``kind`` may come to name the input and the weight part of a split backward pass.
    """

    kind: Kind
    microbatch: int
    stage: int

    def __repr__(self) -> str:
        return f"{self.kind}{self.microbatch}"


Schedule: TypeAlias = list[list[Action]]
"""One row of actions per process, in the order in which the process does them."""


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forward passes, then all backward passes in reverse order (Huang et al., 2019, https://arxiv.org/abs/1811.06965).

    The last micro-batch goes back first: it is the one whose activations were just computed, and which
    ``checkpoint="except_last"`` has kept, so that the drain starts at once.

    Raises:
        ValueError: fewer than one stage or micro-batch.
    """
    _check_counts(stages, microbatches)
    return [
        [Action("F", m, i) for m in range(microbatches)] + [Action("B", m, i) for m in reversed(range(microbatches))]
        for i in range(stages)
    ]


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """One forward, one backward in turn (Narayanan et al., 2019, "PipeDream-Flush", https://arxiv.org/abs/2006.09503).

    Stage i starts with as many forward passes as there are stages from it to the end, which is how long the first
    gradient takes to come back; from then on each backward pass frees the memory that the next forward pass takes.

    Raises:
        ValueError: fewer than one stage or micro-batch.
    """
    _check_counts(stages, microbatches)
    return [_one_f_one_b_row(i, num_warm_up=min(stages - i, microbatches), num=microbatches) for i in range(stages)]


def _one_f_one_b_row(i: int, *, num_warm_up: int, num: int) -> list[Action]:
    row = [Action("F", m, i) for m in range(num_warm_up)]
    for m in range(num):
        row.append(Action("B", m, i))
        if num_warm_up + m < num:
            row.append(Action("F", num_warm_up + m, i))
    return row


SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}
"""The schedules by the name that a user gives."""


@dataclass(frozen=True)
class Simulation:
    """What a schedule does when its actions take a given time.

    Attributes:
        schedule: the table that was run.
        start: when each action starts; the unit is that of the costs.
        end: when each action ends.
        total_time: when the last action ends.
        bubble_fraction: the idle share of all processes' time, 0 to 1.
        peak_activations: per stage, the most micro-batches that have gone forward but not yet back.
    """

    schedule: Schedule
    start: dict[Action, float]
    end: dict[Action, float]
    total_time: float
    bubble_fraction: float
    peak_activations: list[int]


def simulate(
    schedule: Schedule,
    *,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 1.0,
    transfer: float = 0.0,
) -> Simulation:
    """Runs the rows of a schedule against each other and so proves that it can run.

    An action starts when its process has done the one before, and when what it needs is there: a forward pass needs
    that of the stage before, a backward pass its own forward pass and the backward pass of the stage after.

    Args:
        schedule: one row of actions per process.
        forward: the time of one micro-batch's forward pass, one number or one per stage.
        backward: the same for the backward pass; usually about twice the forward pass.
        transfer: the time to send one micro-batch's activations or gradients from one process to the next.

    Raises:
        ValueError: the table lacks or repeats an action, its processes wait for each other for ever, or a cost is
            negative or not given for every stage.
    """
    num_stages = _check_complete(schedule)
    costs = {"F": _per_stage("forward", forward, num_stages), "B": _per_stage("backward", backward, num_stages)}
    (transfer,) = _per_stage("transfer", transfer, 1)
    row_of = {action: row for row, actions in enumerate(schedule) for action in actions}

    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    position = [0] * len(schedule)
    free_at = [0.0] * len(schedule)
    waiting: dict[Action, list[int]] = {}  # what has to end -> the rows that wait for it
    runnable = list(range(len(schedule)))
    while runnable:
        row = runnable.pop()
        for place in range(position[row], len(schedule[row])):
            action, begin = schedule[row][place], free_at[row]
            needs = _needs(action, num_stages)
            missing = next((need for need in needs if need not in end), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(row)
                break
            for need in needs:
                begin = max(begin, end[need] + (transfer if row_of[need] != row else 0.0))
            start[action] = begin
            end[action] = free_at[row] = begin + costs[action.kind][action.stage]
            position[row] += 1
            runnable += waiting.pop(action, ())
    if waiting:
        raise ValueError(f"deadlock: {_describe_waits(schedule, position, num_stages, end)}\n{_table(schedule)}")

    total_time = max(end.values())
    busy_time = sum(end[action] - start[action] for action in end)
    idle = 1 - busy_time / (total_time * len(schedule)) if total_time else 0.0
    return Simulation(schedule, start, end, total_time, idle, _peak_activations(schedule, num_stages))


def render(schedule: Schedule | Simulation, *, time_per_column: float | None = None) -> str:
    """Draws the stage x time grid: one row per process, ``.`` where it is idle, ``=`` where an action goes on.

    Args:
        schedule: a simulation, or a schedule, which is simulated with equal costs.
        time_per_column: default: the time of the shortest action. An action that is shorter than half a column may
            be left out.

    Raises:
        ValueError: the schedule cannot run, or ``time_per_column`` is not positive.
    """
    simulation = schedule if isinstance(schedule, Simulation) else simulate(schedule)
    times = [simulation.end[action] - simulation.start[action] for action in simulation.end]
    if time_per_column is None:
        time_per_column = min((time for time in times if time > 0), default=1.0)
    elif time_per_column <= 0:
        raise ValueError(f"time_per_column must be positive, got {time_per_column}")

    def column(time: float) -> int:
        return math.floor(time / time_per_column + 0.5)

    width = max(len(repr(action)) for action in simulation.end)
    lines = []
    for row, actions in enumerate(simulation.schedule):
        cells = ["."] * column(simulation.total_time)
        for action in actions:
            first, last = column(simulation.start[action]), column(simulation.end[action])
            cells[first:last] = [repr(action), *["=" * width] * (last - first - 1)][: last - first]
        lines.append(f"stage {row}  {' '.join(cell.ljust(width) for cell in cells)}".rstrip())
    return "\n".join(lines)


def _check_counts(stages: int, microbatches: int) -> None:
    if stages < 1:
        raise ValueError(f"stages must be at least 1, got {stages}")
    if microbatches < 1:
        raise ValueError(f"microbatches must be at least 1, got {microbatches}")


def _check_complete(schedule: Schedule) -> int:
    """Every stage takes every micro-batch forward and backward exactly once. Returns the number of stages."""
    actions = [action for row in schedule for action in row]
    if not actions:
        raise ValueError("the schedule has no actions")
    seen = set(actions)
    if len(seen) < len(actions):
        twice = next(action for action in actions if actions.count(action) > 1)
        raise ValueError(f"stage {twice.stage} has {twice} more than once\n{_table(schedule)}")
    num_stages = 1 + max(action.stage for action in actions)
    num_microbatches = 1 + max(action.microbatch for action in actions)
    everything = (Action(kind, m, i) for i in range(num_stages) for m in range(num_microbatches) for kind in _KINDS)
    lacking = next((action for action in everything if action not in seen), None)
    if lacking is not None:
        raise ValueError(f"stage {lacking.stage} lacks {lacking}\n{_table(schedule)}")
    return num_stages


def _needs(action: Action, num_stages: int) -> tuple[Action, ...]:
    kind, m, i = action
    if kind == "F":
        return (Action("F", m, i - 1),) if i > 0 else ()
    return (Action("F", m, i), Action("B", m, i + 1)) if i + 1 < num_stages else (Action("F", m, i),)


def _per_stage(name: str, cost: float | Sequence[float], num_stages: int) -> list[float]:
    costs = list(cost) if isinstance(cost, Sequence) else [cost] * num_stages
    if len(costs) != num_stages:
        raise ValueError(f"{name} gives {len(costs)} costs for {num_stages} stages: {costs}")
    if any(value < 0 for value in costs):
        raise ValueError(f"{name} must not be negative, got {cost}")
    return costs


def _peak_activations(schedule: Schedule, num_stages: int) -> list[int]:
    live, peak = [0] * num_stages, [0] * num_stages
    for row in schedule:
        for kind, _, i in row:
            live[i] += 1 if kind == "F" else -1
            peak[i] = max(peak[i], live[i])
    return peak


def _describe_waits(schedule: Schedule, position: list[int], num_stages: int, end: Mapping[Action, float]) -> str:
    waits = []
    for row, actions in enumerate(schedule):
        if position[row] < len(actions):
            action = actions[position[row]]
            missing = next(need for need in _needs(action, num_stages) if need not in end)
            waits.append(f"stage {action.stage} is at {action} and waits for {missing} of stage {missing.stage}")
    return "; ".join(waits)


def _table(schedule: Schedule) -> str:
    return "\n".join(f"row {row}: {' '.join(map(repr, actions))}" for row, actions in enumerate(schedule))
