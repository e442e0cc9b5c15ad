"""Predict time and memory of ways to run a pipeline: by schedule and numbers of processes and micro-batches.

The simulator computes the time of the passes from measured costs of actions. Memory is computed along each process's
row of actions, from the bytes that each layer keeps and the bytes that it takes temporarily::

    row of a process      F0          F1          B0          F2          B1 ...
    kept                  0           0, 1        1           1, 2        2
    temporary             forward     forward     backward    forward     backward
                          └─── the maximum of kept + temporary is the peak of activations ──┘

Index letters: ``m`` micro-batch, ``i`` stage of a table (a chunk of layers), ``r`` process (the number of a row).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise

from strategies.optim.costs import StepCost
from strategies.pipeline.partition.balance import partition_lists
from strategies.pipeline.partition.memory import Need
from strategies.pipeline.partition.profiling import PassBytes
from strategies.pipeline.schedule.program import ranks_of
from strategies.pipeline.schedule.tables import SCHEDULES, ActionTable, Placement, recomputed
from strategies.planning.action_costs import ACTION_SECONDS, DriverPart, PlannedLayer
from strategies.planning.search import ModelCosts, balanced, neighbours_of
from strategies.planning.simulator import PerStage, Simulation, on_cores, with_driver_between

EFFORT = 500_000
"""The number of simulated actions that are spent on the balance of a row."""

ALLOCATOR_SHARE = 0.23
"""Memory of a process beyond its tensors, as a share of them: free blocks that the allocator keeps.

It was 0.1 to 0.4 in runs on CPU; this is the geometric middle (docs/decisions/096-plan.md).
"""


@dataclass(frozen=True)
class MeasuredPasses:
    """The costs of the passes of a model, for one number of micro-batches.

    Attributes:
        layers: The costs of a micro-batch in each layer, in the order of the stages.
        driver: The costs of the driver's part.
        microbatches: The number of micro-batches.
        checkpoint: Which micro-batches are recomputed in the backward pass.
        input_bytes: The bytes of the input of a micro-batch.
        lengths: If the model has several lists of layers, the number of layers of each list.
    """

    layers: Sequence[PlannedLayer]
    driver: DriverPart
    microbatches: int
    checkpoint: str
    input_bytes: int
    lengths: Sequence[int] = field(default=(), kw_only=True)

    @property
    def num_lists(self) -> int:
        """The number of lists of layers."""
        return len(self.lengths) or 1


@dataclass(frozen=True)
class Measured(MeasuredPasses):
    """The measurements of a model, including its optimizers.

    Attributes:
        needs: The bytes of parameters, gradients and optimizer states of each layer.
        outside: The same bytes of the driver's part.
        needs_of: Returns these bytes for each process, with the driver last, given the number of layers of each chunk.
            Parameters that several layers share count once in each process.
        steps: The costs of the optimizers' steps, for each layer.
        outside_step: The costs of the optimizers' steps for the driver's part.
        transfer: Seconds to send the input of each layer to another process, or one number for all layers.
        rows: The number of rows of a batch.
        gradient_sets: Number of gradients of a parameter that exist at the same time, if ``training_step`` runs once
            per micro-batch.
        num_owners: Number of replicas that divide the averaged gradients among themselves.
        has_times: Whether times were measured, or only bytes.
        start_bytes: The bytes of the whole model on the driver before its layers leave.
        end_bytes: The bytes of the whole model on the driver after the run, without gradients.
    """

    needs: Sequence[Need]
    outside: Need
    needs_of: Callable[[Sequence[int], Placement], Sequence[Need]]
    steps: Sequence[StepCost]
    outside_step: StepCost
    transfer: PerStage
    rows: int
    gradient_sets: float = 1
    num_owners: int = 1
    has_times: bool = True
    start_bytes: int = 0
    end_bytes: int = 0

    def costs(self, *, at_once: bool) -> ModelCosts:
        """Return the costs for the search.

        With ``at_once``, the driver's part runs for the whole batch between passes and so does not count among them.
        """

        def held(need: Need) -> float:
            return float(need.total + self.earlier_gradients(need, at_once=at_once))

        layers = [
            replace(layer.costs, parameter_bytes=held(need))
            for layer, need in zip(self.layers, self.needs, strict=True)
        ]
        found = ModelCosts(
            layers,
            self.transfer,
            ACTION_SECONDS,
            driver_parameter_bytes=held(self.outside),
            activation_peaks=partial(activation_peaks, measured=self, at_once=at_once),
            memory_scale=1 + ALLOCATOR_SHARE,
            lengths=self.lengths,
            at_once=at_once,
            checkpoint=self.checkpoint,
        )
        return found if at_once else replace(found, driver=self.driver.costs)

    def earlier_gradients(self, need: Need, *, at_once: bool) -> int:
        """Return the bytes of gradients that exist during the passes in addition to those that the passes compute."""
        return 0 if at_once else int((self.gradient_sets - 1) * need.gradients)


@dataclass(frozen=True)
class PlannedProcess:
    """The memory and the work of a process of a pipeline in a step.

    Attributes:
        layers: The numbers of its layers.
        need: Bytes of parameters, gradients and optimizer states.
        activations: The maximum of the bytes that it holds for micro-batches.
        step: The optimizer's step.
        earlier_gradients: Bytes of gradients that exist during the passes in addition to those that the passes compute.
        freed_gradients: Bytes of gradients that are freed before the step, because only other replicas step with them.
        start_bytes: The bytes of the whole model on the driver before its layers have left; 0 if it is never whole.
        end_bytes: The bytes of the whole model on the driver after the run, with all layers and optimizer states.
    """

    layers: list[int]
    need: Need
    activations: int
    step: StepCost
    earlier_gradients: int = 0
    freed_gradients: int = 0
    start_bytes: int = 0
    end_bytes: int = 0

    @property
    def tensor_bytes(self) -> int:
        """The peak memory of the process's tensors in training."""
        in_step = self.step.extra_bytes - self.freed_gradients
        return self.need.total + max(self.activations + self.earlier_gradients, in_step)

    @property
    def training_bytes(self) -> int:
        """The predicted peak of the process's memory in training, beyond its memory without a model."""
        return round((1 + ALLOCATOR_SHARE) * self.tensor_bytes)

    @property
    def peak_bytes(self) -> int:
        """The predicted peak of the whole run."""
        return max(self.training_bytes, self.start_bytes, self.end_bytes)

    @property
    def peak_at(self) -> str:
        """The time of the peak: ``"training"``, or ``"start"`` or ``"end"``, when the driver has the whole model."""
        sizes = {"training": self.training_bytes, "start": self.start_bytes, "end": self.end_bytes}
        return max(sizes, key=lambda when: sizes[when])


@dataclass(frozen=True)
class PlanRow:
    """A way to run a pipeline, with its predicted time and memory.

    Attributes:
        stages: The number of processes.
        microbatches: The number of micro-batches.
        schedule: The name of the schedule.
        chunks_per_stage: The number of chunks of layers of each process, in each list of layers.
        balance: The number of layers of each chunk.
        processes: The memory and work of each process, with the driver last.
        rows: The number of rows of a batch.
        seconds: The time of a training step, from the first pass to the end of the optimizer's step; ``None`` if no
            times were measured.
        idle: The idle share of all processes during the passes.
        simulation: The predicted timetable of the passes.
        memory_limit_bytes: Maximum memory of a process; ``None`` for no limit.
    """

    stages: int
    microbatches: int
    schedule: str
    chunks_per_stage: int
    balance: list[int]
    processes: list[PlannedProcess]
    rows: int
    seconds: float | None = None
    idle: float | None = None
    simulation: Simulation | None = None
    memory_limit_bytes: int | None = None

    @property
    def peak_bytes(self) -> int:
        """The largest peak of all processes."""
        return max(process.peak_bytes for process in self.processes)

    @property
    def fits(self) -> bool:
        """Whether every process is within the limit."""
        return self.memory_limit_bytes is None or self.peak_bytes <= self.memory_limit_bytes

    @property
    def rows_per_second(self) -> float | None:
        """The number of rows that the pipeline trains per second."""
        return self.rows / self.seconds if self.seconds else None

    @property
    def rank(self) -> tuple[bool, float, int]:
        """A sort key, smaller is better: whether the row fits, then the time per row, then the peak."""
        return not self.fits, (self.seconds or 0.0) / self.rows, self.peak_bytes


def plan_row(
    measured: Measured,
    stages: int,
    schedule: str,
    chunks: int,
    *,
    balance: Sequence[int] | None = None,
    memory_limit_bytes: int | None = None,
    cores: float = math.inf,
    effort: int = EFFORT,
) -> PlanRow:
    """Predict time and memory of a schedule.

    Args:
        measured: The measurements of the model.
        stages: The number of processes.
        schedule: The name of the schedule.
        chunks: The number of chunks of layers of each process, in each list of layers.
        balance: The number of layers of each chunk. By default, with measured times, the fastest balance within the
            limit; without times, the balance with the smallest peak.
        memory_limit_bytes: Maximum memory of a process.
        cores: The number of cores that the processes share, if there are fewer of them.
        effort: The number of simulated actions that are spent on the balance.
    """
    named = SCHEDULES[schedule]
    placed = _PlacedTable(
        measured,
        named.of(stages, measured.microbatches, chunks, measured.num_lists),
        named.placement(stages, chunks).repeated(measured.num_lists),
        at_once=schedule == "gpipe",
        memory_limit_bytes=memory_limit_bytes,
    )
    found, simulation = placed.balanced(balance, effort)
    processes = placed.processes(found)
    if balance is None and memory_limit_bytes is not None and _peak(processes) > memory_limit_bytes:
        found = placed.smaller(found)
        _, simulation = placed.balanced(found, effort)
        processes = placed.processes(found)
    seconds = None
    if simulation is not None:
        ranks = rank_of_row(placed.placement)
        last = [processes[rank].step.seconds for rank in ranks]
        simulation, seconds = on_cores(simulation, cores, last)
    return PlanRow(
        stages=stages,
        microbatches=measured.microbatches,
        schedule=schedule,
        chunks_per_stage=chunks,
        balance=found,
        processes=processes,
        rows=measured.rows,
        seconds=seconds,
        idle=None if simulation is None else simulation.bubble_fraction,
        simulation=simulation,
        memory_limit_bytes=memory_limit_bytes,
    )


@dataclass(frozen=True)
class _PlacedTable:
    """A table with its placement, for a measured model.

    Attributes:
        measured: The measurements of the model.
        table: The actions of each process.
        placement: The process of each chunk.
        at_once: Whether the driver's part runs for the whole batch between forward and backward passes.
        memory_limit_bytes: Maximum memory of a process.
    """

    measured: Measured
    table: ActionTable
    placement: Placement
    at_once: bool
    memory_limit_bytes: int | None

    def balanced(self, balance: Sequence[int] | None, effort: int) -> tuple[list[int], Simulation | None]:
        """Return the given balance, or otherwise the best one, and the simulated batch."""
        measured = self.measured
        if not measured.has_times:
            return list(balance) if balance is not None else _balance_by_size(measured, self.placement), None
        found, simulation = balanced(
            measured.costs(at_once=self.at_once),
            self.table,
            self.placement,
            balance=balance,
            memory_limit_bytes=self.memory_limit_bytes,
            effort=effort,
        )
        if not self.at_once:
            return found, simulation
        return found, with_driver_between(simulation, measured.driver.costs.of_batch(measured.microbatches))

    def processes(self, balance: Sequence[int]) -> list[PlannedProcess]:
        """Return the memory and the work of each process."""
        peaks = activation_peaks(self.table, self.placement, balance, self.measured, at_once=self.at_once)
        return _processes(self.placement, balance, self.measured, peaks, at_once=self.at_once)

    def smaller(self, balance: Sequence[int]) -> list[int]:
        """Return a balance with a small peak, found by moving single layers between chunks."""
        starts = [list(balance), _balance_by_size(self.measured, self.placement)]
        return min(map(self._descended, starts), key=lambda each: _peak(self.processes(each)))

    def _descended(self, balance: list[int]) -> list[int]:
        peak, found = _peak(self.processes(balance)), balance
        while True:
            neighbours = neighbours_of(found, self.measured.num_lists)
            peaks = [(_peak(self.processes(each)), each) for each in neighbours]
            least, best = min(peaks, default=(peak, found))
            if least >= peak:
                return found
            peak, found = least, best


def _peak(processes: Sequence[PlannedProcess]) -> int:
    """Return the largest peak in training. Before and after, the driver holds the whole model with any balance."""
    return max(process.training_bytes for process in processes)


def best_row(rows: Sequence[PlanRow]) -> PlanRow:
    """Return the fastest row, per row of a batch, that fits; if none fits, the row with the smallest peak."""
    best = min(rows, key=lambda row: row.rank)
    return best if best.fits else min(rows, key=lambda row: row.peak_bytes)


def _balance_by_size(measured: Measured, placement: Placement) -> list[int]:
    costs = [
        need.total + layer.held.inner + layer.held.output_size
        for need, layer in zip(measured.needs, measured.layers, strict=True)
    ]
    lengths = measured.lengths or [len(costs)]
    return partition_lists(
        [costs] * placement.num_stages, lengths, driver=measured.outside.total + measured.driver.peak_bytes
    )


def rank_of_row(placement: Placement) -> list[int]:
    """Return the rank of each row of a table. The driver has the last rank."""
    ranks = ranks_of(placement)
    return [ranks[placement.process_of.index(r)] for r in range(1 + max(placement.process_of))]


def _processes(
    placement: Placement, balance: Sequence[int], measured: Measured, activations: Sequence[float], *, at_once: bool
) -> list[PlannedProcess]:
    ends = [0, *accumulate(balance)]
    needs = measured.needs_of(balance, placement)
    processes: dict[int, PlannedProcess] = {}
    for r, rank in enumerate(rank_of_row(placement)):
        layers = [layer for i in placement.stages_of(r) for layer in range(ends[i], ends[i + 1])]
        steps, is_driver = [measured.steps[layer] for layer in layers], r == placement.driver
        if is_driver:
            steps.append(measured.outside_step)
        step, need = StepCost.of_all(steps), needs[rank]
        earlier = measured.earlier_gradients(need, at_once=at_once)
        freed = need.gradients - need.gradients // measured.num_owners
        processes[rank] = PlannedProcess(layers, need, round(activations[r]), step, earlier, freed)
        if is_driver:
            end = measured.end_bytes + need.gradients - freed if measured.end_bytes else 0
            processes[rank] = replace(processes[rank], start_bytes=measured.start_bytes, end_bytes=end)
    return [processes[rank] for rank in sorted(processes)]


# Memory


@dataclass(frozen=True)
class _StageBytes:
    """The memory of a micro-batch in a stage, in bytes.

    Attributes:
        held: The memory held from the forward to the backward pass.
        entry: The input: all that is held of a recomputed micro-batch.
        kept: The memory held from the input gradients to the weight gradients.
        forward: The peak of the forward pass.
        backward: The peak of the backward pass, including ``held``.
        output: The size of the output.
    """

    held: int
    entry: int
    kept: float
    forward: int
    backward: int
    output: int


def activation_peaks(
    table: ActionTable, placement: Placement, balance: Sequence[int], measured: MeasuredPasses, *, at_once: bool
) -> list[float]:
    """Return the peak memory of each process for micro-batches, in the order of the table's rows.

    Args:
        table: The actions of each process.
        placement: The process of each stage.
        balance: The number of layers of each stage.
        measured: The costs of a micro-batch in each layer.
        at_once: Whether the driver's part runs for the whole batch between forward and backward passes.
    """
    stages = _stage_bytes(placement, balance, measured)
    num, last = measured.microbatches, placement.num_stages - 1
    lasts = [first + last - placement.firsts[-1] for first in placement.firsts]
    between = [*(measured.driver.between_bytes or [0] * (placement.num_lists - 1)), 0]
    """For each list, the bytes that the code between it and the next list keeps for a micro-batch."""
    peaks = []
    for r, row in enumerate(table):
        is_driver = r == placement.driver
        held = float(num * measured.input_bytes if is_driver else 0)
        peak, whole_gradient, before = held, 0, 0
        recomputes = recomputed(row, measured.checkpoint, num)
        for kind, m, i in row:
            stage, again, number = stages[i], (m, i) in recomputes, placement.list_of(i)
            if is_driver and at_once and kind == "F" and number != before:
                held += num * between[before]
            if is_driver and at_once and kind != "F" and (number != before or not whole_gradient):
                output = num * stages[lasts[number]].output
                if number == before:
                    peak = max(peak, held + output + num * measured.driver.peak_bytes)
                held += output - whole_gradient - num * between[number]  # the gradient of the whole output
                whole_gradient = output
            if is_driver and not at_once and kind in "BI" and i in lasts:
                held -= between[number]
            before = number
            if kind == "F":
                peak = max(peak, held + stage.forward)
                held += stage.entry if again else stage.held
                if is_driver and i in lasts and not at_once:
                    held += between[number]
                    peak = max(peak, held + stage.output + measured.driver.peak_bytes)
            elif kind in "BI":
                now = held + (stage.held if again else 0)
                peak = max(peak, now - stage.held + stage.backward)
                held += (stage.kept if kind == "I" else 0) - (stage.entry if again else stage.held)
            else:
                held -= stage.kept
        peaks.append(peak)
    return peaks


def _stage_bytes(placement: Placement, balance: Sequence[int], measured: MeasuredPasses) -> list[_StageBytes]:
    stages, ends = [], [0, *accumulate(balance)]
    every = [layer.held for layer in measured.layers]
    before = PassBytes()
    for i, (start, end) in enumerate(pairwise(ends)):
        layers = every[start:end]
        is_sent = i == 0 or placement.process_of[i - 1] != placement.process_of[i]
        held = layers[0].input if is_sent else max(0, layers[0].input - before.output)
        entry = layers[0].input_size if is_sent else 0
        forward = backward = 0
        arrived = max(0, layers[0].input_size - layers[0].input)  # the part that is dropped after the first layer
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            forward = max(forward, held + arrived + layer.inner + layer.output_size + layer.forward_extra)
            boundary = max(layer.output, following.input if following is not None else 0)
            held += layer.inner + boundary
            backward = max(backward, held + layer.backward_extra)
            arrived = max(0, layer.output_size - boundary)
        kept = sum(layer.costs.kept for layer in measured.layers[start:end])
        before = layers[-1]
        stages.append(_StageBytes(held, entry, kept, forward, backward, before.output_size))
    return stages
