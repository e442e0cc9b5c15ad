"""Simulates schedules: proves that a table of actions can run, computes its times, and draws them.

Legend: m micro-batch, i stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strategies.pipeline.schedule.tables import KINDS, Action, Schedule


@dataclass(frozen=True)
class Simulation:
    """Times and memory of a schedule whose actions have given costs.

    Attributes:
        schedule: The simulated table.
        start: Start time of each action, in the unit of the costs.
        end: End time of each action.
        total_time: End time of the last action.
        bubble_fraction: Idle share of the time of all processes, 0 to 1.
        peak_activations: For each stage, the maximum number of micro-batches whose forward pass has run and whose
            backward pass has not.
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
    """Simulate a schedule, which proves that it runs without a deadlock.

    An action starts when its process has ended the action before it in the row, and when its inputs have arrived: a
    forward pass needs the forward pass of the stage before; a backward pass needs the forward pass of the same stage
    and the backward pass of the stage after.

    Args:
        schedule: One row of actions per process.
        forward: Time of the forward pass of one micro-batch: one number, or one per stage.
        backward: The same for the backward pass; usually about twice the forward pass.
        transfer: Time to send the activations or gradients of one micro-batch from one process to the next.

    Raises:
        ValueError: If the table lacks or repeats an action, if its processes deadlock, or if a cost is negative or not
            given for every stage.
    """
    num_stages = _check_complete(schedule)
    costs = {"F": _per_stage("forward", forward, num_stages), "B": _per_stage("backward", backward, num_stages)}
    (transfer,) = _per_stage("transfer", transfer, 1)
    row_of = {action: row for row, actions in enumerate(schedule) for action in actions}

    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    position = [0] * len(schedule)
    free_at = [0.0] * len(schedule)
    waiting: dict[Action, list[int]] = {}  # action that has not ended -> rows that wait for it
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
    """Draw the stage x time grid: one row per process, ``.`` for idle time, ``=`` where an action continues.

    Args:
        schedule: A simulation, or a schedule, which is then simulated with equal costs.
        time_per_column: Time that a column covers; by default the time of the shortest action. The grid may omit an
            action that is shorter than half a column.

    Raises:
        ValueError: If the schedule cannot run, or if ``time_per_column`` is not positive.
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


def _check_complete(schedule: Schedule) -> int:
    """Check that each stage runs each micro-batch forward and backward exactly once; return the number of stages."""
    actions = [action for row in schedule for action in row]
    if not actions:
        raise ValueError("the schedule has no actions")
    seen = set(actions)
    if len(seen) < len(actions):
        twice = next(action for action in actions if actions.count(action) > 1)
        raise ValueError(f"stage {twice.stage} has {twice} more than once\n{_table(schedule)}")
    num_stages = 1 + max(action.stage for action in actions)
    num_microbatches = 1 + max(action.microbatch for action in actions)
    everything = (Action(kind, m, i) for i in range(num_stages) for m in range(num_microbatches) for kind in KINDS)
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
