"""Simulate tables: compute times and memory of a table of actions with given costs, and draw it.

Index letters: ``m`` micro-batch, ``i`` stage, ``r`` process (the number of a row).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import TypeAlias

from strategies.pipeline.schedule.deadlocks import check_complete, running_order
from strategies.pipeline.schedule.operations import Computation, UserCode
from strategies.pipeline.schedule.program import driver_row, row_at_once
from strategies.pipeline.schedule.tables import KINDS, Action, ActionTable, Placement, loop, recomputed

PerStage: TypeAlias = float | Sequence[float]
"""One number for all stages, or one per stage."""

_Step: TypeAlias = tuple[int, int, int, int]
"""A row, the place of the time in ``seconds``, the place of the awaited step, and of the time to send its result."""


@dataclass(frozen=True)
class DriverCosts:
    """The costs of the driver's code outside the stages for each micro-batch, in seconds and bytes.

    Attributes:
        before: Time of the code before the call of the pipelined module, which returns the input of stage 0.
        after: Time of the code after the call, with its backward pass: head and loss. It runs at the end of the last
            stage's forward pass.
        before_backward: Time of the backward pass of the code before the call.
        between: For each list of layers but the last, times of the code between it and the next list, and of the
            backward pass of this code. Empty if there is one list, or if they take no time.
        before_bytes: The memory that the code before the call keeps for its backward pass.
        after_bytes: The memory of the code after the call while it runs.
    """

    before: float = 0.0
    after: float = 0.0
    before_backward: float = 0.0
    between: Sequence[tuple[float, float]] = ()
    before_bytes: float = 0.0
    after_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if any(each < 0 for each in (chain(*value) if name == "between" else [value])):
                raise ValueError(f"{name} must not be negative, got {value}")

    @property
    def runs_code_before(self) -> bool:
        """Whether code before the call of a list of layers takes any time."""
        return self.before > 0 or self.before_backward > 0 or any(map(any, self.between))

    @property
    def seconds(self) -> float:
        """The time of all parts of the code for a micro-batch."""
        return self.before + self.after + self.before_backward + sum(map(sum, self.between))

    def of_batch(self, microbatches: int) -> DriverCosts:
        """Return the times for a whole batch, without bytes."""
        between = [(microbatches * forward, microbatches * backward) for forward, backward in self.between]
        return DriverCosts(
            microbatches * self.before, microbatches * self.after, microbatches * self.before_backward, between
        )


@dataclass(frozen=True)
class ActionCosts:
    """The costs of the actions of one micro-batch.

    Attributes:
        forward: Time of a forward pass.
        backward: Time of a whole backward pass; usually about twice the forward pass.
        input_grad: Time of the input gradients, if the backward pass is split. For a stage that cannot be split, this
            is the time of the whole backward pass, and ``weight_grad`` is 0.
        weight_grad: Time of the weight gradients.
        recompute: Time to run a forward pass again, in the backward pass of a micro-batch that is recomputed.
        transfer: Time to send the input of a stage, or its gradient, from one process to another.
        activation_bytes: The memory that a stage holds from the forward pass on.
        kept_bytes: The part that is kept from the input gradients to the weight gradients; all of it if ``None``.
        driver: The costs of the driver's code outside the stages.
    """

    forward: PerStage = 1.0
    backward: PerStage = 1.0
    input_grad: PerStage = 1.0
    weight_grad: PerStage = 1.0
    recompute: PerStage = 0.0
    transfer: PerStage = 0.0
    activation_bytes: PerStage = 1.0
    kept_bytes: PerStage | None = None
    driver: DriverCosts = field(default_factory=DriverCosts)


@dataclass(frozen=True)
class Simulation:
    """Times and memory of a table whose actions have given costs.

    Attributes:
        rows: The simulated table. The driver's row also has the user's code, if it costs anything.
        placement: The process of each stage.
        start: Start time of each action, in the unit of the costs.
        end: End time of each action.
        total_time: End time of the last action.
        bubble_fraction: Idle share of the time of all processes, 0 to 1.
        peak_activations: For each stage, the maximum number of micro-batches whose forward pass has run and whose
            backward pass, with its weight gradients, has not.
        peak_bytes: For each process, the peak memory of its stages for such micro-batches.
    """

    rows: list[list[Computation]]
    placement: Placement
    start: dict[Computation, float]
    end: dict[Computation, float]
    total_time: float
    bubble_fraction: float
    peak_activations: list[int]
    peak_bytes: list[float]


def simulate(
    table: ActionTable,
    costs: ActionCosts | Sequence[ActionCosts] | None = None,
    *,
    placement: Placement | None = None,
    at_once: bool = False,
    checkpoint: str = "never",
) -> Simulation:
    """Simulate a table.

    An action starts when its process has ended the previous action of the row, and when its inputs have arrived. A
    forward pass needs the forward pass of the previous stage. A backward pass or input gradients need the forward pass
    of the same stage and the gradients of the next stage. Weight gradients need the input gradients of the same stage.

    Args:
        table: One row of actions per process.
        costs: The costs of actions, or those of each micro-batch if micro-batches differ. By default each action takes
            one unit of time.
        placement: The required process of each stage; by default the one that has its actions, for one list of layers.
        at_once: As in :class:`PreparedTable`.
        checkpoint: Which micro-batches are recomputed.

    Raises:
        ValueError: If the table lacks or repeats an action, has one on the wrong process, or deadlocks, or if a cost is
            negative or not given for every stage or micro-batch.
    """
    prepared = PreparedTable(table, placement=placement, at_once=at_once, checkpoint=checkpoint)
    return prepared.simulate(costs or ActionCosts())


class PreparedTable:
    """A table prepared for simulations with different costs.

    The order in which actions *can* run depends on the table alone. Simulations then pass through them once, in that
    order.

    Args:
        table: The table.
        placement: The required process of each stage; by default the one that has its actions, for one list of layers.
        with_user_code: Whether the driver runs code before the call of a list of layers. In that case its row is
            :func:`driver_row`.
        at_once: Whether the driver's code runs for the whole batch at once, as under ``gpipe``. In that case a list of
            layers waits until all micro-batches have passed the list before. :func:`with_driver_between` adds the times
            of this code.
        checkpoint: Which micro-batches are recomputed; see
            :func:`~strategies.pipeline.schedule.tables.recomputed`.

    Raises:
        ValueError: As :func:`simulate` does.
    """

    def __init__(
        self,
        table: ActionTable,
        *,
        placement: Placement | None = None,
        with_user_code: bool = False,
        at_once: bool = False,
        checkpoint: str = "never",
    ) -> None:
        self.table = table
        self.placement = check_complete(table, placement)
        self.num_microbatches = 1 + max(action.microbatch for row in table for action in row)
        self.rows: list[list[Computation]] = [list(row) for row in table]
        assert not (with_user_code and at_once), "the time of code that runs at once is added afterwards"
        self._has_user_code, self._at_once, self._checkpoint = with_user_code, at_once, checkpoint
        self._again = {each for row in table for each in recomputed(row, checkpoint, self.num_microbatches)}
        """The micro-batch and the stage of each backward pass that begins with a recomputation."""
        if at_once:
            self.rows[self.placement.driver] = row_at_once(table, self.placement)
        elif with_user_code:
            self.rows[self.placement.driver] = driver_row(table, self.placement.firsts)
        self._order = running_order(self.rows, self.placement.num_stages)
        number = {step: k for k, (_, step, _) in enumerate(self._order)}
        self._steps = [
            (row, self._cost_index(step), -1 if need is None else number[need], self._transfer_index(step))
            for row, step, need in self._order
        ]

    def simulate(self, costs: ActionCosts | Sequence[ActionCosts]) -> Simulation:
        """Simulate the table with these costs, or those of each micro-batch."""
        each = [costs] if isinstance(costs, ActionCosts) else list(costs)
        if any(own.driver.runs_code_before for own in each) and not self._has_user_code:
            with_code = PreparedTable(
                self.table,
                placement=self.placement,
                with_user_code=True,
                at_once=self._at_once,
                checkpoint=self._checkpoint,
            )
            return with_code.simulate(costs)
        times, steps = [self.seconds_of(own) for own in each], self._steps
        if not isinstance(costs, ActionCosts):
            steps = self._steps_of_each(times)
        seconds = [*chain(*times)]
        ends = self.ends(seconds, steps)
        end = {step: ends[k] for k, (_, step, _) in enumerate(self._order)}
        start = {
            step: ends[k] - seconds[index]
            for k, ((_, step, _), (_, index, _, _)) in enumerate(zip(self._order, steps, strict=True))
        }
        total_time = max(ends)
        busy_time = sum(seconds[index] for _, index, _, _ in steps)
        return Simulation(
            rows=self.rows,
            placement=self.placement,
            start=start,
            end=end,
            total_time=total_time,
            bubble_fraction=1 - busy_time / (total_time * len(self.rows)) if total_time else 0.0,
            peak_activations=self.peak_activations(),
            peak_bytes=self.peak_bytes(each),
        )

    def seconds_of(self, costs: ActionCosts) -> list[float]:
        """Return the times in one list.

        For each stage: each kind of action, then backward passes and input gradients with a recomputation. Then the
        user's code, and transfers to each stage.
        """
        assert self._has_user_code or not costs.driver.runs_code_before
        num = self.placement.num_stages
        forward = _per_stage("forward", costs.forward, num)
        forward[-1] += costs.driver.after
        names = ("backward", "input_grad", "weight_grad", "recompute", "transfer")
        backward, input_grad, weight_grad, recompute, transfer = (
            _per_stage(name, getattr(costs, name), num) for name in names
        )
        between = costs.driver.between or [(0.0, 0.0)] * (self.placement.num_lists - 1)
        if len(between) != self.placement.num_lists - 1:
            raise ValueError(f"between gives {len(between)} pairs of costs for {self.placement.num_lists} lists")
        parts = [(costs.driver.before, costs.driver.before_backward), *between]
        again = [own + more for whole in (backward, input_grad) for own, more in zip(whole, recompute, strict=True)]
        return [*forward, *backward, *input_grad, *weight_grad, *again, *chain(*parts), *transfer]

    def ends(self, seconds: Sequence[float], steps: Sequence[_Step] | None = None) -> list[float]:
        """Return when each action ends, in an order in which actions can run.

        Args:
            seconds: The times of :meth:`seconds_of`.
            steps: The actions; by default those of equal micro-batches.
        """
        free = [0.0] * len(self.rows)
        ends: list[float] = []
        append = ends.append
        for row, index, need, way in steps or self._steps:
            begin = free[row]
            if need >= 0:
                arrival = ends[need] + seconds[way]
                if arrival > begin:
                    begin = arrival
            free[row] = begin = begin + seconds[index]
            append(begin)
        return ends

    def total_time(self, costs: ActionCosts) -> float:
        """Return the end time of the last action."""
        return max(self.ends(self.seconds_of(costs)))

    def row_ends(self, costs: ActionCosts) -> list[float]:
        """Return when each process ends its last action."""
        last = [0.0] * len(self.rows)
        for (row, _, _, _), end in zip(self._steps, self.ends(self.seconds_of(costs)), strict=True):
            last[row] = end
        return last

    def critical_path(self, costs: ActionCosts) -> list[Computation]:
        """Return a chain of steps. Each step starts when the previous step has ended or its result has arrived.

        The chain ends with the last step of all, so only a change of the chain can shorten the total time.
        """
        seconds = self.seconds_of(costs)
        ends = self.ends(seconds)
        previous: list[int] = []
        last_of_row: dict[int, int] = {}
        for k, (row, _, need, way) in enumerate(self._steps):
            own = last_of_row.get(row, -1)
            arrival = ends[need] + seconds[way] if need >= 0 else -1.0
            previous.append(need if own < 0 or arrival > ends[own] else own)
            last_of_row[row] = k
        k = max(range(len(ends)), key=ends.__getitem__)
        path = []
        while k >= 0:
            path.append(self._order[k][1])
            k = previous[k]
        return path[::-1]

    def peak_activations(self) -> list[int]:
        """Return the maximum number of micro-batches that each stage holds."""
        num = self.placement.num_stages
        held, peak = [0] * num, [0] * num
        for row in self.table:
            for kind, _, i in row:
                held[i] += {"F": 1, "I": 0}.get(kind, -1)
                peak[i] = max(peak[i], held[i])
        return peak

    def peak_bytes(self, costs: Sequence[ActionCosts]) -> list[float]:
        """Return the peak memory of each process for micro-batches, given the costs of each of them, or of all."""
        changes = [self._change_of_bytes(each) for each in costs]
        peaks = []
        for row in self.rows:
            held = peak = 0.0
            for step in row:
                m = step.microbatch % len(costs)
                driver = costs[m].driver
                if isinstance(step, UserCode):
                    if step.stage == 0:
                        held += driver.before_bytes if step.part == "b" else -driver.before_bytes
                else:
                    held += changes[m][step.kind][step.stage]
                    if step.kind == "F" and step.stage == self.placement.num_stages - 1:
                        peak = max(peak, held + driver.after_bytes)
                peak = max(peak, held)
            peaks.append(peak)
        return peaks

    def _change_of_bytes(self, costs: ActionCosts) -> dict[str, list[float]]:
        num = self.placement.num_stages
        activations = _per_stage("activation_bytes", costs.activation_bytes, num)
        kept = activations if costs.kept_bytes is None else _per_stage("kept_bytes", costs.kept_bytes, num)
        return {
            "F": activations,
            "B": [-value for value in activations],
            "I": [later - value for value, later in zip(activations, kept, strict=True)],
            "W": [-value for value in kept],
        }

    def _steps_of_each(self, times: Sequence[Sequence[float]]) -> list[_Step]:
        """Return the actions for the times of each micro-batch, which follow one another in one list."""
        if len(times) != self.num_microbatches:
            raise ValueError(
                f"costs are given for {len(times)} micro-batches, but the table has {self.num_microbatches}"
            )
        width = len(times[0])
        return [
            (row, index + width * step.microbatch, need, way + width * step.microbatch)
            for (_, step, _), (row, index, need, way) in zip(self._order, self._steps, strict=True)
        ]

    def _cost_index(self, step: Computation) -> int:
        num = self.placement.num_stages
        if isinstance(step, UserCode):
            return NUM_TIMES * num + 2 * self.placement.list_of(step.stage) + ("b", "a").index(step.part)
        return time_index(step, num, recompute=(step.microbatch, step.stage) in self._again)

    def _transfer_index(self, step: Computation) -> int:
        """Return the place of the time to send what a step awaits: an input, or the gradient of an input."""
        first = NUM_TIMES * self.placement.num_stages + 2 * self.placement.num_lists
        is_backward = isinstance(step, Action) and step.kind != "F"
        return first + min(step.stage + is_backward, self.placement.num_stages - 1)


NUM_TIMES = len(KINDS) + 2
"""The number of times of each stage in :meth:`PreparedTable.seconds_of`."""


def time_index(action: Action, num_stages: int, *, recompute: bool) -> int:
    """Return the place of the time of an action in :meth:`PreparedTable.seconds_of`.

    Args:
        action: The action.
        num_stages: Number of stages.
        recompute: For backward passes and input gradients, whether they begin with a recomputation.
    """
    kind = KINDS.index(action.kind)
    if recompute and action.kind in "BI":
        kind = len(KINDS) + "BI".index(action.kind)
    return kind * num_stages + action.stage


def with_driver_between(simulation: Simulation, driver: DriverCosts) -> Simulation:
    """Add the driver's part of a batch: before all forward passes, between them and the backward passes, and after.

    If there are several lists of layers, also the code between their passes. Under ``gpipe``, the stages wait while the
    driver's part runs.

    Args:
        simulation: All forward passes, then all backward passes, without the times of the driver's part.
        driver: The costs of the driver's part for the whole batch.
    """
    before, after, last = driver.before, driver.after, driver.before_backward
    placement = simulation.placement
    between = driver.between or [(0.0, 0.0)] * (placement.num_lists - 1)
    ahead = [*accumulate((forward for forward, _ in between), initial=before)]
    """For each list, the driver's time before its forward passes."""
    back = [*accumulate((backward for _, backward in reversed(between)), initial=ahead[-1] + after)][::-1]
    """For each list, the driver's time before its backward passes."""

    def later(step: Computation) -> float:
        number = placement.list_of(step[2])
        if isinstance(step, UserCode):
            return ahead[number - 1] if step.part == "b" else back[number]
        return ahead[number] if step.kind == "F" else back[number]

    start = {step: time + later(step) for step, time in simulation.start.items()}
    end = {step: time + later(step) for step, time in simulation.end.items()}
    rows = [list(row) for row in simulation.rows]
    total, row = simulation.total_time + back[0] + last, rows[placement.driver]
    for number, parts in enumerate(between, 1):
        for part, seconds in zip(("b", "a"), parts, strict=True):
            code = [
                step for step in row if isinstance(step, UserCode) and step[::2] == (part, placement.firsts[number])
            ]
            kept = code[0 if part == "b" else -1]
            for step in code:
                if step != kept or not seconds:
                    row.remove(step)
                    del start[step], end[step]
            if seconds:
                end[kept] += seconds
    if before:
        row.insert(0, UserCode("b", 0))
        start[row[0]], end[row[0]] = 0.0, before
    if last:
        row.append(UserCode("a", 0))
        start[row[-1]], end[row[-1]] = total - last, total
    if after:
        forward = max(step.microbatch for step in row if step[0] == "F")
        loss = Action("F", forward, placement.num_stages - 1)
        end[loss] += after  # at the end of the last stage's forward pass, as if it ran per micro-batch
    busy = sum(end[step] - start[step] for step in end)
    idle = 1 - busy / (total * len(rows)) if total else 0.0
    return replace(simulation, rows=rows, start=start, end=end, total_time=total, bubble_fraction=idle)


def on_cores(simulation: Simulation, cores: float, last: Sequence[float]) -> tuple[Simulation, float]:
    """Simulate shared cores: while more processes have work than there are cores, all take longer by the same factor.

    Because all are slowed equally, the order of actions stays the same, and only times change. Two cores, four
    processes::

        without      A1 A1 A2 .           with       A1 A1 A1 A2 .
                     .  B1 .  .                      .  B1 B1 .  .
                     .  C1 .  C2                     .  C1 C1 .  C2
                     .  D1 .  .                      .  D1 D1 .  .

    Args:
        simulation: The times with a core for each process.
        cores: The number of cores for all processes.
        last: The time of each process after its row, in the unit of the costs, such as of an optimizer step.

    Returns:
        The times with these cores, and the end of everything.
    """
    ends = [max((simulation.end[step] for step in row), default=0.0) for row in simulation.rows]
    after = [(end, end + seconds) for end, seconds in zip(ends, last, strict=True)]
    if cores >= len(simulation.rows):
        return simulation, max(end for _, end in after)
    working: dict[float, int] = {0.0: 0}
    for begins, ended in [*((simulation.start[step], simulation.end[step]) for step in simulation.end), *after]:
        working[begins] = working.get(begins, 0) + 1
        working[ended] = working.get(ended, 0) - 1
    later: dict[float, float] = {}
    now, before, number = 0.0, 0.0, 0
    for time in sorted(working):
        now += (time - before) * max(1.0, number / cores)
        later[time], before, number = now, time, number + working[time]
    start = {step: later[time] for step, time in simulation.start.items()}
    end = {step: later[time] for step, time in simulation.end.items()}
    total = later[simulation.total_time]
    busy = sum(end[step] - start[step] for step in end)
    idle = 1 - busy / (total * len(simulation.rows)) if total else 0.0
    shared = replace(simulation, start=start, end=end, total_time=total, bubble_fraction=idle)
    return shared, max(later[time] for _, time in after)


def render(table: ActionTable | Simulation, *, time_per_column: float | None = None) -> str:
    """Draw the grid of processes and time: one row per process, ``.`` for idle time, ``=`` where an action continues.

    If each process has one stage, rows are named after stages, and actions do not repeat the number of the stage.

    Args:
        table: A simulation, or a table, which is then simulated with equal costs.
        time_per_column: Time of a column; by default the time of the shortest action. The grid may omit an
            action that is shorter than half a column.

    Raises:
        ValueError: If the table cannot run, or if ``time_per_column`` is not positive.
    """
    simulation = table if isinstance(table, Simulation) else simulate(table)
    times = [simulation.end[action] - simulation.start[action] for action in simulation.end]
    if time_per_column is None:
        time_per_column = min((time for time in times if time > 0), default=1.0)
    elif time_per_column <= 0:
        raise ValueError(f"time_per_column must be positive, got {time_per_column}")
    is_line = simulation.placement == loop(len(simulation.rows))

    def column(time: float) -> int:
        return math.floor(time / time_per_column + 0.5)

    def text(step: Computation) -> str:
        return f"{step.kind}{step.microbatch}" if is_line and isinstance(step, Action) else repr(step)

    width = max(len(text(action)) for action in simulation.end)
    lines = []
    for row, actions in enumerate(simulation.rows):
        cells = ["."] * column(simulation.total_time)
        for action in actions:
            first, last = column(simulation.start[action]), column(simulation.end[action])
            cells[first:last] = [text(action), *["=" * width] * (last - first - 1)][: last - first]
        name = "stage" if is_line else "process"
        lines.append(f"{name} {row}  {' '.join(cell.ljust(width) for cell in cells)}".rstrip())
    return "\n".join(lines)


def _per_stage(name: str, cost: PerStage, num_stages: int) -> list[float]:
    costs = list(cost) if isinstance(cost, Sequence) else [cost] * num_stages
    if len(costs) != num_stages:
        raise ValueError(f"{name} gives {len(costs)} costs for {num_stages} stages: {costs}")
    if any(value < 0 for value in costs):
        raise ValueError(f"{name} must not be negative, got {cost}")
    return costs
