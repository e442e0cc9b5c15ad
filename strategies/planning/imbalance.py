"""What another balance would bring, by what recorded steps say: who is waited for, and the best balance.

    records of a step ─▶ seconds of each layer ─▶ those of each kind of layer, and the slowness of each process
                                                              │
              the balance with which the table takes least time ◀─ simulator

The time of a chunk's actions is divided over its layers like the time of their forward passes. Layers that are alike
cost the same, so if some take longer on one process than on another one, that process is slow.

Legend: m micro-batch, i stage of a table (a chunk of layers), r process.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from strategies.pipeline.schedule.tables import ActionTable, Placement
from strategies.pipeline.stage.records import LayerRecord, Record, Recorded
from strategies.planning.measured import (
    from_first_forward,
    last_pass,
    measured_timetable,
    transfer_seconds,
    uses_of,
)
from strategies.planning.search import LayerCosts, ModelCosts, balanced
from strategies.planning.simulator import DriverCosts, Simulation

EFFORT = 400_000
"""The number of simulated actions that the search for a balance spends at most: about 50 ms."""

STEPS_TO_ASSESS = 3
"""How many recorded steps say together whether another balance would be faster."""

CLEARLY_SLOW = 1.5
"""A process that takes so many times as long for its layers as the others is called slow."""

_ROUNDS = 20


@dataclass(frozen=True)
class MeasuredStep:
    """What one recorded step says.

    Attributes:
        placement: Which process has which stages.
        balance: The number of layers of each chunk.
        microbatches: The number of micro-batches of its last pass with a backward part.
        costs: The costs of each layer as measured on its process, and of the driver's code.
        elements: The number of elements of each layer's input.
        uses: The share of the passes in which each process had work.
        seconds: What its passes took, from the first forward pass on.
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
    """What recorded steps say of a balance.

    Attributes:
        uses: The share of the passes in which each process had work.
        slowness: How many times as long each process takes for a layer as the fastest one.
        seconds: What the passes of a step took, from the first forward pass on.
        balance: The balance of these steps.
        better: The balance with which they are predicted to take least time.
        better_seconds: What they are predicted to take with it.
    """

    uses: list[float]
    slowness: list[float]
    seconds: float
    balance: list[int]
    better: list[int]
    better_seconds: float

    @property
    def gain(self) -> float:
        """The share of this time that the better balance is predicted to save."""
        return 1 - self.better_seconds / self.seconds

    @property
    def busiest(self) -> int:
        """The process that the others wait for most."""
        return self.uses.index(max(self.uses))

    @property
    def slowest(self) -> int | None:
        """The process that takes clearly longer for its layers than the others; ``None`` if there is none."""
        r = self.slowness.index(max(self.slowness))
        return r if self.times_as_long(r) >= CLEARLY_SLOW else None

    def described(self, names: Sequence[str], *, least_gain: float) -> str:
        """Return what to tell: who is waited for, who is slow, and what the better balance brings.

        Args:
            names: The name of each process.
            least_gain: The gain from which on the better balance is named.
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
        """How many times as long a process takes for its layers as the others would."""
        others = [value for other, value in enumerate(self.slowness) if other != r]
        return self.slowness[r] / statistics.median(others) if others else 1.0


class LastSteps:
    """The last recorded steps of one balance, without those of smaller batches.

    Args:
        number: How many are kept.
    """

    def __init__(self, number: int = STEPS_TO_ASSESS) -> None:
        self.steps: deque[MeasuredStep] = deque(maxlen=number)

    def add(self, step: MeasuredStep) -> bool:
        """Add a step; return whether it counts: it does not if its batch had fewer micro-batches than those before."""
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
    rows: Sequence[Sequence[Record]], recorded: Sequence[Recorded], balance: Sequence[int], *, whole_batch: bool
) -> MeasuredStep | None:
    """Return what a recorded step says; ``None`` if it has no pass with a backward part, or lacks layers.

    Args:
        rows: The records of each process on one clock, the driver's last.
        recorded: What each process has recorded.
        balance: The number of layers of each chunk.
        whole_batch: Whether the driver's own code runs once, between forward and backward passes.
    """
    whole = measured_timetable(rows)
    layers: dict[int, LayerRecord] = {}
    for own in recorded:
        layers |= own.layers
    if whole is None or len(layers) != sum(balance):
        return None
    timetable = from_first_forward(whole)
    microbatches = 1 + max(step.microbatch for step in whole.end)
    number = last_pass(rows)
    seconds: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    sending: list[float] = []
    for record in (record for row in rows for record in row if record.number == number):
        seconds[record.kind, max(0, record.stage)].append(record.computed - record.received)
        if record.kind in ("F", "B", "I", "W"):
            sending.append(record.end - record.computed)

    def mean(kind: str, i: int = 0) -> float | None:
        return statistics.fmean(seconds[kind, i]) if seconds[kind, i] else None

    costs: list[LayerCosts] = []
    for i, (start, end) in enumerate(pairwise([0, *accumulate(balance)])):
        forward, backward = mean("F", i) or 0.0, mean("B", i)
        input_grad, weight_grad = mean("I", i), mean("W", i) or 0.0
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
    if not whole_batch:  # otherwise the stages wait while it runs, whatever the balance is
        driver = DriverCosts(mean("b") or 0.0, mean("loss", len(balance) - 1) or 0.0, mean("a") or 0.0)
    return MeasuredStep(
        whole.placement,
        list(balance),
        microbatches,
        ModelCosts(costs, transfer_seconds(rows), statistics.fmean(sending), driver),
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
    """Return what recorded steps with the same number of micro-batches say: the median of them.

    Args:
        steps: The steps, at least one.
        kinds: What each layer is; layers of one kind do the same, if their inputs have as many elements.
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
    return ModelCosts(
        layers,
        median([step.costs.transfer for step in steps]),
        median([step.costs.action for step in steps]),
        DriverCosts(
            median([driver.before for driver in drivers]),
            median([driver.after for driver in drivers]),
            median([driver.before_backward for driver in drivers]),
        ),
    )


def _divided(layer: LayerCosts, slowness: float) -> LayerCosts:
    """Return what a layer would cost on the fastest process."""
    backward = None if layer.backward is None else layer.backward / slowness
    return LayerCosts(layer.forward / slowness, layer.input_grad / slowness, layer.weight_grad / slowness, backward)


def _averaged(layers: Sequence[LayerCosts], alike: Sequence[Hashable]) -> list[LayerCosts]:
    """Return the mean of the costs of all layers of a kind for each of them.

    Where a process shares its core, one layer is interrupted and another one is not.
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
    """Return how many times as long each process takes for a layer as the fastest one, at least 1.

    Fits ``seconds`` by (cost of the kind of a layer) times (slowness of its process), in turn. Processes without kinds
    of layers in common, also over other ones, are taken to be equally fast, because nothing tells.
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
    """Return groups of processes that have kinds of layers in common, also over others of the group."""
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
