"""Measure the cost of each layer or block: seconds per pass, or bytes held during training.

Layers are measured one after another, in training mode, each on a copy that is deleted before the next copy is made.
The input of a layer is the output of the layer before::

    sample ─▶ copy of layer 0 ─▶ output, detached ─▶ copy of layer 1 ─▶ ...

The module, its buffers and the random state are left unchanged.
"""

from __future__ import annotations

import copy
import random
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from strategies.common.live_bytes import LiveBytes
from strategies.common.torch_compat import BatchNorm, storage_key, tree_map_only
from strategies.common.trees import tensors_in
from strategies.pipeline.stage.calling import CallLayer, call_layer
from strategies.pipeline.stage.layers import Carried, has_large_weights, is_compiled
from strategies.pipeline.stage.microbatch.chunks import has_tensor, scatter
from strategies.pipeline.stage.microbatch.split import NoChunk, has_rows, pack_objects, plain, split, unpack_objects
from strategies.pipeline.stage.skip import waiting_skips
from strategies.pipeline.stage.weight_gradients import LARGE_BYTES, DelayedWeights, WeightGradients

WARM_UP_PASSES = 2  # the first pass in a process imports modules; the first pass of a layer allocates gradients
_FEWEST_PASSES = 3

Cost = TypeVar("Cost")


def layer_seconds(
    module: nn.Sequential,
    sample: Any,
    *,
    timeout_seconds: float,
    device: torch.device | str | None,
    call: CallLayer = call_layer,
) -> list[PassSeconds]:
    """Return the time of one forward and one backward pass of each layer; see :func:`timed`."""
    measure = partial(timed, budget_seconds=timeout_seconds / len(module))
    return measure_layers(module, sample, device, call, measure)


class PassSeconds(NamedTuple):
    """The time of a forward pass, and of the backward pass after it."""

    forward: float
    backward: float


def timed(layer: nn.Module, value: Any, *, budget_seconds: float, in_stage: bool = True) -> tuple[PassSeconds, Any]:
    """Measure the time of one forward and one backward pass.

    Uses the shortest of several passes, because other load on the machine can only lengthen a pass.

    Args:
        layer: The module to call with ``value``.
        value: The input.
        budget_seconds: Time limit for all passes, in addition to the warm-up and the first few passes.
        in_stage: As in :func:`timed_pass`.

    Returns:
        The seconds and the output.
    """
    for _ in range(WARM_UP_PASSES):
        _, _, output = timed_pass(layer, value, in_stage=in_stage)
    passes: list[PassSeconds] = []
    deadline = time.perf_counter() + budget_seconds
    while len(passes) < _FEWEST_PASSES or time.perf_counter() < deadline:
        forward_seconds, backward_seconds, output = timed_pass(layer, value, in_stage=in_stage)
        passes.append(PassSeconds(forward_seconds, backward_seconds))
    return min(passes, key=sum), output


def layer_sizes(
    module: nn.Sequential,
    sample: Any,
    *,
    chunks: int,
    param_scale: float,
    device: torch.device | str | None,
    call: CallLayer = call_layer,
) -> list[int]:
    """Return the bytes of each layer: parameters, times ``param_scale``, and the activations of one micro-batch.

    Activations are the tensors that autograd keeps for the backward pass, and the output. The input of a layer is
    counted as the output of the layer before.
    """

    def measure(layer: nn.Module, value: Any) -> tuple[int, Any]:
        activations, output = activation_bytes(layer, value)
        return parameter_bytes(layer.parameters(), param_scale) + activations, output

    return measure_layers(module, first_microbatch(sample, chunks), device, call, measure)


def parameter_bytes(parameters: Iterable[Tensor], param_scale: float) -> int:
    """Return the bytes of parameters. The bytes of trained parameters are multiplied by ``param_scale``."""
    return round(sum(p.nbytes * (param_scale if p.requires_grad else min(1.0, param_scale)) for p in parameters))


def run_layers(
    module: nn.Sequential, value: Any, device: torch.device | str | None, *, call: CallLayer = call_layer
) -> Any:
    """Return the output of ``module``, run on copies of its layers."""
    output: Any = value

    def run(layer: nn.Module, carried: Any) -> tuple[int, Any]:
        nonlocal output
        result = layer(as_output(carried))
        output = unpack_objects(result[0])
        return 0, result

    measure_layers(module, value, device, call, run)
    return output


def measure_call(
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    measure: Callable[[nn.Module, Any], tuple[Cost, Any]],
    *,
    device: torch.device | str | None,
    one_row: bool,
) -> tuple[Cost, Any]:
    """Apply ``measure`` to a copy of a block and to the arguments of its call; return the cost and the output."""
    return _measure_copy(block, pack_objects((args, kwargs)), device, _WithArguments, measure, one_row=one_row)


def first_microbatch(sample: Any, chunks: int) -> Any:
    """Return the first of at most ``chunks`` parts of an input."""
    try:
        return split(sample, chunks)[0]
    except ValueError as error:
        if not isinstance(sample, tuple) or not has_tensor(sample):
            raise
        try:
            return scatter(sample, chunks)[0]  # Pipe takes inputs of 3 and 6 rows in 3 micro-batches
        except RuntimeError:
            raise error from None


class _Carrying(nn.Module):
    """A layer that takes and returns a pair: a value, and the skips that later layers pop.

    Objects in the value are packed, so that each call gets a separate copy of them.

    Args:
        layer: The layer.
        call: Calls the layer.
    """

    def __init__(self, layer: nn.Module, call: CallLayer) -> None:
        super().__init__()
        self.layer, self._call = layer, call

    def forward(self, carried: Carried) -> Carried:
        skips = dict(carried[1])
        with waiting_skips(skips):
            output = self._call(self.layer, unpack_objects(carried[0]))
        return pack_objects(output), skips


class _WithArguments(nn.Module):
    """A block that takes its positional and keyword arguments as a pair. Each call gets a separate copy of objects.

    Args:
        block: The block.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        args, kwargs = unpack_objects(given)
        return self.block(*args, **kwargs)


def measure_layers(
    module: nn.Sequential,
    sample: Any,
    device: torch.device | str | None,
    call: CallLayer,
    measure: Callable[[nn.Module, Any], tuple[Cost, Any]],
) -> list[Cost]:
    """Apply ``measure`` to a copy of each layer; it returns the cost and the output of the layer."""
    one_row = has_one_row(sample)
    sample = tree_map_only(NoChunk, plain, sample)
    devices = {tensor.device for tensor in [*tensors_in(sample), *module.parameters(), *module.buffers()]}
    devices |= {torch.device(device)} if device is not None else set()
    costs = []
    carrying = partial(_Carrying, call=call)
    with as_in_training(devices):
        carried: Any = (pack_objects(sample), {})
        for layer in module:
            cost, carried = _measure_copy(layer, carried, device, carrying, measure, one_row=one_row)
            costs.append(cost)
    return costs


def _measure_copy(
    layer: nn.Module,
    value: Any,
    device: torch.device | str | None,
    called: Callable[[nn.Module], nn.Module],
    measure: Callable[[nn.Module, Any], tuple[Cost, Any]],
    *,
    one_row: bool,
) -> tuple[Cost, Any]:
    # This is a separate function so that no variable refers to this copy while the next copy is made.
    layer = called(copy.deepcopy(layer).train())
    if one_row:
        stop_batch_norm(layer.modules())
    if device is not None:
        layer.to(device)
    target = device or next((tensor.device for tensor in _state(layer)), None)
    if target is not None:
        value = tree_map_only(Tensor, lambda tensor: tensor.to(target), value)
    cost, output = measure(layer, value)
    return cost, tree_map_only(Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), output)


def has_one_row(value: Any) -> bool:
    """Return whether a tensor has a single row."""
    return any(has_rows(tensor) and len(tensor) == 1 for tensor in tensors_in(value))


def stop_batch_norm(modules: Iterable[nn.Module]) -> None:
    """Make BatchNorm layers use their running statistics.

    An example input often has a single row, for which batch normalisation has no variance.
    """
    for module in modules:
        if isinstance(module, BatchNorm):
            module.eval()


def timed_pass(layer: nn.Module, value: Any, *, in_stage: bool = True) -> tuple[float, float, Any]:
    """Return the seconds of a forward pass and of a whole backward pass, and the output.

    Args:
        layer: The layer.
        value: The input of the layer.
        in_stage: Whether the layer runs as in a stage, which adds gradients of large weights in place.
    """
    value = as_output(value)
    devices = {tensor.device for tensor in [*tensors_in(value), *_state(layer)]}
    delays = _of_large_weights(layer) if in_stage else None
    start = now(devices)
    with delays or nullcontext():
        output = layer(value)
    forward_seconds = now(devices) - start
    roots = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    gradients = [torch.ones_like(root) for root in roots]
    if delays is not None:
        delays.left = WeightGradients(at_once=True)
    start = now(devices)
    if roots:
        torch.autograd.backward(roots, gradients)
    return forward_seconds, now(devices) - start, output


def _of_large_weights(layer: nn.Module) -> DelayedWeights | None:
    modules = list(layer.modules())
    return DelayedWeights(LARGE_BYTES) if has_large_weights(modules) and not any(map(is_compiled, modules)) else None


def activation_bytes(
    layer: nn.Module, value: Any, elsewhere: Callable[[], Iterable[Tensor]] = lambda: ()
) -> tuple[int, Any]:
    """Return the bytes of the output and of the tensors that autograd keeps after a call of ``layer``; and the output.

    Does not count ``value``, parameters, buffers, and the tensors that ``elsewhere`` returns after the call.
    """
    saved, given, output = _kept_for_backward(layer, value)
    sizes = {**saved, **storage_bytes(tensors_in(output))}
    for counted_elsewhere in (*given, *storage_bytes([*_state(layer), *elsewhere()])):
        sizes.pop(counted_elsewhere, None)
    return sum(sizes.values()), output


def _kept_for_backward(layer: nn.Module, value: Any) -> tuple[dict[int, int], dict[int, int], Any]:
    """Return the bytes that autograd keeps after a call of ``layer`` and the input, by storage; and the output."""
    value = as_output(value)
    kept: list[weakref.ref[_SavedTensor]] = []

    def pack(tensor: Tensor) -> _SavedTensor:
        holder = _SavedTensor(tensor.detach())  # not the output itself, which would form a cycle with its graph
        kept.append(weakref.ref(holder))
        return holder

    with saved_tensors_hooks(pack, lambda holder: holder.tensor):
        output = layer(value)
    # Only autograd refers to the holders, so a live holder has a tensor that the backward pass needs.
    saved = [holder.tensor for reference in kept if (holder := reference()) is not None]
    return storage_bytes(saved), storage_bytes(tensors_in(value)), output


@dataclass(frozen=True)
class PassBytes:
    """The memory of a micro-batch in a layer, in bytes.

    Attributes:
        inner: Tensors that autograd keeps for the backward pass, without parameters, buffers, input and output.
        input: The part of the input that autograd keeps.
        input_size: The whole input.
        output: The part of the output that autograd keeps.
        output_size: The whole output.
        forward_extra: The peak of the forward pass, beyond ``inner`` and ``output_size``.
        backward_extra: The peak of the backward pass, beyond the memory at its start. Incoming gradients count.
            Gradients of parameters count only until they are added to those of other micro-batches.
    """

    inner: int = 0
    input: int = 0
    input_size: int = 0
    output: int = 0
    output_size: int = 0
    forward_extra: int = 0
    backward_extra: int = 0


def pass_bytes(layer: nn.Module, value: Any) -> tuple[PassBytes, Any]:
    """Return the memory of a forward and a backward pass of a layer, and the output.

    The parameters already have gradients, as in all micro-batches after the first.
    """
    saved, given, output = _kept_for_backward(layer, value)
    made = storage_bytes(tensors_in(output))
    known = {*given, *storage_bytes(_state(layer))}
    inner = sum(size for key, size in saved.items() if key not in made and key not in known)
    kept = sum(size for key, size in made.items() if key in saved and key not in known)
    of_input = sum(size for key, size in given.items() if key in saved)
    size = sum(size for key, size in made.items() if key not in known)
    all_input = sum(given.values())
    del saved, given
    if any(map(is_compiled, layer.modules())):  # a dispatch mode does not see the operators of compiled code
        return PassBytes(inner, of_input, all_input, kept, size), output
    value, live, delays = as_output(value), LiveBytes(), _of_large_weights(layer)
    with live:
        with delays or nullcontext():
            output = layer(value)
        forward_extra, after = live.peak - live.bytes, live.bytes
        live.reset_peak()
        roots = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if delays is not None:
            delays.left = WeightGradients(at_once=True)
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    return PassBytes(inner, of_input, all_input, kept, size, forward_extra, live.peak - after), output


class _SavedTensor:
    """A tensor that autograd saved. Unlike a tensor's Python object, it lives exactly as long as autograd keeps it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def storage_bytes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return bytes by storage. Views of one storage count once, and each keeps the whole storage alive."""
    return {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}


def as_output(value: Any) -> Any:
    """Return a copy that is not an autograd leaf, like the output of a layer, so that it can be changed in place."""

    def copied(tensor: Tensor) -> Tensor:
        leaf = tensor.detach().clone()
        return leaf.requires_grad_().clone() if tensor.requires_grad else leaf

    return tree_map_only(Tensor, copied, value)


def _state(layer: nn.Module) -> Iterator[Tensor]:
    yield from layer.parameters()
    yield from layer.buffers()


def now(devices: Iterable[torch.device]) -> float:
    """Return the time after all work on the devices is done."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def as_in_training(devices: Iterable[torch.device]) -> Iterator[None]:
    """Context in which autograd records, and after which the states of all random generators are restored."""
    with torch.inference_mode(False), torch.enable_grad(), _random_state_kept(devices):
        yield


@contextmanager
def _random_state_kept(devices: Iterable[torch.device]) -> Iterator[None]:
    """Context that runs from a fixed seed and then restores every random generator that a layer may use."""
    cuda = [device for device in devices if device.type == "cuda"]
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=cuda):
            torch.default_generator.manual_seed(0)
            random.seed(0)
            yield
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)
