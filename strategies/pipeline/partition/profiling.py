"""The cost of each layer of an ``nn.Sequential``: seconds per pass, or bytes held during training.

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
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from strategies.common.torch_compat import BatchNorm, storage_key, tree_map_only
from strategies.common.trees import tensors_in
from strategies.pipeline.microbatch.chunks import has_tensor, scatter
from strategies.pipeline.microbatch.split import NoChunk, has_rows, pack_objects, plain, split, unpack_objects
from strategies.pipeline.stage.calling import CallLayer, call_layer
from strategies.pipeline.stage.layers import Carried
from strategies.pipeline.stage.skip import waiting_skips

_WARM_UP_PASSES = 2  # the first pass in a process imports modules; the first pass of a layer allocates gradients
_FEWEST_PASSES = 3

Cost = TypeVar("Cost")


def layer_seconds(
    module: nn.Sequential,
    sample: Any,
    *,
    timeout_seconds: float,
    device: torch.device | str | None,
    call: CallLayer = call_layer,
) -> list[float]:
    """Return the time of one forward and one backward pass of each layer.

    The shortest of several passes counts, because other load on the machine can only lengthen a pass.
    """
    budget_seconds = timeout_seconds / len(module)

    def measure(layer: nn.Module, value: Any) -> tuple[float, Any]:
        for _ in range(_WARM_UP_PASSES):
            _, output = _timed_pass(layer, value)
        passes: list[float] = []
        deadline = time.perf_counter() + budget_seconds
        while len(passes) < _FEWEST_PASSES or time.perf_counter() < deadline:
            seconds, output = _timed_pass(layer, value)
            passes.append(seconds)
        return min(passes), output

    return _measure_layers(module, sample, device, call, measure)


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
        activation_bytes, output = _activation_bytes(layer, value)
        parameters = sum(
            parameter.nbytes * (param_scale if parameter.requires_grad else min(1.0, param_scale))
            for parameter in layer.parameters()
        )
        return round(parameters) + activation_bytes, output

    return _measure_layers(module, _first_microbatch(sample, chunks), device, call, measure)


def _first_microbatch(sample: Any, chunks: int) -> Any:
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

    Objects in the value are packed, so that each of several calls gets its own copy of them.

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


def _measure_layers(
    module: nn.Sequential,
    sample: Any,
    device: torch.device | str | None,
    call: CallLayer,
    measure: Callable[[nn.Module, Any], tuple[Cost, Any]],
) -> list[Cost]:
    """Apply ``measure`` to a copy of each layer; it returns the cost and the output of the layer."""
    one_row = any(has_rows(tensor) and len(tensor) == 1 for tensor in tensors_in(sample))
    sample = tree_map_only(NoChunk, plain, sample)
    devices = {tensor.device for tensor in [*tensors_in(sample), *module.parameters(), *module.buffers()]}
    devices |= {torch.device(device)} if device is not None else set()
    costs = []
    with torch.inference_mode(False), torch.enable_grad(), _random_state_kept(devices):
        carried: Any = (pack_objects(sample), {})
        for layer in module:
            cost, carried = _measure_copy(layer, carried, device, call, measure, one_row=one_row)
            costs.append(cost)
    return costs


def _measure_copy(
    layer: nn.Module,
    value: Any,
    device: torch.device | str | None,
    call: CallLayer,
    measure: Callable[[nn.Module, Any], tuple[Cost, Any]],
    *,
    one_row: bool,
) -> tuple[Cost, Any]:
    # A separate function, so that no variable refers to this copy while the next one is made.
    layer = _Carrying(copy.deepcopy(layer).train(), call)
    if one_row:
        # An example input often has a single row, of which batch normalisation has no variance.
        for child in layer.modules():
            if isinstance(child, BatchNorm):
                child.eval()
    if device is not None:
        layer.to(device)
    target = device or next((tensor.device for tensor in _state(layer)), None)
    if target is not None:
        value = tree_map_only(Tensor, lambda tensor: tensor.to(target), value)
    cost, output = measure(layer, value)
    return cost, tree_map_only(Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), output)


def _timed_pass(layer: nn.Module, value: Any) -> tuple[float, Any]:
    value = _as_output(value)
    devices = {tensor.device for tensor in [*tensors_in(value), *_state(layer)]}
    start = _now(devices)
    output = layer(value)
    forward_seconds = _now(devices) - start
    roots = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    gradients = [torch.ones_like(root) for root in roots]
    start = _now(devices)
    if roots:
        torch.autograd.backward(roots, gradients)
    return forward_seconds + _now(devices) - start, output


def _activation_bytes(layer: nn.Module, value: Any) -> tuple[int, Any]:
    value = _as_output(value)
    kept: list[weakref.ref[_Kept]] = []

    def pack(tensor: Tensor) -> _Kept:
        holder = _Kept(tensor.detach())  # a saved output refers to the graph: a cycle that is never freed
        kept.append(weakref.ref(holder))
        return holder

    with saved_tensors_hooks(pack, lambda holder: holder.tensor):
        output = layer(value)
    # Only autograd refers to the holders: those that are alive hold what the backward pass needs.
    saved = [holder.tensor for reference in kept if (holder := reference()) is not None]
    sizes = _storage_bytes([*saved, *tensors_in(output)])
    for counted_elsewhere in _storage_bytes([*tensors_in(value), *_state(layer)]):
        sizes.pop(counted_elsewhere, None)
    return sum(sizes.values()), output


class _Kept:
    """A tensor that autograd saved. Unlike the wrapper of a tensor, it lives exactly as long as autograd keeps it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _storage_bytes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return bytes by storage: views of one storage count once, and keep all of it alive."""
    return {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}


def _as_output(value: Any) -> Any:
    """Return a copy that is no leaf of autograd, like the output of a layer, so that it can be changed in place."""

    def copied(tensor: Tensor) -> Tensor:
        leaf = tensor.detach().clone()
        return leaf.requires_grad_().clone() if tensor.requires_grad else leaf

    return tree_map_only(Tensor, copied, value)


def _state(layer: nn.Module) -> Iterator[Tensor]:
    yield from layer.parameters()
    yield from layer.buffers()


def _now(devices: Iterable[torch.device]) -> float:
    """Return the time after all work on the devices is done."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def _random_state_kept(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore every random generator that a layer may use, after running from a fixed seed."""
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
