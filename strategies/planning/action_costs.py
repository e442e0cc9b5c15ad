"""Measure the costs of the actions of a schedule for each layer, of the driver's part, and of a transfer.

:func:`~strategies.planning.search.search` takes these costs.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from strategies.common.live_bytes import LiveBytes
from strategies.common.trees import tensors_in
from strategies.launch.session import join_group
from strategies.pipeline.partition.model_costs import Costs, Example, Runs
from strategies.pipeline.partition.profiling import (
    WARM_UP_PASSES,
    PassBytes,
    activation_bytes,
    as_output,
    measure_layers,
    now,
    parameter_bytes,
    pass_bytes,
    storage_bytes,
    timed_pass,
)
from strategies.pipeline.stage.calling import call_with_one
from strategies.pipeline.stage.layers import is_compiled
from strategies.pipeline.stage.weight_gradients import DelayedWeights, WeightGradients
from strategies.planning.search import LayerCosts, ModelCosts
from strategies.planning.simulator import DriverCosts
from strategies.sharding.divided_layers import TensorGroup
from strategies.sharding.single_rank import GroupSeconds

ACTION_SECONDS = 500e-6
"""Approximate time of the engine for an action: an action of layers with almost no computation takes 0.9 ms.

Weight gradients take almost none of this time, because they neither receive nor send messages.
"""

_FEWEST_PASSES = 5
_TRANSFERS = 7
_STEPS = 3
_STEP_NUMBERS = 2**22
"""Maximum number of elements of a parameter on which a step is measured, to save memory and time."""


class PlannedLayer(NamedTuple):
    """The cost of a layer, and the bytes it holds."""

    costs: LayerCosts
    held: PassBytes


class DriverPart(NamedTuple):
    """The driver's part: its cost, the bytes it always holds, the memory of a micro-batch, and the cost of a step.

    Also, for each list of layers but the last, the bytes that the code between it and the next list keeps.
    """

    costs: DriverCosts
    parameter_bytes: float
    peak_bytes: int = 0
    step_seconds: float = 0.0
    between_bytes: Sequence[int] = ()


@dataclass(frozen=True)
class _ByLayer(ABC):
    """Measures layers and blocks in the same way.

    Attributes:
        param_scale: The number of copies of a trained parameter: itself, its gradient, and its optimizer states.
    """

    param_scale: float = field(default=4.0, kw_only=True)

    def layers(self, module: nn.Sequential, sample: Any, example: Example, device: torch.device) -> list[PlannedLayer]:
        """Return the cost of each layer of an ``nn.Sequential``."""
        return measure_layers(module, sample, device, call_with_one, self._measured)

    def block(self, block: nn.Module, value: Any, example: Example) -> tuple[PlannedLayer, Any]:
        """Return the cost of a block, and its output."""
        return self._measured(block, value)

    def unmeasured(self, parameters: Iterable[Tensor]) -> DriverPart:
        """Return the cost of a driver's part that does not run on the example."""
        return DriverPart(DriverCosts(), parameter_bytes(parameters, self.param_scale))

    @abstractmethod
    def _measured(self, layer: nn.Module, value: Any) -> tuple[PlannedLayer, Any]:
        """Return the cost of a layer or block, and its output."""


@dataclass(frozen=True)
class ByAction(_ByLayer):
    """Measures bytes, and the median times of the forward pass, the whole backward pass and its two parts.

    Attributes:
        budget_seconds: Time limit for all passes of a layer, in addition to the warm-up and the first few passes.
        with_steps: Also measure a step of AdamW, in place of the optimizer, which does not exist yet.
    """

    budget_seconds: float = 0.1
    with_steps: bool = field(default=False, kw_only=True)

    def driver(self, runs: Runs, parameters: Iterable[Tensor], example: Example) -> DriverPart:
        """Return the cost of the driver's part, each time the median of several runs."""
        held = [*parameters]
        devices = {tensor.device for tensor in [*tensors_in(example.value), *held]}
        runs.clock = lambda: now(devices)
        for _ in range(WARM_UP_PASSES):
            _driver_pass(runs, example.value)
        passes: list[list[float]] = []
        for _ in _repeated(self.budget_seconds):
            passes.append(_driver_pass(runs, example.value))
        before, after, before_backward, *rest = (statistics.median(column) for column in zip(*passes, strict=True))
        between = [*zip(rest[::2], rest[1::2], strict=True)]
        kept, _ = activation_bytes(runs, example.value, runs.returned)  # includes the small part kept before the call
        costs = DriverCosts(before, after, before_backward, between, after_bytes=float(kept))
        peak, held_between = _driver_bytes(runs, example.value)
        return DriverPart(costs, parameter_bytes(held, self.param_scale), peak, self._step(held), held_between)

    def unmeasured(self, parameters: Iterable[Tensor]) -> DriverPart:
        """Return the cost of a driver's part that does not run on the example."""
        held = [*parameters]
        return super().unmeasured(held)._replace(step_seconds=self._step(held))

    def _step(self, parameters: Iterable[Tensor]) -> float:
        return _step_seconds(parameters) if self.with_steps else 0.0

    def _measured(self, layer: nn.Module, value: Any) -> tuple[PlannedLayer, Any]:
        for _ in range(WARM_UP_PASSES):
            timed_pass(layer, value)
            _split_pass(layer, value)
        whole: list[tuple[float, float]] = []
        split: list[tuple[float, float, float]] = []
        for _ in _repeated(self.budget_seconds):
            forward, backward, _ = timed_pass(layer, value)
            whole.append((forward, backward))
            split.append(_split_pass(layer, value))
        forward, backward = (statistics.median(column) for column in zip(*whole, strict=True))
        input_grad, weight_grad, kept = (statistics.median(column) for column in zip(*split, strict=True))
        if not kept:  # no weight gradient was delayed
            input_grad, weight_grad = backward, 0.0
        activations, output = activation_bytes(layer, value)
        held, _ = pass_bytes(layer, value)
        costs = LayerCosts(
            forward=forward,
            input_grad=input_grad,
            weight_grad=weight_grad,
            backward=backward,
            activation_bytes=activations,
            kept_bytes=kept,
            parameter_bytes=parameter_bytes(layer.parameters(), self.param_scale),
            step=self._step(layer.parameters()),
        )
        return PlannedLayer(costs, held), output


@dataclass(frozen=True)
class WithoutTimes(_ByLayer):
    """Measures only bytes, without computation: layers and example may be on the ``meta`` device."""

    def driver(self, runs: Runs, parameters: Iterable[Tensor], example: Example) -> DriverPart:
        """Return the cost of the driver's part."""
        kept, _ = activation_bytes(runs, example.value, runs.returned)
        _driver_pass(runs, example.value)  # creates gradients
        peak, between = _driver_bytes(runs, example.value)
        costs = DriverCosts(after_bytes=float(kept))
        return DriverPart(costs, parameter_bytes(parameters, self.param_scale), peak, between_bytes=between)

    def _measured(self, layer: nn.Module, value: Any) -> tuple[PlannedLayer, Any]:
        *_, kept = _split_pass(layer, value)  # creates gradients
        held, output = pass_bytes(layer, value)
        costs = LayerCosts(
            forward=0.0,
            input_grad=0.0,
            weight_grad=0.0,
            activation_bytes=held.inner + held.output_size,
            kept_bytes=kept,
            parameter_bytes=parameter_bytes(layer.parameters(), self.param_scale),
        )
        return PlannedLayer(costs, held), output


def model_costs(costs: Costs[PlannedLayer, DriverPart], *, in_reverse: bool = False) -> ModelCosts:
    """Return measured costs in the form for the search, with the time to send the input of each layer.

    Args:
        costs: The costs.
        in_reverse: Whether the first stage has the last layers.
    """
    layers = costs.layers[::-1] if in_reverse else costs.layers
    sizes = [layer.held.input_size for layer in layers]
    seconds = {size: transfer_seconds(size) for size in dict.fromkeys(sizes)}
    return ModelCosts(
        layers=[layer.costs for layer in layers],
        transfer=[seconds[size] for size in sizes],
        action=ACTION_SECONDS,
        driver=costs.driver.costs,
        driver_parameter_bytes=costs.driver.parameter_bytes,
        driver_step=costs.driver.step_seconds,
    )


def transfer_seconds(num_bytes: int) -> float:
    """Return the time to send a number of bytes to another process on this host."""
    message = torch.zeros(max(1, num_bytes), dtype=torch.uint8)

    def end(rank: int) -> float:
        group = join_group(url, rank, 2, timeout_seconds)
        received = torch.empty_like(message)
        passes = []
        for _ in range(_TRANSFERS):
            start = time.perf_counter()
            if rank == 0:
                group.send([message], 1, 0).wait(timedelta(seconds=timeout_seconds))
            group.recv([received], 1 - rank, 0).wait(timedelta(seconds=timeout_seconds))
            if rank == 1:
                group.send([message], 0, 0).wait(timedelta(seconds=timeout_seconds))
            passes.append(time.perf_counter() - start)
        return min(passes) / 2  # not the median, because other load delays two threads that wait for each other

    timeout_seconds = 60.0
    with tempfile.TemporaryDirectory(prefix="relay-") as folder, ThreadPoolExecutor(2) as executor:
        url = f"file://{Path(folder) / 'meeting'}"
        return next(iter(executor.map(end, (0, 1))))


def group_seconds(size: int, kind: type[TensorGroup] = TensorGroup) -> GroupSeconds:
    """Return how long ranks on this host that divide layers take to communicate, measured between threads.

    Args:
        size: The number of ranks.
        kind: Their group: of ranks that divide layers, or of replicas that divide parameters.
    """

    def rank(number: int) -> GroupSeconds:
        return GroupSeconds.measured(kind(join_group(url, number, size, 60.0)))

    with tempfile.TemporaryDirectory(prefix="relay-") as folder, ThreadPoolExecutor(size) as executor:
        url = f"file://{Path(folder) / 'meeting'}"
        return next(iter(executor.map(rank, range(size))))


def _step_seconds(parameters: Iterable[Tensor]) -> float:
    """Return the time of a step of AdamW over the trained parameters, measured on copies of a part of each."""
    trained = [parameter.detach() for parameter in parameters if parameter.requires_grad and parameter.numel()]
    if not trained:
        return 0.0
    parts = [parameter.flatten()[:_STEP_NUMBERS].clone().requires_grad_() for parameter in trained]
    for part in parts:
        part.grad = torch.zeros_like(part)
    optimizer, devices = torch.optim.AdamW(parts), {part.device for part in parts}
    optimizer.step()  # creates the states
    seconds = []
    for _ in range(_STEPS):
        start = now(devices)
        optimizer.step()
        seconds.append(now(devices) - start)
    scale = sum(parameter.numel() for parameter in trained) / sum(part.numel() for part in parts)
    return statistics.median(seconds) * scale


def _repeated(budget_seconds: float) -> Iterator[None]:
    deadline, number = time.perf_counter() + budget_seconds, 0
    while number < _FEWEST_PASSES or time.perf_counter() < deadline:
        number += 1
        yield


def _split_pass(layer: nn.Module, value: Any) -> tuple[float, float, float]:
    """Return the seconds of the input gradients and of the weight gradients, and the bytes kept between them."""
    value = as_output(value)
    devices = {tensor.device for tensor in [*tensors_in(value), *layer.parameters()]}
    delays = DelayedWeights()
    with nullcontext() if any(map(is_compiled, layer.modules())) else delays:
        output = layer(value)
    roots = _roots(output)
    delays.left = left = WeightGradients()
    start = now(devices)
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    input_grad = now(devices) - start
    kept = sum(storage_bytes(left.tensors()).values())
    start = now(devices)
    left.compute()
    return input_grad, now(devices) - start, kept


def _driver_pass(runs: Runs, value: Any) -> list[float]:
    """Return the seconds before the first and after the last call of the pipelined part, and of the former's backward.

    If there are several lists of layers, also the seconds between each list and the next, and of this backward pass.
    Does not include the time between calls of blocks of one list, which belongs to the stages.
    """
    value = as_output(value)
    start = runs.clock()
    roots = _roots(runs(value))
    returned = runs.clock()
    before, after = runs.called[0].begin - start, returned - runs.called[-1].end
    last = 0.0
    if roots:
        gradients = [torch.ones_like(root) for root in roots]
        begin = runs.clock()
        torch.autograd.backward(roots, gradients)
        end = runs.clock()
        if back := runs.differentiated:
            after, last = after + back[0].begin - begin, end - back[-1].end
    return [before, after, last, *chain(*runs.between())]


def _driver_bytes(runs: Runs, value: Any) -> tuple[int, list[int]]:
    """Return the memory of a pass of the driver's part, without the outputs that stand-ins return.

    Returns:
        The peak, without what the code between lists of layers keeps; and the latter, for each list but the last.
    """
    clock = runs.clock
    with LiveBytes() as live:
        runs.clock = lambda: live.bytes
        _driver_pass(runs, value)
    runs.clock = clock
    between = [max(0, round(size)) for size, _ in runs.between()]
    return max(0, live.peak - sum(storage_bytes(runs.returned()).values()) - sum(between)), between


def _roots(output: Any) -> Sequence[Tensor]:
    return [tensor for tensor in tensors_in(output) if tensor.requires_grad]
