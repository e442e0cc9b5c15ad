"""Find from recorded steps which process the pipeline waits for, the best balance, and its predicted gain.

    records of a step ─▶ seconds of each layer ─▶ seconds of each kind of layer, and the slowness of each process
                                                              │
                  the balance with the shortest predicted time ◀─ simulator

The time of a chunk's actions is divided over its layers in proportion to their forward passes. Equal layers have equal
costs, so if they take longer on one process than on another process, the first process is slow.

Index letters: ``m`` micro-batch, ``i`` stage of a table (a chunk of layers), ``r`` process.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from strategies.pipeline.schedule.tables import KINDS, ActionTable, Placement, recomputed
from strategies.pipeline.stage.records import LayerRecord, ProcessRecords, Record
from strategies.planning.measured import (
    from_first_forward,
    last_passes,
    measured_timetable,
    transfer_seconds,
    uses_of,
)
from strategies.planning.search import LayerCosts, ModelCosts, balanced
from strategies.planning.simulator import DriverCosts, Simulation

EFFORT = 400_000
"""Maximum number of simulated actions of the search for a balance: about 50 ms."""

STEPS_TO_ASSESS = 3
"""The number of recorded steps that decide together whether another balance would be faster."""

CLEARLY_SLOW = 1.5
"""A process is called slow if it takes at least this many times as long for its layers as other processes would."""

_ROUNDS = 20


@dataclass(frozen=True)
class MeasuredStep:
    """The measurements of one recorded step.

    Attributes:
        placement: The process of each stage.
        balance: The number of layers of each chunk.
        microbatches: The number of micro-batches of its last pass with a backward part.
        costs: The costs of each layer as measured on its process, and of the driver's code.
        elements: The number of elements of each layer's input.
        uses: The share of time in which each process had work during the passes.
        seconds: The time of its passes, from the first forward pass on.
    """

    placement: Placement
    balance: list[int]
    microbatches: int
    costs: ModelCosts
    elements: list[int]
    uses: list[float]
    seconds: float


@dataclass(frozen=True)
class Imbalance:
    """The assessment of a balance from recorded steps.

    Attributes:
        uses: The share of time in which each process had work during the passes.
        slowness: For each process, the ratio of its time for a layer to the time of the fastest process.
        seconds: The time of the passes of a step, from the first forward pass on.
        balance: The balance of these steps.
        better: The balance with the shortest predicted time.
        better_seconds: The predicted time of the passes with this balance.
    """

    uses: list[float]
    slowness: list[float]
    seconds: float
    balance: list[int]
    better: list[int]
    better_seconds: float

    @property
    def gain(self) -> float:
        """The share of the time that the better balance is predicted to save."""
        return 1 - self.better_seconds / self.seconds

    @property
    def busiest(self) -> int:
        """The process that other processes wait for most."""
        return self.uses.index(max(self.uses))

    @property
    def slowest(self) -> int | None:
        """The process that takes clearly longer for its layers than other processes would; ``None`` if none does."""
        r = self.slowness.index(max(self.slowness))
        return r if self.times_as_long(r) >= CLEARLY_SLOW else None

    def described(self, names: Sequence[str], *, least_gain: float) -> str:
        """Return a message: which process others wait for, which process is slow, and the gain of the better balance.

        Args:
            names: The name of each process.
            least_gain: The minimum gain for which the message names the better balance.
        """
        use, others = self.uses[self.busiest], [u for r, u in enumerate(self.uses) if r != self.busiest]
        told = f"most waiting is for {names[self.busiest]} (busy {use:.0%} of the passes"
        told += f"; {'the others' if len(others) > 1 else 'the other one'} {statistics.fmean(others):.0%})."
        if (r := self.slowest) is not None:
            times = f"{self.times_as_long(r):.1f} times"
            told += f" {names[r].capitalize()} takes {times} as long for its layers as others would."
        if self.gain >= least_gain:
            seconds = f"{1e3 * self.better_seconds:.3g} ms instead of {1e3 * self.seconds:.3g} (-{self.gain:.0%})"
            told += f" Balance {self.better} instead of {self.balance}: passes predicted in {seconds}."
        return told

    def times_as_long(self, r: int) -> float:
        """The ratio of the time that a process takes for its layers to the time that other processes would take."""
        others = [value for other, value in enumerate(self.slowness) if other != r]
        return self.slowness[r] / statistics.median(others) if others else 1.0


class LastSteps:
    """The last recorded steps of one balance, without steps of smaller batches.

    Args:
        number: The number of steps to keep.
    """

    def __init__(self, number: int = STEPS_TO_ASSESS) -> None:
        self.steps: deque[MeasuredStep] = deque(maxlen=number)

    def add(self, step: MeasuredStep) -> bool:
        """Add a step, unless its batch has fewer micro-batches than previous batches. Returns whether it was added."""
        if self.steps and self.steps[-1].balance != step.balance:
            self.steps.clear()
        if self.steps and self.steps[-1].microbatches > step.microbatches:
            return False
        if self.steps and self.steps[-1].microbatches < step.microbatches:
            self.steps.clear()
        self.steps.append(step)
        return True

    def clear(self) -> None:
        """Forget all steps."""
        self.steps.clear()


def measured_step(
    rows: Sequence[Sequence[Record]],
    recorded: Sequence[ProcessRecords],
    balance: Sequence[int],
    *,
    whole_batch: bool,
    checkpoint: str,
    lengths: Sequence[int] = (),
) -> MeasuredStep | None:
    """Return the measurements of a recorded step; ``None`` if it has no pass with a backward part, or lacks layers.

    Args:
        rows: The records of each process on one clock, with the driver's last.
        recorded: The recording of each process.
        balance: The number of layers of each chunk.
        whole_batch: Whether the driver's code runs once, between forward and backward passes.
        checkpoint: Which micro-batches are recomputed. The costs of layers do not include that.
        lengths: If there are several lists of layers, the number of layers of each list.
    """
    num_lists = len(lengths) or 1
    whole = measured_timetable(rows, num_lists)
    layers: dict[int, LayerRecord] = {}
    for own in recorded:
        layers |= own.layers
    if whole is None or len(layers) != sum(balance):
        return None
    timetable = from_first_forward(whole)
    microbatches = 1 + max(step.microbatch for step in whole.end)
    numbers = last_passes(rows, num_lists)
    seconds: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    sending: list[float] = []
    for record in (record for row in rows for record in row if record.number in numbers):
        seconds[record.kind, max(0, record.stage)].append(record.computed - record.received)
        if record.kind in ("F", "B", "I", "W"):
            sending.append(record.end - record.computed)

    def mean(kind: str, i: int = 0) -> float | None:
        return statistics.fmean(seconds[kind, i]) if seconds[kind, i] else None

    num_again = Counter(i for row in rows for _, i in recomputed(_actions_of(row, numbers), checkpoint, microbatches))

    def without_recomputation(kind: str, i: int) -> float | None:
        if (found := mean(kind, i)) is None:
            return None
        return max(0.0, found - num_again[i] / microbatches * (mean("F", i) or 0.0))

    costs: list[LayerCosts] = []
    for i, (start, end) in enumerate(pairwise([0, *accumulate(balance)])):
        forward, backward = mean("F", i) or 0.0, without_recomputation("B", i)
        input_grad, weight_grad = without_recomputation("I", i), mean("W", i) or 0.0
        if input_grad is None:  # whole backward passes only
            input_grad, weight_grad = backward or 0.0, 0.0
        total = sum(layers[place].seconds for place in range(start, end))
        for place in range(start, end):
            share = layers[place].seconds / total if total > 0 else 1 / (end - start)
            costs.append(
                LayerCosts(
                    forward=share * forward,
                    input_grad=share * input_grad,
                    weight_grad=share * weight_grad,
                    backward=None if backward is None else share * backward,
                )
            )
    driver = DriverCosts()
    if not whole_batch:  # otherwise the stages wait while it runs, with any balance
        firsts = whole.placement.firsts[1:]
        between = [(mean("b", first) or 0.0, mean("a", first) or 0.0) for first in firsts]
        driver = DriverCosts(mean("b") or 0.0, mean("loss", len(balance) - 1) or 0.0, mean("a") or 0.0, between)
    of_model = ModelCosts(
        costs,
        transfer_seconds(rows),
        statistics.fmean(sending),
        driver,
        lengths=lengths,
        at_once=whole_batch,
        checkpoint=checkpoint,
    )
    return MeasuredStep(
        whole.placement,
        list(balance),
        microbatches,
        of_model,
        [layers[place].elements for place in range(len(costs))],
        uses_of(timetable),
        timetable.total_time,
    )


def assess(
    steps: Sequence[MeasuredStep],
    kinds: Sequence[Hashable],
    table: Callable[[int], ActionTable],
    balance: Sequence[int],
) -> Imbalance:
    """Assess a balance from the median of recorded steps with the same number of micro-batches.

    Args:
        steps: The steps, at least one.
        kinds: The kind of each layer. Layers of one kind cost the same if their inputs have equally many elements.
        table: Returns the actions of each process for a number of micro-batches.
        balance: The number of layers of each chunk.
    """
    placement = steps[-1].placement
    measured = _median(steps)
    process = [placement.process_of[i] for i, length in enumerate(balance) for _ in range(length)]
    alike = list(zip(kinds, steps[-1].elements, strict=True))
    slowness = _slowness([layer.forward + layer.whole for layer in measured.layers], alike, process)
    layers = [_divided(layer, slowness[r]) for layer, r in zip(measured.layers, process, strict=True)]
    costs = replace(measured, layers=_averaged(layers, alike), slowness=slowness)
    rows = table(steps[-1].microbatches)
    now = _simulated(costs, rows, placement, balance)
    better, then = balanced(costs, rows, placement, effort=EFFORT)
    if then.total_time >= now.total_time:
        better, then = list(balance), now
    seconds = statistics.median(step.seconds for step in steps)
    return Imbalance(
        uses=[statistics.median(uses) for uses in zip(*(step.uses for step in steps), strict=True)],
        slowness=slowness,
        seconds=seconds,
        balance=list(balance),
        better=better,
        better_seconds=max(0.0, seconds - now.total_time + then.total_time),
    )


def _simulated(costs: ModelCosts, rows: ActionTable, placement: Placement, balance: Sequence[int]) -> Simulation:
    return balanced(costs, rows, placement, balance=balance)[1]


def _median(steps: Sequence[MeasuredStep]) -> ModelCosts:
    """Return the median of each cost."""

    def median(values: Sequence[float | None]) -> float:
        return statistics.median(value for value in values if value is not None)

    layers = []
    for each in zip(*(step.costs.layers for step in steps), strict=True):
        has_whole = each[-1].backward is not None
        layers.append(
            LayerCosts(
                forward=median([layer.forward for layer in each]),
                input_grad=median([layer.input_grad for layer in each]),
                weight_grad=median([layer.weight_grad for layer in each]),
                backward=median([layer.backward for layer in each]) if has_whole else None,
            )
        )
    drivers = [step.costs.driver for step in steps]
    gaps = zip(*(driver.between for driver in drivers), strict=True)
    return ModelCosts(
        layers,
        [median(column) for column in zip(*(step.costs.transfers for step in steps), strict=True)],
        median([step.costs.action for step in steps]),
        DriverCosts(
            median([driver.before for driver in drivers]),
            median([driver.after for driver in drivers]),
            median([driver.before_backward for driver in drivers]),
            [(median([before for before, _ in gap]), median([back for _, back in gap])) for gap in gaps],
        ),
        lengths=steps[-1].costs.lengths,
        at_once=steps[-1].costs.at_once,
        checkpoint=steps[-1].costs.checkpoint,
    )


def _actions_of(row: Sequence[Record], numbers: Container[int]) -> Iterator[tuple[str, int, int]]:
    """Yield the recorded actions of a process in passes with these numbers."""
    for record in row:
        if record.number in numbers and record.kind in KINDS:
            yield record.kind, record.microbatch, record.stage


def _divided(layer: LayerCosts, slowness: float) -> LayerCosts:
    """Return the cost of a layer on the fastest process."""
    backward = None if layer.backward is None else layer.backward / slowness
    return LayerCosts(layer.forward / slowness, layer.input_grad / slowness, layer.weight_grad / slowness, backward)


def _averaged(layers: Sequence[LayerCosts], alike: Sequence[Hashable]) -> list[LayerCosts]:
    """Return for each layer the mean of the costs of all layers of its kind.

    If a process shares its core, some layers are interrupted and others are not.
    """
    of_kind: defaultdict[Hashable, list[LayerCosts]] = defaultdict(list)
    for kind, layer in zip(alike, layers, strict=True):
        of_kind[kind].append(layer)
    mean = {}
    for kind, own in of_kind.items():
        wholes = [layer.whole for layer in own]
        has_whole = all(layer.backward is not None for layer in own)
        mean[kind] = LayerCosts(
            forward=statistics.fmean(layer.forward for layer in own),
            input_grad=statistics.fmean(layer.input_grad for layer in own),
            weight_grad=statistics.fmean(layer.weight_grad for layer in own),
            backward=statistics.fmean(wholes) if has_whole else None,
        )
    return [mean[kind] for kind in alike]


def _slowness(seconds: Sequence[float], alike: Sequence[Hashable], process: Sequence[int]) -> list[float]:
    """Return for each process the ratio of its time for a layer to the time of the fastest process, at least 1.

    Fits ``seconds`` by (cost of the kind of a layer) times (slowness of its process), alternately. Processes that have
    no kinds of layers in common, directly or through other processes, are assumed to be equally fast.
    """
    slowness = [1.0] * (1 + max(process))
    for known in _connected(alike, process):
        own = [each for each in zip(seconds, alike, process, strict=True) if each[2] in known]
        if len(known) < 2 or min(t for t, _, _ in own) <= 0:
            continue
        for _ in range(_ROUNDS):
            cost = {
                kind: statistics.fmean(t / slowness[r] for t, other, r in own if other == kind)
                for kind in dict.fromkeys(kind for _, kind, _ in own)
            }
            for r in known:
                mine = [(t, cost[kind]) for t, kind, other in own if other == r]
                slowness[r] = sum(t for t, _ in mine) / sum(c for _, c in mine)
        least = min(slowness[r] for r in known)
        for r in known:
            slowness[r] /= least
    return slowness


def _connected(alike: Sequence[Hashable], process: Sequence[int]) -> list[set[int]]:
    """Return groups of processes that have kinds of layers in common, directly or through other processes."""
    of_kind: defaultdict[Hashable, set[int]] = defaultdict(set)
    for kind, r in zip(alike, process, strict=True):
        of_kind[kind].add(r)
    groups: list[set[int]] = []
    for found in of_kind.values():
        for group in [group for group in groups if group & found]:
            groups.remove(group)
            found = found | group
        groups.append(found)
    return groups
