"""Find the fastest plan for measured costs: balance, placement, order, split backward passes, number of micro-batches.

The simulator computes the time of each proposal of the search::

    for each number of micro-batches, and each schedule with each number of stages per process:
        the balance: all balances if there are few, otherwise the most even balance, improved layer by layer
    for the best of these:
        the order of actions: greedy orders for the measured costs, improved by swaps on the critical path

The search spends a fixed number of simulated actions and no random numbers, so every process of a run, and every run,
finds the same plan from the same costs.

Index letters: ``m`` micro-batch (in formulas, the number of micro-batches), ``i``, ``j`` stage, ``r`` process, ``p``
number of processes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, chain, combinations, pairwise, product
from typing import TypeAlias

from strategies.pipeline.schedule.planned import PlannedSchedule
from strategies.pipeline.schedule.program import check_order
from strategies.pipeline.schedule.tables import (
    SCHEDULES,
    Action,
    ActionTable,
    Placement,
    v,
)
from strategies.planning.simulator import (
    ActionCosts,
    DriverCosts,
    PerStage,
    PreparedTable,
    Simulation,
    simulate,
    time_index,
)

EFFORT = 8_000_000
"""Maximum number of simulated actions of a search: about a second."""

CLEARLY_FASTER = 0.99
"""The default of :func:`search` for its argument of this name."""

AS_FAST = 1.005
"""The search chooses the smallest peak among plans that take at most this many times as long as the fastest plan."""


_CHECKED = 50
"""The time to make and check a new table before it is simulated, in simulations.

With user code on the driver it is twice as long, because the place of this code follows from an additional simulation.
"""

NUM_STARTS = 8
"""The number of pairs of a placement and a balance for which the search improves the order of actions step by step."""

PATIENCE = 12
"""Maximum number of consecutive changes of an order without an improvement."""


@dataclass(frozen=True)
class LayerCosts:
    """The costs of one micro-batch in a layer, in seconds and bytes.

    Attributes:
        forward: Time of the forward pass.
        input_grad: Time of the input gradients. For a layer that cannot be split, the time of its whole backward pass.
        weight_grad: Time of the weight gradients; 0 for a layer that cannot be split.
        backward: Time of the whole backward pass; ``None`` if it is the sum of its parts.
        activation_bytes: The memory that the layer holds from its forward pass on.
        kept_bytes: The part that is held from the input gradients to the weight gradients; ``None`` if all of it.
        parameter_bytes: The memory that the layer always holds: parameters, gradients, optimizer states.
        step: Time of the optimizer's step, which each process runs once per batch after its passes.
    """

    forward: float
    input_grad: float
    weight_grad: float
    backward: float | None = None
    activation_bytes: float = 0.0
    kept_bytes: float | None = None
    parameter_bytes: float = 0.0
    step: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be finite and not negative, got {value}")

    @property
    def whole(self) -> float:
        """The time of the whole backward pass."""
        return self.input_grad + self.weight_grad if self.backward is None else self.backward

    @property
    def kept(self) -> float:
        """The bytes held from the input gradients to the weight gradients."""
        return self.activation_bytes if self.kept_bytes is None else self.kept_bytes


@dataclass(frozen=True)
class ModelCosts:
    """The costs of one micro-batch in a model.

    Attributes:
        layers: The costs of each layer.
        transfer: Time to send the input of a layer, or its gradient, from one process to another, for each layer or for
            all of them.
        action: Time of the engine for an action with a message. Weight gradients have none.
        driver: The costs of the driver's part outside the layers.
        driver_parameter_bytes: The memory that the driver always holds for this part.
        driver_step: Time of the optimizer's step for the parameters of this part.
        activation_peaks: Returns the peak memory of each process for micro-batches, given a table, its placement and
            the number of layers of each stage. By default it is computed from the bytes of each layer.
        memory_scale: The memory of a process for each counted byte.
        slowness: For each process, the factor on its times of layers, at least 1; by default 1.
        lengths: If the model has several lists of layers, the number of layers of each list; by default it has one.
        at_once: Whether the driver's code runs for the whole batch at once, between the passes of the stages. Its time
            is then not in ``driver``.
        checkpoint: Which micro-batches are recomputed. The times of layers do not include that.
    """

    layers: Sequence[LayerCosts]
    transfer: PerStage = 0.0
    action: float = 0.0
    driver: DriverCosts = field(default_factory=DriverCosts)
    driver_parameter_bytes: float = 0.0
    driver_step: float = 0.0
    activation_peaks: Callable[[ActionTable, Placement, Sequence[int]], Sequence[float]] | None = None
    memory_scale: float = 1.0
    slowness: Sequence[float] = ()
    lengths: Sequence[int] = ()
    at_once: bool = False
    checkpoint: str = "never"

    @property
    def num_lists(self) -> int:
        """The number of lists of layers."""
        return len(self.lengths) or 1

    @property
    def transfers(self) -> list[float]:
        """The time to send the input of each layer."""
        return list(self.transfer) if isinstance(self.transfer, Sequence) else [self.transfer] * len(self.layers)

    def seconds(self, table: ActionTable, balance: Sequence[int]) -> float:
        """Return the predicted time of a table whose stages have these numbers of layers, without optimizer step."""
        number = 1 + max(action.microbatch for row in table for action in row)
        return simulated([self] * number, table, balance).total_time

    def slowness_of(self, process: int) -> float:
        """The factor on the times of layers on a process."""
        return self.slowness[process] if self.slowness else 1.0


def simulated(costs: Sequence[ModelCosts], table: ActionTable, balance: Sequence[int]) -> Simulation:
    """Simulate a table whose stages have these numbers of layers, without optimizer step.

    Args:
        costs: The costs of each micro-batch.
        table: The actions of each process.
        balance: The number of layers of each stage.
    """
    placement = replace(Placement.of(table), num_lists=costs[0].num_lists)
    each = [_Model(own, len(costs), None).of_stages(balance, placement) for own in costs]
    first = costs[0]
    return simulate(table, each, placement=placement, at_once=first.at_once, checkpoint=first.checkpoint)


CostsOf: TypeAlias = Callable[[int], ModelCosts]
"""Returns the costs of one micro-batch, given the number of micro-batches into which a batch is split."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        schedule: The name of the schedule, or ``"searched"`` if the order of actions was also searched.
        placement: The process of each stage.
        balance: The number of layers of each stage.
        microbatches: The number of micro-batches.
        table: The actions of each process.
        seconds: The predicted time of a batch, with the optimizer's step if its time is given.
        bubble_fraction: The predicted idle share of all processes.
        peak_bytes: The predicted peak memory of each process for parameters and activations.
        reason: One line that says what was chosen, and why.
    """

    schedule: str
    placement: Placement
    balance: list[int]
    microbatches: int
    table: ActionTable
    seconds: float
    bubble_fraction: float
    peak_bytes: list[float]
    reason: str

    def planned_schedule(self, gradient_sets: int = 1) -> PlannedSchedule:
        """Return the plan as the schedule of a run.

        Args:
            gradient_sets: Number of gradients of a parameter that are assumed to exist at the same time.
        """
        processes, name, num_lists = len(self.table), self.schedule, self.placement.num_lists
        chunks = self.placement.num_stages // processes // num_lists
        if name == SEARCHED:
            splits = any(action.kind == "W" for row in self.table for action in row)
            other = "zb-h1" if splits else "1f1b" if chunks == 1 else "interleaved"
            name = "zbv" if chunks == 2 and self.placement == v(processes) else other
        balance, peak = list(self.balance), max(self.peak_bytes)
        return PlannedSchedule(name, chunks, balance, self.microbatches, self.table, peak, gradient_sets, num_lists)


SEARCHED = "searched"
"""The name of a schedule whose order of actions was searched."""

SEARCHABLE = ("1f1b", "zb-h1", "interleaved", "zbv", "v-half", SEARCHED)
"""The names of schedules that run the user's code once per micro-batch, as ``"auto"`` requires."""

_Family: TypeAlias = tuple[str, Placement, Callable[[int], ActionTable]]
"""A schedule's name, its placement, and a function that returns its table for a number of micro-batches."""


def _families(processes: int, max_chunks: int, num_lists: int) -> list[_Family]:
    """Return the named schedules, each with every possible number of stages per process in each list of layers."""
    return [
        (name, named.placement(processes, chunks).repeated(num_lists), make)
        for name, named in SCHEDULES.items()
        if name in SEARCHABLE and (num_lists == 1 or named.lists is not None)
        for chunks in range(named.chunks[0], min(max_chunks, named.chunks[2]) + 1)
        for make in [partial(named.of, processes, chunks=chunks, num_lists=num_lists)]
    ]


def search(
    costs: ModelCosts | CostsOf,
    processes: int,
    microbatches: Sequence[int],
    *,
    max_chunks: int = 2,
    schedules: Collection[str] = SEARCHABLE,
    memory_limit_bytes: float | None = None,
    balance_of: Callable[[int], Sequence[int] | None] | None = None,
    clearly_faster: float = CLEARLY_FASTER,
    effort: int = EFFORT,
) -> SearchResult:
    """Find the plan with the shortest predicted time of a batch.

    Args:
        costs: The costs of one micro-batch, or a function that returns them for a number of micro-batches. Several
            numbers to choose from require a function.
        processes: The number of processes.
        microbatches: The numbers of micro-batches to choose from.
        max_chunks: Maximum number of stages of a process, in each list of layers.
        schedules: The names of the schedules to choose from. :data:`SEARCHED` also varies the order of actions of the
            other schedules; not if there are several lists of layers.
        memory_limit_bytes: Maximum memory of a process. A schedule that needs more is not chosen.
        balance_of: Returns the number of layers of each stage, given the number of stages, or ``None`` if it has none
            for this number. By default the search finds the balance.
        clearly_faster: A custom order is chosen only if it takes less than this share of the time of the best named
            schedule.
        effort: Maximum number of simulated actions of the search, besides the first simulation of each schedule.

    Raises:
        ValueError: If there are fewer layers than stages of every schedule, if no plan fits into the memory, or if an
            argument is out of range.
    """
    if processes < 1 or max_chunks < 1:
        raise ValueError(f"processes and max_chunks must be at least 1, got {processes} and {max_chunks}")
    if not microbatches or min(microbatches) < 1:
        raise ValueError(f"microbatches must be numbers of at least 1, got {list(microbatches)}")
    if not callable(costs) and len(set(microbatches)) > 1:
        raise ValueError(
            "costs are those of one micro-batch, whose size depends on the number of micro-batches; to choose among "
            f"{list(microbatches)}, give a function that takes the number"
        )
    unknown = [name for name in schedules if name not in SEARCHABLE]
    if unknown or not set(schedules) - {SEARCHED}:
        raise ValueError(
            f"schedules must be some of {', '.join(SEARCHABLE)}, and not {SEARCHED} alone; got {list(schedules)}"
        )
    budget = _Budget(effort)
    candidates: list[_Candidate] = []
    layers = ""
    for num in sorted(set(microbatches)):
        model = _Model(costs(num) if callable(costs) else costs, num, memory_limit_bytes)
        layers = " and ".join(map(str, model.lengths))
        for name, placement, make in _families(processes, max_chunks, model.costs.num_lists):
            if name not in schedules or not model.can_have(placement):
                continue
            balance = None if balance_of is None else balance_of(placement.num_stages)
            if balance_of is None or balance is not None:
                for table in _variants(make(num), model):
                    candidates.append(_Candidate.of(name, placement, table, model, balance))
    if not candidates:
        raise ValueError(
            f"{layers} layers cannot be divided among {processes} processes with up to {max_chunks} stages each, "
            f"under {', '.join(schedules)}; every stage needs a layer"
        )
    candidates.sort(key=lambda candidate: candidate.rank)
    for place, candidate in enumerate(candidates):
        best = min(candidates, key=lambda each: each.rank)
        if candidate.least_time < best.rank[1] or best.rank[0] > 0:
            share = budget.left // 2 if place == 0 else budget.left // 4
            candidates[place] = _with_better_balance(candidate, _Budget(share, budget))
    named = best = _choice(candidates)
    if SEARCHED in schedules and best.model.costs.num_lists == 1:
        searched = _choice(_with_better_orders(sorted(candidates, key=lambda each: each.rank), budget))
        if searched.rank < (named.rank[0], named.rank[1] * clearly_faster):
            best = searched
    if best.rank[0] > 0:
        assert memory_limit_bytes is not None
        least = min(candidates, key=lambda each: max(each.peak_bytes))
        process = least.peak_bytes.index(max(least.peak_bytes))
        raise ValueError(
            f"no plan fits into memory_limit_bytes={memory_limit_bytes:.0f}: process {process} holds "
            f"{max(least.peak_bytes):.0f} bytes under {least.description}, the smallest peak; use more "
            "processes, recompute activations, or raise the limit"
        )
    return _result(best, named, candidates)


def balanced(
    costs: ModelCosts,
    table: ActionTable,
    placement: Placement,
    *,
    balance: Sequence[int] | None = None,
    memory_limit_bytes: float | None = None,
    effort: int = EFFORT,
) -> tuple[list[int], Simulation]:
    """Find the fastest balance for a table. Returns the balance and the simulated batch.

    Args:
        costs: The costs of one micro-batch.
        table: The actions of each process.
        placement: The process of each stage.
        balance: The number of layers of each stage, if it is given.
        memory_limit_bytes: Maximum memory of a process. If every balance exceeds it, the balance that exceeds it least
            is returned.
        effort: Maximum number of simulated actions of the search.
    """
    model = _Model(costs, 1 + max(action.microbatch for row in table for action in row), memory_limit_bytes)
    candidate = _Candidate.of("", placement, table, model, balance)
    found = _with_better_balance(candidate, _Budget(effort))
    return found.balance, found.prepared.simulate(found.costs)


def _choice(candidates: Iterable[_Candidate]) -> _Candidate:
    """Return the fastest candidate that fits into memory, or a candidate that is about as fast and holds less."""
    ranked = sorted(candidates, key=lambda each: each.rank)
    excess, seconds = ranked[0].rank
    as_fast = [each for each in ranked if each.rank[0] <= excess and each.rank[1] <= seconds * AS_FAST]
    return min(as_fast, key=lambda each: max(each.peak_bytes))


def _result(best: _Candidate, named: _Candidate, candidates: Sequence[_Candidate]) -> SearchResult:
    simulation = best.prepared.simulate(best.costs)
    others = [each for each in [named, *candidates] if each.name != best.name]
    why = ""
    if others:
        other = min(others, key=lambda each: each.rank)
        why = f"; {other.description} would take {other.rank[1] / best.rank[1] - 1 if best.rank[1] else 0:.1%} longer"
        if other.rank[0] > 0:
            why = f"; {other.description} exceeds the memory limit"
    reason = (
        f"{best.description}: {best.rank[1]:.3g} s per batch predicted, {simulation.bubble_fraction:.1%} idle, at most "
        f"{max(best.peak_bytes) / 2**20:.0f} MiB per process{why}"
    )
    return SearchResult(
        schedule=best.name,
        placement=best.prepared.placement,
        balance=best.balance,
        microbatches=best.model.microbatches,
        table=best.prepared.table,
        seconds=best.rank[1],
        bubble_fraction=simulation.bubble_fraction,
        peak_bytes=best.peak_bytes,
        reason=reason,
    )


class _Budget:
    """Counts simulated actions. The actions of a part also count in the whole budget."""

    def __init__(self, actions: int, whole: _Budget | None = None) -> None:
        self.left, self._whole = actions, whole

    def spend(self, actions: int) -> bool:
        """Count actions, and return whether the budget sufficed."""
        self.left -= actions
        if self._whole is not None:
            self._whole.spend(actions)
        return self.left >= 0


class _Model:
    """Costs of consecutive layers, for one number of micro-batches."""

    def __init__(self, costs: ModelCosts, microbatches: int, limit_bytes: float | None) -> None:
        self.costs, self.microbatches, self.limit_bytes = costs, microbatches, limit_bytes
        layers = costs.layers
        columns = (
            [layer.forward for layer in layers],
            [layer.whole for layer in layers],
            [layer.input_grad for layer in layers],
            [layer.weight_grad for layer in layers],
            [layer.activation_bytes for layer in layers],
            [layer.kept for layer in layers],
            [layer.parameter_bytes for layer in layers],
            [layer.step for layer in layers],
        )
        self._has_steps = costs.driver_step > 0 or any(layer.step > 0 for layer in layers)
        self._sums = [[0.0, *accumulate(column)] for column in columns]
        self._transfers = costs.transfers

    def of_stages(self, balance: Sequence[int], placement: Placement) -> ActionCosts:
        """Return the costs of stages with these numbers of layers."""
        *seconds, activations, kept, _, _ = self._per_stage(balance)
        factors = [self.costs.slowness_of(process) for process in placement.process_of]
        of_engine = [self.costs.action] * 3 + [0.0]
        forward, backward, input_grad, weight_grad = (
            [factor * each + own for factor, each in zip(factors, column, strict=True)]
            for column, own in zip(seconds, of_engine, strict=True)
        )
        return ActionCosts(
            forward=forward,
            backward=backward,
            input_grad=input_grad,
            weight_grad=weight_grad,
            recompute=[time - self.costs.action for time in forward],
            transfer=[self._transfers[start] for start in accumulate(balance[:-1], initial=0)],
            activation_bytes=activations,
            kept_bytes=kept,
            driver=self.costs.driver,
        )

    def parameter_bytes(self, balance: Sequence[int], placement: Placement) -> list[float]:
        """Return the memory that each process always holds."""
        return self._per_process(balance, placement, -2, self.costs.driver_parameter_bytes)

    def total_time(self, prepared: PreparedTable, balance: Sequence[int], costs: ActionCosts) -> float:
        """Return when the last process has ended its passes and its optimizer step."""
        if not self._has_steps:
            return prepared.total_time(costs)
        steps = self._per_process(balance, prepared.placement, -1, self.costs.driver_step)
        return max(end + step for end, step in zip(prepared.row_ends(costs), steps, strict=True))

    def _per_process(self, balance: Sequence[int], placement: Placement, column: int, driver: float) -> list[float]:
        found = [0.0] * (1 + max(placement.process_of))
        found[placement.driver] = driver
        for process, value in zip(placement.process_of, self._per_stage(balance)[column], strict=True):
            found[process] += value
        return found

    def _per_stage(self, balance: Sequence[int]) -> list[list[float]]:
        bounds = [0, *accumulate(balance)]
        return [[sums[end] - sums[start] for start, end in pairwise(bounds)] for sums in self._sums]

    @property
    def driver_seconds(self) -> float:
        return self.costs.driver.seconds

    @property
    def lengths(self) -> Sequence[int]:
        """The number of layers of each list."""
        return self.costs.lengths or [len(self.costs.layers)]

    def can_have(self, placement: Placement) -> bool:
        """Whether each list has a layer for each of its stages."""
        return min(self.lengths) >= placement.num_stages // placement.num_lists

    def prepared(self, table: ActionTable, placement: Placement) -> PreparedTable:
        """Return a table prepared for these costs."""
        return PreparedTable(
            table,
            placement=placement,
            with_user_code=self.costs.driver.runs_code_before,
            at_once=self.costs.at_once,
            checkpoint=self.costs.checkpoint,
        )

    def all_balances(self, num_stages: int) -> Iterator[list[int]]:
        """Yield every number of layers of each stage. Each list has its own stages."""
        parts = product(*(_all_balances(length, num_stages // len(self.lengths)) for length in self.lengths))
        return ([*chain(*part)] for part in parts)

    def num_balances(self, num_stages: int) -> int:
        """Return the number of balances of :meth:`all_balances`."""
        chunks = num_stages // len(self.lengths)
        return math.prod(math.comb(length - 1, chunks - 1) for length in self.lengths)


@dataclass(frozen=True)
class _Candidate:
    """A table with a balance.

    Attributes:
        rank: Bytes above the memory limit, and the time of a batch. The search minimises them in this order.
        work: For each layer, the time of all its passes of one micro-batch. If a table splits only some backward
            passes, this is the mean.
        is_fixed: Whether the balance is given.
    """

    name: str
    prepared: PreparedTable
    model: _Model
    balance: list[int]
    costs: ActionCosts
    rank: tuple[float, float]
    work: list[float]
    is_fixed: bool

    @classmethod
    def of(
        cls, name: str, placement: Placement, table: ActionTable, model: _Model, balance: Sequence[int] | None = None
    ) -> _Candidate:
        """Return a table with a balance, by default the most even balance."""
        prepared = model.prepared(table, placement)
        splits = {action for row in table for action in row if action.kind == "I"}
        share = len(splits) / (model.microbatches * placement.num_stages)
        work = [
            layer.forward + share * (layer.input_grad + layer.weight_grad) + (1 - share) * layer.whole
            for layer in model.costs.layers
        ]
        is_fixed = balance is not None
        found = list(balance) if balance is not None else _even_lists(work, placement, model)
        return cls._made(name, prepared, model, found, work, is_fixed)

    @classmethod
    def _made(
        cls, name: str, prepared: PreparedTable, model: _Model, balance: list[int], work: list[float], is_fixed: bool
    ) -> _Candidate:
        costs = model.of_stages(balance, prepared.placement)
        time, excess = model.total_time(prepared, balance, costs), 0.0
        if model.limit_bytes is not None:
            excess = max(0.0, max(_peaks(prepared, model, balance, costs)) - model.limit_bytes)
        return cls(name, prepared, model, balance, costs, (excess, time), work, is_fixed)

    def with_balance(self, balance: list[int]) -> _Candidate:
        return self._made(self.name, self.prepared, self.model, balance, self.work, self.is_fixed)

    def with_table(self, table: ActionTable) -> _Candidate:
        """Return the same balance with another table.

        Raises:
            ValueError: If the table cannot run.
        """
        check_order(table)
        prepared = self.model.prepared(table, self.prepared.placement)
        work = [
            layer.forward + min(layer.whole, layer.input_grad + layer.weight_grad) for layer in self.model.costs.layers
        ]
        return self._made(SEARCHED, prepared, self.model, self.balance, work, self.is_fixed)

    @property
    def num_actions(self) -> int:
        return sum(map(len, self.prepared.table))

    @property
    def cost_of_a_table(self) -> int:
        """The cost of a new table in a budget."""
        return self.num_actions * _CHECKED * (2 if self.model.costs.driver.runs_code_before else 1)

    @property
    def least_time(self) -> float:
        """A lower bound on the time with any balance: all processes are always busy."""
        processes = len(self.prepared.table)
        return self.model.microbatches * (sum(self.work) + self.model.driver_seconds) / processes

    @cached_property
    def peak_bytes(self) -> list[float]:
        return _peaks(self.prepared, self.model, self.balance, self.costs)

    @property
    def description(self) -> str:
        placement = self.prepared.placement
        chunks = placement.num_stages // len(self.prepared.table) // placement.num_lists
        stages = f", {chunks} stages per process" if chunks > 1 else ""
        stages += " in each list" if stages and placement.num_lists > 1 else ""
        return f"{self.name}{stages}, balance {self.balance}, {self.model.microbatches} micro-batches"


def _peaks(prepared: PreparedTable, model: _Model, balance: Sequence[int], costs: ActionCosts) -> list[float]:
    held, of = model.parameter_bytes(balance, prepared.placement), model.costs.activation_peaks
    peaks = prepared.peak_bytes([costs]) if of is None else of(prepared.table, prepared.placement, balance)
    return [model.costs.memory_scale * (own + peak) for own, peak in zip(held, peaks, strict=True)]


def _variants(table: ActionTable, model: _Model) -> list[ActionTable]:
    """Return the table, and the same table with whole backward passes if these save time."""
    if all(layer.whole >= layer.input_grad + layer.weight_grad for layer in model.costs.layers):
        return [table]
    merged = with_whole_passes(table)
    return [table] if merged == table else [table, merged]


def with_whole_passes(table: ActionTable) -> ActionTable:
    """Return a table in which ``B`` replaces each ``I`` that ``W`` directly follows."""
    rows = []
    for row in table:
        merged: list[Action] = []
        for action in row:
            if action.kind == "W" and merged and merged[-1] == action._replace(kind="I"):
                merged[-1] = action._replace(kind="B")
            else:
                merged.append(action)
        rows.append(merged)
    return rows


# Balance


def _even_lists(work: Sequence[float], placement: Placement, model: _Model) -> list[int]:
    """Return the balance in which each list of layers, with its share of the driver's part, is divided most evenly."""
    chunks = placement.num_stages // placement.num_lists
    of_list, total, balance, start = Placement(placement.process_of[:chunks]), sum(work), list[int](), 0
    for length in model.lengths:
        own = work[start : start + length]
        share = sum(own) / total if total > 0 else 1 / len(model.lengths)
        balance += _even_balance(own, of_list, model.driver_seconds * share)
        start += length
    return balance


def _even_balance(work: Sequence[float], placement: Placement, driver_seconds: float) -> list[int]:
    """Return the balance with the most even load of all processes, including the driver's part, stage by stage.

    All processes have the same target load, unless the driver's part alone exceeds it. Each stage of a process gets an
    equal part of the rest. Dynamic programming minimises the sum of squared differences from the targets.
    """
    stages, num = placement.num_stages, len(work)
    processes = 1 + max(placement.process_of)
    target = (sum(work) + driver_seconds) / processes
    if driver_seconds > target and processes > 1:
        target = sum(work) / (processes - 1)
    own = [len(placement.stages_of(r)) for r in range(processes)]
    targets = [
        max(0.0, target - (driver_seconds if r == placement.driver else 0.0)) / own[r] for r in placement.process_of
    ]
    total = [0.0, *accumulate(work)]
    best = [math.inf] * num + [0.0]
    ends = []
    for i in reversed(range(stages)):
        rest, best = best, [math.inf] * (num + 1)
        end = [0] * (num + 1)
        for start in range(i, num - (stages - i) + 1):
            for stop in range(start + 1, num - (stages - i - 1) + 1):
                value = rest[stop] + (total[stop] - total[start] - targets[i]) ** 2
                if value < best[start]:
                    best[start], end[start] = value, stop
        ends.append(end)
    balance, start = [], 0
    for end in reversed(ends):
        balance.append(end[start] - start)
        start = end[start]
    return balance


def _with_better_balance(candidate: _Candidate, budget: _Budget) -> _Candidate:
    """Return the candidate with the best balance that the budget finds."""
    if candidate.is_fixed:
        return candidate
    stages, model = len(candidate.balance), candidate.model
    if model.num_balances(stages) * candidate.num_actions <= budget.left:
        return _best_of(candidate, model.all_balances(stages), budget)
    while True:
        neighbours = neighbours_of(candidate.balance, model.costs.num_lists)
        better = _best_of(candidate, neighbours, budget, first=True)
        if better is candidate:
            return candidate
        candidate = better


def _best_of(
    candidate: _Candidate, balances: Iterable[list[int]], budget: _Budget, *, first: bool = False
) -> _Candidate:
    """Return the best candidate with one of the balances; with ``first``, the first one better than ``candidate``.

    Balances are not simulated if their most loaded process alone takes too long.
    """
    best = candidate
    bound = partial(_least_time, candidate)
    for least, balance in sorted((bound(balance), balance) for balance in balances):
        if least >= best.rank[1] and best.rank[0] == 0:
            break
        if not budget.spend(candidate.num_actions):
            break
        other = candidate.with_balance(balance)
        if other.rank < best.rank:
            best = other
            if first:
                break
    return best


def _least_time(candidate: _Candidate, balance: Sequence[int]) -> float:
    placement, costs = candidate.prepared.placement, candidate.model.costs
    loads = [0.0] * len(candidate.prepared.table)
    loads[placement.driver] = candidate.model.driver_seconds
    start = 0
    for process, length in zip(placement.process_of, balance, strict=True):
        loads[process] += costs.slowness_of(process) * sum(candidate.work[start : start + length])
        start += length
    return candidate.model.microbatches * max(loads)


def _all_balances(num: int, stages: int) -> Iterator[list[int]]:
    for cuts in combinations(range(1, num), stages - 1):
        yield [end - start for start, end in pairwise((0, *cuts, num))]


def neighbours_of(balance: Sequence[int], num_lists: int = 1) -> Iterator[list[int]]:
    """Yield balances in which a layer moves from one stage to another. The layers of stages in between shift.

    Args:
        balance: The number of layers of each stage.
        num_lists: The number of lists of layers. A layer stays in its list.
    """
    chunks = len(balance) // num_lists
    for i, length in enumerate(balance):
        if length > 1:
            first = i - i % chunks
            for j in range(first, first + chunks):
                if i != j:
                    changed = list(balance)
                    changed[i] -= 1
                    changed[j] += 1
                    yield changed


# Order of actions


def _with_better_orders(candidates: Sequence[_Candidate], budget: _Budget) -> list[_Candidate]:
    """Return candidates whose order of actions was searched.

    The starting points are the given candidates, sorted, and greedy orders for their balances and similar balances.
    """
    best = candidates[0]
    starts: dict[_CandidateKey, _Candidate] = {}

    def consider(candidate: _Candidate) -> None:
        starts.setdefault(_key(candidate), candidate)

    part = _Budget(budget.left // 2, budget)
    for candidate in candidates:
        consider(candidate)
    for forward_first, early_first in product((False, True), repeat=2):
        for candidate in candidates:
            if part.left > 0 and (candidate.least_time < best.rank[1] or best.rank[0] > 0):
                for table in _greedy_tables(candidate, forward_first=forward_first, early_first=early_first):
                    if not part.spend(candidate.cost_of_a_table):
                        break
                    consider(candidate.with_table(table))
    ranked = sorted(starts.values(), key=lambda each: each.rank)
    for candidate in ranked[:NUM_STARTS]:
        balances = _similar_balances(candidate)
        for least, balance in sorted((_least_time(candidate, each), each) for each in balances):
            if part.left <= 0 or (least >= best.rank[1] and best.rank[0] == 0):
                break
            other = candidate.with_balance(balance)
            for table in chain([candidate.prepared.table], _greedy_tables(other)):
                if not part.spend(candidate.cost_of_a_table):
                    break
                consider(other.with_table(table))
    improved = []
    for start in sorted(starts.values(), key=lambda each: each.rank):
        if budget.left > 0 and (best.rank[0] > 0 or start.least_time < best.rank[1]):
            improved.append(_with_better_path(start, _Budget(budget.left // 3, budget)))
            best = min(best, improved[-1], key=lambda each: each.rank)
    return [*starts.values(), *improved]


def _similar_balances(candidate: _Candidate) -> Iterable[list[int]]:
    if candidate.is_fixed:
        return []
    stages, model = len(candidate.balance), candidate.model
    if model.num_balances(stages) <= stages * stages:
        return model.all_balances(stages)
    return neighbours_of(candidate.balance, model.costs.num_lists)


def _greedy_tables(
    candidate: _Candidate, *, forward_first: bool = False, early_first: bool = False
) -> Iterator[ActionTable]:
    p, num = len(candidate.prepared.table), candidate.model.microbatches
    seconds = candidate.prepared.seconds_of(candidate.costs)
    for window in sorted({min(num, size) for size in (p, p + 1, (3 * p + 1) // 2, 2 * p, 3 * p)}):
        for whole in sorted({0, max(0, num - p), num}):
            yield greedy_order(
                candidate.prepared.placement,
                num,
                seconds,
                window=window,
                whole=whole,
                forward_first=forward_first,
                early_first=early_first,
                checkpoint=candidate.model.costs.checkpoint,
            )


def greedy_order(
    placement: Placement,
    microbatches: int,
    seconds: Sequence[float],
    *,
    window: int,
    whole: int,
    forward_first: bool = False,
    early_first: bool = False,
    checkpoint: str = "never",
) -> ActionTable:
    """Return a table in which each process runs the most urgent action that is ready.

    ``W`` runs when no other action is ready, unless another action will be ready before half of ``W`` has run.

    Args:
        placement: The process of each stage.
        microbatches: The number of micro-batches.
        seconds: The times of :meth:`PreparedTable.seconds_of`.
        window: The number of micro-batches by which forward passes of stage 0 may be ahead of backward passes.
        whole: The number of first micro-batches whose backward passes are not split.
        forward_first: Whether forward passes are more urgent than gradients.
        early_first: Whether earlier stages of a process are more urgent than later ones.
        checkpoint: Which micro-batches are recomputed.
    """
    num_stages, process_of = placement.num_stages, placement.process_of
    transfers = seconds[len(seconds) - num_stages :]
    step = 1 if early_first else -1
    stages = [placement.stages_of(r)[::step] for r in range(1 + max(process_of))]
    rows: ActionTable = [[] for _ in stages]
    inputs: list[list[float]] = [[0.0] * microbatches, *([] for _ in range(num_stages - 1))]  # when they arrive
    grads: list[list[float]] = [[] for _ in range(num_stages)]
    num_forward, num_backward = [0] * num_stages, [0] * num_stages
    pending: list[list[Action]] = [[] for _ in stages]
    busy_until = [0.0] * len(stages)
    events = [(0.0, r) for r in range(len(stages))]
    while events:
        now, r = heapq.heappop(events)
        if busy_until[r] > now:
            continue
        forward: list[tuple[float, Action]] = []  # next actions, and when their inputs arrive
        backward: list[tuple[float, Action]] = []
        for i in stages[r]:
            m = num_backward[i]
            if m < len(grads[i]):
                backward.append((grads[i][m], Action("B" if m < whole else "I", m, i)))
            m = num_forward[i]
            if m < len(inputs[i]) and (i > 0 or m - num_backward[0] < window):
                forward.append((inputs[i][m], Action("F", m, i)))
        following = forward + backward if forward_first else backward + forward
        ready = next((action for arrival, action in following if arrival <= now), None)
        if ready is None and pending[r]:
            later = min((arrival for arrival, _ in following), default=math.inf)
            if now + seconds[time_index(pending[r][0], num_stages, recompute=False)] / 2 <= later:
                ready = pending[r].pop(0)
        if ready is None:
            continue  # an arriving value wakes the process
        kind, m, i = ready
        again = checkpoint == "always" or (
            checkpoint == "except_last" and m < microbatches - 1 and rows[r][-1:] != [Action("F", m, i)]
        )
        rows[r].append(ready)
        end = busy_until[r] = now + seconds[time_index(ready, num_stages, recompute=again)]
        heapq.heappush(events, (end, r))
        if kind == "W":
            continue
        to = i + 1 if kind == "F" else i - 1
        if kind == "F":
            num_forward[i] += 1
        else:
            num_backward[i] += 1
            if kind == "I":
                pending[r].append(Action("W", m, i))
        if kind == "F" and to == num_stages:
            grads[i].append(end)
        elif to >= 0:
            arrival = end + (transfers[max(to, i)] if process_of[to] != r else 0.0)
            (inputs if kind == "F" else grads)[to].append(arrival)
            heapq.heappush(events, (arrival, process_of[to]))
    return rows


def _with_better_path(candidate: _Candidate, budget: _Budget) -> _Candidate:
    """Improve the order by changes to the critical path. Only such changes can shorten the time of a batch.

    Applies the best of all changes, even if it does not shorten the time, until :data:`PATIENCE` changes have brought
    no improvement.
    """
    best = current = candidate
    seen = {_key(current)}
    patience = PATIENCE
    while patience and (best.rank[0] > 0 or best.rank[1] > best.least_time):
        following: _Candidate | None = None
        for table in _changes(current):
            if not budget.spend(current.cost_of_a_table):
                return best
            try:
                other = current.with_table(table)
            except ValueError:  # the table deadlocks, or changes the order of micro-batches
                continue
            if _key(other) not in seen and (following is None or other.rank < following.rank):
                following = other
        if following is None:
            return best
        current = following
        seen.add(_key(current))
        patience -= 1
        if current.rank < best.rank:
            best, patience = current, PATIENCE
    return best


_CandidateKey: TypeAlias = tuple[tuple[int, ...], tuple[tuple[Action, ...], ...]]


def _key(candidate: _Candidate) -> _CandidateKey:
    return tuple(candidate.balance), tuple(map(tuple, candidate.prepared.table))


def _changes(candidate: _Candidate) -> Iterator[ActionTable]:
    """Yield tables that differ in the critical path.

    Two neighbours in a row are swapped, a backward pass is split, or its two parts are merged.
    """
    rows = candidate.prepared.table
    place = {action: (r, k) for r, row in enumerate(rows) for k, action in enumerate(row)}

    def changed(r: int, row: list[Action]) -> ActionTable:
        return [*rows[:r], row, *rows[r + 1 :]]

    path = [step for step in candidate.prepared.critical_path(candidate.costs) if isinstance(step, Action)]
    for before, action in pairwise(path):
        r, k = place[before]
        if place[action] == (r, k + 1) and before[1:] != action[1:]:
            yield changed(r, [*rows[r][:k], action, before, *rows[r][k + 2 :]])
    for action in path:
        r, k = place[action]
        row, gradients, weights = rows[r], action._replace(kind="I"), action._replace(kind="W")
        if action.kind == "B":
            yield changed(r, [*row[:k], gradients, weights, *row[k + 1 :]])
            yield changed(r, [*row[:k], gradients, *row[k + 1 :], weights])
        elif action.kind != "F":
            whole = [action._replace(kind="B") if each == gradients else each for each in row]
            yield changed(r, [each for each in whole if each != weights])
