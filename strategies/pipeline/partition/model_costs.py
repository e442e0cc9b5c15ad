"""Measure the cost of each layer or block, and the cost of the rest of the model, which runs on the driver.

The model's ``forward`` runs on an example. In the first run, each block is measured on a copy, with the arguments that
the model passes, and its output is kept. In later runs, stand-ins return the kept outputs and pass gradients
on, so that the cost of these runs is the cost of the driver's part::

    embedding ─▶ block 0 ─▶ block 1 ─▶ norm, head, loss        first run: blocks are measured
    embedding ─▶ output 0 ─▶ output 1 ─▶ norm, head, loss      later runs: only the driver's part computes

The model is left unchanged: parameters, gradients, buffers, modes, attributes and random states.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from strategies.common.joined_lists import lengths_of
from strategies.common.patching import replaced, unchanged
from strategies.common.torch_compat import CALL_ATTRIBUTE, tree_flatten, tree_map_only, tree_unflatten
from strategies.common.trees import tensors_in
from strategies.pipeline.partition.probe import input_of, positional_and_named
from strategies.pipeline.partition.profiling import (
    PassSeconds,
    activation_bytes,
    as_in_training,
    as_output,
    has_one_row,
    layer_seconds,
    layer_sizes,
    measure_call,
    parameter_bytes,
    run_layers,
    stop_batch_norm,
    timed,
)
from strategies.pipeline.partition.sequential import Pipelined
from strategies.pipeline.stage.calling import call_with_one
from strategies.sharding.gathered_layers import is_part

Cost = TypeVar("Cost")
DriverCost = TypeVar("DriverCost", covariant=True)


@dataclass(frozen=True)
class Costs(Generic[Cost, DriverCost]):
    """The costs of the processes of a pipeline.

    Attributes:
        layers: The cost of each layer or block.
        driver: The cost of the rest of the model, which the process of the last stage runs.
        not_measured: Why ``driver`` counts only parameters, or nothing; empty if it was measured.
    """

    layers: list[Cost]
    driver: DriverCost
    not_measured: str = ""


@dataclass(frozen=True)
class Example:
    """An input on which a model is measured.

    Attributes:
        model: The model that takes the input: the whole model, or a submodule that contains the pipelined part.
        value: The input; a tuple is passed as positional arguments, a dict as keyword arguments.
        microbatches: The number of micro-batches that the input represents.
    """

    model: nn.Module
    value: Any
    microbatches: int = 1

    @property
    def described(self) -> str:
        """A description of the call, for messages."""
        return str(getattr(self.model, "described", f"{type(self.model).__name__}.forward"))


class Measure(Protocol[Cost, DriverCost]):
    """Measures the layers of a model and the rest of the model."""

    def layers(self, module: nn.Sequential, sample: Any, example: Example, device: torch.device) -> list[Cost]:
        """Return the cost of each layer of an ``nn.Sequential``."""

    def block(self, block: nn.Module, value: Any, example: Example) -> tuple[Cost, Any]:
        """Return the cost of a block, and its output."""

    def driver(self, runs: Runs, parameters: Iterable[Tensor], example: Example) -> DriverCost:
        """Return the cost of the driver's part."""

    def unmeasured(self, parameters: Iterable[Tensor]) -> DriverCost:
        """Return the cost of a driver's part that does not run on the example."""


@dataclass(frozen=True)
class BySize:
    """Measures bytes held during training: parameters times ``param_scale``, and activations.

    Attributes:
        held: The number of micro-batches whose activations the driver's part holds at the same time; stages hold one.
        param_scale: The number of copies of a trained parameter in memory.
    """

    held: int = 1
    param_scale: float = 2.0

    def layers(self, module: nn.Sequential, sample: Any, example: Example, device: torch.device) -> list[float]:
        """Return the cost of each layer of an ``nn.Sequential``."""
        chunks, scale = example.microbatches, self.param_scale
        return [*layer_sizes(module, sample, chunks=chunks, param_scale=scale, device=device, call=call_with_one)]

    def block(self, block: nn.Module, value: Any, example: Example) -> tuple[float, Any]:
        """Return the cost of a block, and its output."""
        activations, output = activation_bytes(block, value)
        return parameter_bytes(block.parameters(), self.param_scale) + activations / example.microbatches, output

    def driver(self, runs: Runs, parameters: Iterable[Tensor], example: Example) -> float:
        """Return the cost of the driver's part."""
        activations, _ = activation_bytes(runs, example.value, runs.returned)
        return parameter_bytes(parameters, self.param_scale) + activations * self.held / example.microbatches

    def unmeasured(self, parameters: Iterable[Tensor]) -> float:
        """Return the cost of a driver's part that does not run on the example."""
        return parameter_bytes(parameters, self.param_scale)


@dataclass(frozen=True)
class ByTime:
    """Measures the seconds of forward and backward passes.

    Attributes:
        budget_seconds: Time limit for all passes of a layer, in addition to the warm-up and the first few passes.
    """

    budget_seconds: float = 0.1

    def layers(self, module: nn.Sequential, sample: Any, example: Example, device: torch.device) -> list[PassSeconds]:
        """Return the cost of each layer of an ``nn.Sequential``."""
        seconds = self.budget_seconds * len(module)
        return layer_seconds(module, sample, timeout_seconds=seconds, device=device, call=call_with_one)

    def block(self, block: nn.Module, value: Any, example: Example) -> tuple[PassSeconds, Any]:
        """Return the cost of a block, and its output."""
        return timed(block, value, budget_seconds=self.budget_seconds)

    def driver(self, runs: Runs, parameters: Iterable[Tensor], example: Example) -> float:
        """Return the cost of the driver's part."""
        return sum(timed(runs, example.value, budget_seconds=self.budget_seconds, in_stage=False)[0])

    def unmeasured(self, parameters: Iterable[Tensor]) -> float:
        """Return the cost of a driver's part that does not run on the example."""
        return 0.0


def costs_of(
    model: nn.Module, module: Pipelined, example: Example, measure: Measure[Cost, DriverCost], device: torch.device
) -> Costs[Cost, DriverCost]:
    """Measure the layers or blocks of ``module``, and the rest of ``model``.

    If ``forward`` returns the loss, as ``output.loss`` or ``output["loss"]``, the loss is measured as well. Otherwise
    the sum of the outputs takes its place.

    Args:
        model: The whole model. Modules outside ``module`` are on ``device``, as in training.
        module: The pipelined part of the model.
        example: The input.
        measure: The kind of measurement.
        device: The device on which a copy of one layer at a time is measured.

    Raises:
        ValueError: If the model's ``forward`` does not call every block of an ``nn.ModuleList`` once.
    """
    outside = _parameters_outside(model, module)
    if isinstance(module, nn.ModuleList):
        found: dict[str, Cost] = {}

        def measured(name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            call = partial(measure.block, example=example)
            one_row = has_one_row(example.value)
            found[name], output = measure_call(block, args, kwargs, call, device=device, one_row=one_row)
            return output

        blocks = {name: block for name, block in module._modules.items() if block is not None}
        lengths = lengths_of(module)
        list_of = dict(
            zip(blocks, (number for number, length in enumerate(lengths) for _ in range(length)), strict=True)
        )
        with as_in_training([device]), _unchanged(model, module, has_one_row(example.value)):
            runs = Runs(example.model, {n: (b, partial(measured, n, b)) for n, b in blocks.items()}, list_of)
            with runs.replacing():
                runs(as_output(example.value))
                missing = [name for name in blocks if name not in found]
                if missing:
                    raise ValueError(
                        f"{example.described} does not call blocks {', '.join(missing)} on the "
                        "example input, so they cannot be measured; give the balance, or balance='even'"
                    )
                return Costs([found[name] for name in blocks], measure.driver(runs, outside, example))
    sample = input_of(module, example.model, example.value)
    with as_in_training([device]), _unchanged(model, module, has_one_row(example.value)):
        layers = measure.layers(module, sample, example, device)
        run = partial(_run_sequential, module, device)
        runs = Runs(example.model, {"": (module, run)})
        with runs.replacing():
            try:
                runs(as_output(example.value))
                if runs.num_called:
                    return Costs(layers, measure.driver(runs, outside, example))
                reason = f"{example.described} does not call it"
            except NotImplementedError:
                reason = f"{type(example.model).__name__} has no forward"
            except Exception as error:  # raised by user code after the pipelined part, which training may not run
                reason = f"{example.described} raises {type(error).__name__}: {error}"
    return Costs(layers, measure.unmeasured(outside), reason)


def costs_of_parameters(model: nn.Module, module: Pipelined, *, by_time: bool) -> Costs[float, float]:
    """Return the costs of layers and of the rest of a model, based only on the bytes of their parameters.

    Args:
        model: The whole model.
        module: The pipelined part of the model.
        by_time: Leave out embedding tables, in which a pass only looks up rows.
    """
    measure = BySize()
    layers = [float(measure.unmeasured(layer.parameters())) for layer in module]
    outside = _parameters_outside(model, module, besides=(nn.Embedding,) if by_time else ())
    return Costs(layers, measure.unmeasured(outside), "without an example input only parameters count")


def _parameters_outside(
    model: nn.Module, module: nn.Module, besides: tuple[type[nn.Module], ...] = ()
) -> list[nn.Parameter]:
    """Return the parameters of ``model`` that are not in ``module``, each once."""
    inside = set(module.parameters())
    found = {
        parameter: None
        for child in model.modules()
        if not isinstance(child, besides)
        for parameter in child.parameters(recurse=False)
        if parameter not in inside
    }
    return [*found]


def _run_sequential(module: nn.Sequential, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (value,) = (*args, *kwargs.values())
    return run_layers(module, value, device, call=call_with_one)


class TimedPass(NamedTuple):
    """A forward or backward pass of a module: the number of its list of layers, and the clock at its begin and end."""

    number: int
    begin: float
    end: float


def _change(calls: Sequence[TimedPass], before: int, after: int) -> float:
    """Return the difference of the clock from the last call of one list to the first of another, if both are called."""
    for first, second in pairwise(calls):
        if (first.number, second.number) == (before, after):
            return second.begin - first.end
    return 0.0


class Runs(nn.Module):
    """Runs of a model in which stand-ins replace some modules.

    Args:
        model: The model.
        calls: For each module, its name, the module, and the function that its first call runs with the arguments.
        list_of: For the name of each module, the number of its list of layers; by default there is one list.

    Attributes:
        clock: Returns the time, or another number.
        called: The calls of modules in the last run.
        differentiated: The backward passes of modules since the last run.
    """

    def __init__(
        self,
        model: nn.Module,
        calls: Mapping[str, tuple[nn.Module, Callable[[tuple[Any, ...], dict[str, Any]], Any]]],
        list_of: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.model, self._calls = model, calls
        self._list_of = list_of or dict.fromkeys(calls, 0)
        self._outputs: dict[str, Any] = {}
        self._inputs: list[Tensor] = []
        self._returned: list[Tensor] = []
        self.clock: Callable[[], float] = time.perf_counter
        self.called: list[TimedPass] = []
        self.differentiated: list[TimedPass] = []

    def between(self) -> list[tuple[float, float]]:
        """Return for each list but the last what the clock counted between its calls and those of the next list.

        Returns:
            The differences in the last run and in its backward pass.

        Raises:
            ValueError: If the last run did not call one list after another.
        """
        numbers = [call.number for call in self.called]
        if numbers != sorted(numbers):
            order = ", ".join(map(str, dict.fromkeys(numbers)))
            raise ValueError(
                f"the lists of layers are called in the order {order}, where 0 is the first in module=...; name them "
                "in the order in which the model calls them, each once"
            )
        return [
            (_change(self.called, number - 1, number), _change(self.differentiated, number, number - 1))
            for number in range(1, 1 + max(self._list_of.values()))
        ]

    @property
    def num_called(self) -> int:
        """How many modules have been called."""
        return len(self._outputs)

    def returned(self) -> list[Tensor]:
        """Return the tensors that the stand-ins returned in the last run. They count as outputs of the modules."""
        return self._returned

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Context in which calls of the modules call the stand-ins."""
        with ExitStack() as ending:
            for name, (module, _) in self._calls.items():
                ending.callback(replaced(module, CALL_ATTRIBUTE, partial(self._called, name)))
            yield

    def forward(self, value: Any) -> list[Tensor]:
        """Call the model.

        Returns:
            The loss if the model returns one, otherwise all tensors of the output; followed by the tensors that the
            model passes to the modules, detached.
        """
        self._inputs, self._returned, self.called, self.differentiated = [], [], [], []
        args, kwargs = positional_and_named(value)
        output = self.model(*args, **kwargs)
        if isinstance(output, Mapping):
            output = dict(output)
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        tensors = tensors_in(output)
        roots = [tensor.detach() for tensor in tensors] if isinstance(loss, Tensor) else tensors
        return [*([loss] if isinstance(loss, Tensor) else []), *roots, *(tensor.detach() for tensor in self._inputs)]

    def _called(self, name: str, *args: Any, **kwargs: Any) -> Any:
        begin = self.clock()
        known = {id(tensor) for tensor in self._returned}
        self._inputs += [tensor for tensor in tensors_in((args, kwargs)) if id(tensor) not in known]
        if name not in self._outputs:
            output = self._calls[name][1](args, kwargs)
            self._outputs[name] = tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), output)
        leaves, spec = tree_flatten(self._outputs[name])
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        outputs = [leaves[place] for place in places]
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        anchor = torch.zeros((), requires_grad=True)  # outputs may need gradients even if no input does
        made = _StandIn.apply(len(outputs), self, self._list_of[name], anchor, *outputs, *inputs)
        for place, tensor in zip(places, made, strict=True):
            leaves[place] = tensor
        self._returned += made
        self.called.append(TimedPass(self._list_of[name], begin, self.clock()))
        return tree_unflatten(leaves, spec)


class _StandIn(torch.autograd.Function):
    """Returns copies of kept outputs. The gradients of the inputs have the right shapes, but arbitrary values."""

    @staticmethod
    def forward(
        ctx: Any, number: int, runs: Runs, number_of_list: int, anchor: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.runs, ctx.number_of_list = runs, number_of_list
        ctx.inputs = [torch.empty_like(tensor, device="meta") for tensor in tensors[number:]]
        ctx.devices = [tensor.device for tensor in tensors[number:]]
        ctx.number = number
        outputs = tuple(tensor.detach().clone() for tensor in tensors[:number])
        ctx.mark_non_differentiable(
            *(own for own, tensor in zip(outputs, tensors, strict=False) if not tensor.requires_grad)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        begin = ctx.runs.clock()
        inputs = zip(ctx.inputs, ctx.devices, strict=True)
        made = [torch.ones_like(like, device=device) for like, device in inputs]
        ctx.runs.differentiated.append(TimedPass(ctx.number_of_list, begin, ctx.runs.clock()))
        return (None, None, None, None, *[None] * ctx.number, *made)


@contextmanager
def _unchanged(model: nn.Module, module: nn.Module, one_row: bool) -> Iterator[None]:
    """Context in which ``model`` is in training mode, and after which all changes by a run are undone.

    Outside ``module``, copies replace the parameters, so that the gradients, hooks and values of the parameters do not
    change. Gradients are removed temporarily, because a module may also refer to a parameter in another way. The
    entries of lists, dicts and sets in attributes, such as hooks, are restored.
    """
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    parameters: dict[Tensor, nn.Parameter] = {}
    inside = set(module.modules())
    outside = [child for child in model.modules() if child not in inside]
    try:
        with (
            unchanged(model.modules(), (own for child in outside for own in child.parameters(recurse=False))),
            ExitStack() as replacing,
        ):
            model.train()
            if one_row:
                stop_batch_norm(model.modules())
            for parameter in gradients:
                parameter.grad = None
            for child in outside:
                for name, own in child._parameters.items():
                    if own is not None:
                        replacing.callback(child._parameters.__setitem__, name, own)  # for a ScriptModule
                        twin = copy.copy(own) if is_part(own) else nn.Parameter(own.detach(), own.requires_grad)
                        child._parameters[name] = parameters.setdefault(own, twin)
            yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
