"""Stand-ins for layers whose values are on a worker, and the return of the values.

The driver keeps the module objects, so names, shapes, counts and ``requires_grad`` can be read, but the tensors in them
are stand-ins on the ``meta`` device. Parameters keep their identity, because optimizers and users refer to them.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.common.joined_lists import JoinedLists
from strategies.common.torch_compat import without_torch_function
from strategies.common.trees import special_layout
from strategies.pipeline.control.client import RemoteStage
from strategies.pipeline.state.remote_tensor import (
    RemoteBuffer,
    RemoteParameter,
    Source,
    remote_buffer,
    remote_parameter,
)


@contextmanager
def without_layers(module: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Context in which ``module`` does not contain the layers with these names."""
    if isinstance(module, JoinedLists):
        with module.without(names):
            yield
        return
    children = dict(module._modules)
    for name in names:
        del module._modules[name]
    try:
        yield
    finally:
        module._modules.clear()
        module._modules.update(children)


@contextmanager
def without_meta_tensors(model: nn.Module) -> Iterator[None]:
    """Context in which ``model`` does not contain ``meta`` tensors, so that it can be moved to another device."""
    taken = []
    for module in model.modules():
        holders: list[dict[str, Any]] = [module._parameters, module._buffers]
        for tensors in holders:
            if any(tensor is not None and tensor.is_meta for tensor in tensors.values()):
                taken.append((tensors, dict(tensors)))
                for name in [name for name, tensor in tensors.items() if tensor is not None and tensor.is_meta]:
                    del tensors[name]
    try:
        yield
    finally:
        for tensors, before in taken:
            before.update(tensors)
            tensors.clear()
            tensors.update(before)


def check_layouts(layers: nn.Module) -> None:
    """Check that each tensor of layers that another process will hold can have a stand-in.

    Raises:
        ValueError: If a parameter or buffer is sparse, quantized or nested.
    """
    kinds = {"parameter": layers.named_parameters(), "buffer": layers.named_buffers()}
    for kind, name, tensor in ((kind, *named) for kind, tensors in kinds.items() for named in tensors):
        if layout := special_layout(tensor):
            raise ValueError(
                f"{kind} {name} of the pipelined module is a {layout} tensor, which cannot be sent to another process. "
                "Register the dense tensors it consists of, such as indices and values or int_repr(), and build it "
                "from them in the forward of the layer; or register it on the model outside of the pipelined module"
            )


def move_to_meta(
    layers: nn.Module,
    whole: nn.Module,
    optimizers: Sequence[Optimizer],
    keep: Collection[Tensor] = (),
    *,
    stage: RemoteStage | None = None,
    module: int = 0,
    device: torch.device | None = None,
) -> None:
    """Replace the tensors of ``layers`` with stand-ins, except those in ``keep``.

    Args:
        layers: The layers.
        whole: The module that contains the layers. Another part of it may share a parameter with them.
        optimizers: Optimizers that may hold the parameters.
        keep: Parameters and buffers whose values stay in this process, compared by identity.
        stage: Stage from which stand-ins fetch values. Without it, reading values raises an error.
        module: Number of the module on ``stage``: 0 for its layers, ``k`` for the layers of the ``k``-th model copy.
        device: Device to which fetched values are moved.
    """

    def source(name: str) -> Source | None:
        return None if stage is None else Source(stage, name, device or torch.device("cpu"), module)

    kept = {id(tensor) for tensor in keep}
    for name, parameter in list(layers.named_parameters()):
        if id(parameter) not in kept and not isinstance(parameter, RemoteParameter):
            replace_parameter(whole, optimizers, parameter, remote_parameter(name, parameter, source(name)))
    named = dict(layers.named_buffers(remove_duplicate=False))
    replace_buffers(
        layers,
        {
            name: buffer if id(buffer) in kept else remote_buffer(name, buffer, source(name))
            for name, buffer in named.items()
        },
    )


def move_from_meta(
    layers: nn.Module, whole: nn.Module, optimizers: Sequence[Optimizer], tensors: Mapping[str, Tensor]
) -> None:
    """Replace the stand-ins in ``layers`` with ``tensors``, which have values, by name."""
    for name, parameter in list(layers.named_parameters()):
        if parameter.is_meta:
            value = nn.Parameter(tensors[name].detach(), requires_grad=parameter.requires_grad)
            replace_parameter(whole, optimizers, parameter, value)
    replace_buffers(layers, tensors)


def without_stand_ins(model: nn.Module) -> None:
    """Replace the stand-ins of a run that has ended with plain tensors on the ``meta`` device."""
    for parameter in [own for own in model.parameters() if isinstance(own, RemoteParameter)]:
        with without_torch_function():
            plain = nn.Parameter(
                torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype, device="meta"),
                parameter.requires_grad,
            )
        replace_parameter(model, (), parameter, plain)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, RemoteBuffer):
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")


def refuse_lost_values(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Refuse ``state_dict`` of a module whose layers were lost with their workers. A ``state_dict`` pre-hook.

    Raises:
        RuntimeError: If layers were lost.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if isinstance(tensor, RemoteParameter | RemoteBuffer) and tensor.relay_source is not None:
            tensor.relay_source.stage.check_gathered()


def replace_parameter(whole: nn.Module, optimizers: Sequence[Optimizer], old: nn.Parameter, new: nn.Parameter) -> None:
    """Turn ``old`` into ``new``. If this is impossible, replace ``old`` with ``new`` in modules and optimizers."""
    attributes = {name: value for name, value in vars(old).items() if not name.startswith("relay_")}
    try:
        torch.utils.swap_tensors(old, new)
        vars(old).update(attributes)
        return
    except RuntimeError:  # a result computed from ``old``, or a weak reference to it, still exists
        vars(new).update(attributes)
    for module in whole.modules():
        module._parameters.update({name: new for name, p in module._parameters.items() if p is old})
    for optimizer in optimizers:
        replace_in_optimizer(optimizer, old, new)


def replace_in_optimizer(optimizer: Optimizer, old: Tensor, new: Tensor) -> None:
    """Replace a parameter in the groups of an optimizer, and make ``new`` the key of its state."""
    for group in optimizer.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]
    if old in optimizer.state:
        optimizer.state[new] = optimizer.state.pop(old)


def replace_buffers(layers: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Set the buffers of ``layers`` to ``tensors``, by name. A layer may have created or removed a buffer."""
    replaced: dict[int, tuple[Tensor, Tensor]] = {}  # keeps old buffers alive, so that no id is used twice
    for prefix, module in layers.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            new = tensors.get(f"{prefix}.{name}" if prefix else name)
            if buffer is None or new is None:
                module._buffers[name] = new
            elif not any(buffer is placed for _, placed in replaced.values()):
                module._buffers[name] = replaced.setdefault(id(buffer), (buffer, new))[1]
