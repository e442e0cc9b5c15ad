"""Which layers form which stage, and what stays of a stage on the driver while its layers live on a worker.

The driver keeps the module objects, so that names, shapes, counts and ``requires_grad`` can be read, but their tensors
are on the ``meta`` device. Parameters keep their identity (optimizers and users hold on to them).
"""

import io
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.common.torch_compat import has_gradient_hooks, is_compiled_in_place
from strategies.pipeline.state.remote_tensor import Source, StageReader, remote_buffer, remote_parameter


def check_balance(balance: Sequence[int], num_layers: int, num_stages: int) -> list[int]:
    """Returns the balance as a list if it places every layer on a stage and none is empty.

    Raises:
        ValueError: If it does not.
    """
    if not isinstance(balance, Sequence) or isinstance(balance, str):
        raise ValueError(f"The balance must be a list of numbers of layers, one for each device, got {balance!r}.")
    sizes = list(balance)
    if any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes):
        raise ValueError(
            f"The provided balance {sizes} must consist of whole numbers above 0: no stage without a layer."
        )
    if sum(sizes) != num_layers:
        raise ValueError(
            f"The provided balance sum: {sum(sizes)} does not match your Sequential length: {num_layers}. "
            f"Give each layer to exactly one stage, or leave the balance out to have it found."
        )
    if len(sizes) != num_stages:
        raise ValueError(
            f"The provided balance {sizes} is for {len(sizes)} stages, but there are {num_stages} devices. "
            f"Give one number of layers for each device, or set devices={len(sizes)}."
        )
    return sizes


def cut(module: nn.Sequential, balance: Sequence[int]) -> list[nn.Sequential]:
    """The stages: parts of ``module`` that share its layers and keep their names."""
    children = list(module._modules.items())  # not named_children(), which leaves a repeated layer out
    ends = list(accumulate(balance))
    stages = []
    for start, stop in zip([0, *ends], ends, strict=False):
        stage = nn.Sequential()
        for name, child in children[start:stop]:
            stage.add_module(name, child)
        stages.append(stage)
    return stages


@contextmanager
def without_layers(module: nn.Sequential, number: int) -> Iterator[None]:
    """Takes the first layers out of ``module``, so that what is done to it leaves them alone."""
    children = dict(module._modules)
    for name in list(children)[:number]:
        del module._modules[name]
    try:
        yield
    finally:
        module._modules.clear()
        module._modules.update(children)


@contextmanager
def without_meta_tensors(model: nn.Module) -> Iterator[None]:
    """Takes tensors without values out of ``model``, so that the rest of it can be moved to another device."""
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


class _Pickler(cloudpickle.Pickler):
    """Refuses to take the user's whole model along with a layer that refers to it."""

    def __init__(self, file: io.BytesIO, forbidden: Any) -> None:
        super().__init__(file)
        self._forbidden = forbidden

    def reducer_override(self, obj: Any) -> Any:
        if obj is self._forbidden:
            raise ValueError(
                f"a layer of the pipelined module refers to the whole model ({type(obj).__name__}), for example by a "
                "bound method or an attribute, so it cannot be sent to another process without the model; let the "
                "layer hold only what it needs"
            )
        return super().reducer_override(obj)


def pickled(cargo: Any, layers: nn.Sequential, forbidden: Any) -> bytes:
    """Pickles what goes to a worker, with classes and functions of scripts and notebooks.

    Args:
        cargo: What to pickle.
        layers: The layers in it, for a message that names the one that cannot be pickled.
        forbidden: The model as a whole, which must not travel along.

    Raises:
        ValueError: If something cannot be pickled, or refers to ``forbidden``.
    """
    hooked = [name for name, p in layers.named_parameters() if has_gradient_hooks(p)]
    if hooked:
        raise ValueError(
            f"parameter {hooked[0]} has a hook (register_hook), which cannot follow it to another process; register "
            "hooks on the output of a layer instead, in its forward. To log gradients read the parameter's .grad in "
            'on_before_optimizer_step, and pass log="parameters" to WandbLogger.watch'
        )
    for name, layer in layers.named_modules():
        if is_compiled_in_place(layer):
            warnings.warn(
                f"layer {name} was compiled by .compile(), which is lost on the way to another process: it runs "
                "uncompiled there. Put torch.compile(layer) in its place, or compile functions that it calls.",
                stacklevel=2,
            )
    file = io.BytesIO()
    try:
        _Pickler(file, forbidden).dump(cargo)
    except ValueError:
        raise
    except Exception as error:  # pickling raises whatever the objects' own methods raise
        culprits = [
            f"layer {name}, a {type(layer).__name__}," for name, layer in layers.named_children() if _fails(layer)
        ]
        raise ValueError(
            f"{' and '.join(culprits) or 'an optimizer'} cannot be sent to another process "
            f"({type(error).__name__}: {error})"
        ) from error
    return file.getvalue()


def _fails(layer: nn.Module) -> bool:
    try:
        cloudpickle.dumps(layer)
    except Exception:  # as above
        return True
    return False


def tensors_here(model: nn.Module, optimizers: Iterable[Optimizer]) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Every parameter that has its values in this process, also those that only an optimizer knows; every buffer."""
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    parameters = dict.fromkeys(chain(model.parameters(), *groups))
    return [p for p in parameters if not p.is_meta], [buffer for buffer in model.buffers() if not buffer.is_meta]


def move_to_meta(
    layers: nn.Module,
    whole: nn.Module,
    optimizers: Sequence[Optimizer],
    keep: Collection[Tensor] = (),
    *,
    stage: StageReader | None = None,
    module: int = 0,
    device: torch.device | None = None,
) -> None:
    """Replaces the tensors of ``layers`` by stand-ins without values, but for the parameters in ``keep``.

    Args:
        layers: Some layers.
        whole: The module that they are part of; another part may share a parameter with them.
        optimizers: Optimizers that may hold the parameters.
        keep: Parameters that have their values here; compared by identity.
        stage: Where the stand-ins fetch values when they are read; without one that is an error.
        module: The number that ``stage`` gives to the module of the layers: zero, or that of a copy of the model.
        device: Where values are put when they have been fetched.
    """

    def source(name: str) -> Source | None:
        return None if stage is None else Source(stage, name, device or torch.device("cpu"), module)

    kept = {id(parameter) for parameter in keep}
    for name, parameter in list(layers.named_parameters()):
        if id(parameter) not in kept and not parameter.is_meta:
            _replace(whole, optimizers, parameter, remote_parameter(name, parameter, source(name)))
    named = dict(layers.named_buffers(remove_duplicate=False))
    replace_buffers(layers, {name: remote_buffer(name, buffer, source(name)) for name, buffer in named.items()})


def move_from_meta(
    layers: nn.Module, whole: nn.Module, optimizers: Sequence[Optimizer], tensors: Mapping[str, Tensor]
) -> None:
    """Gives ``layers`` real tensors again, by their names, where they have none."""
    for name, parameter in list(layers.named_parameters()):
        if parameter.is_meta:
            value = nn.Parameter(tensors[name].detach(), requires_grad=parameter.requires_grad)
            _replace(whole, optimizers, parameter, value)
    replace_buffers(layers, tensors)


def _replace(whole: nn.Module, optimizers: Sequence[Optimizer], old: nn.Parameter, new: nn.Parameter) -> None:
    """Makes ``old`` become ``new``, or puts ``new`` into its places if that cannot be."""
    attributes = {name: value for name, value in vars(old).items() if not name.startswith("relay_")}
    try:
        torch.utils.swap_tensors(old, new)
        vars(old).update(attributes)
        return
    except RuntimeError:  # a result that was computed from it, or a weak reference to it, is still alive
        vars(new).update(attributes)
    for module in whole.modules():
        module._parameters.update({name: new for name, p in module._parameters.items() if p is old})
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new if p is old else p for p in group["params"]]
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


def replace_buffers(layers: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Puts ``tensors`` into the places of the buffers of ``layers``; a layer may have made one, or dropped it."""
    replaced: dict[int, tuple[Tensor, Tensor]] = {}  # keeps the old ones alive, so that no id is used twice
    for prefix, module in layers.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            new = tensors.get(f"{prefix}.{name}" if prefix else name)
            if buffer is None or new is None:
                module._buffers[name] = new
            elif not any(buffer is placed for _, placed in replaced.values()):
                module._buffers[name] = replaced.setdefault(id(buffer), (buffer, new))[1]
