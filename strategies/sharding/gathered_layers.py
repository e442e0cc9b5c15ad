"""Layers whose parameters are divided among replicas, which see different rows (ZeRO stage 3).

    forward     part of this replica ── all-gather ──▶ whole weight ──▶ freed at the end of the layer's forward function
    backward    part ── all-gather ──▶ whole weight, where autograd needs it
                gradient of the whole weight ── / replicas, reduce-scatter ──▶ gradient of the part, a mean

A parameter is whole only within the forward function of its own module. In the graph of autograd, the whole weight is
replaced by what is needed to gather it again (``saved_tensors_hooks``). See Rajbhandari et al., ZeRO, arXiv 1910.02054,
section 5.3.

All replicas must call the same layers in the same order. Each exchange is preceded by a short message that says what it
is for, because gloo ends the process if messages of different sizes meet.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from strategies.common.torch_compat import (
    gather_base,
    gradient_hooks,
    top_saved_tensors_hooks,
    tree_leaves,
    version_of,
    without_torch_function,
)
from strategies.sharding.divided_layers import (
    DividedLayer,
    DividedModel,
    TensorGroup,
    connect,
    connected_group,
    tensor_group,
)

INSTEAD = "Use zero_stage=2, which leaves parameters whole."


class ReplicaGroup(TensorGroup):
    """The replicas of a stage, which divide parameters and see different rows."""

    def joined(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all replicas, of shape ``[n]``, one after the other: ``[size * n]``."""
        message = tensor.detach().cpu().contiguous()
        received = message.new_empty(self.size * len(message))
        self._note("sent", message)
        work = gather_base(self._group, _bytes(received), _bytes(message))
        self._wait(work.wait)
        self._note("received", received)
        return received.to(tensor.device)

    def sum_of_part(self, tensor: Tensor) -> Tensor:
        """Return this replica's part of the sum over the replicas of a tensor of shape ``[size * n]``: ``[n]``."""
        message = tensor.detach().cpu().contiguous()
        received = torch.empty_like(message)
        self._note("sent", message)
        work = self._group.alltoall_base(_bytes(received), _bytes(message), [], [])
        self._wait(work.wait)
        self._note("received", received)
        total, *others = received.chunk(self.size)
        total = total.clone()
        for other in others:
            total.add_(other)
        return total.to(tensor.device)

    def told(self, message: Tensor) -> list[Tensor]:
        """Return the short messages of all replicas, of shape ``[n]``."""
        return list(self.joined(message).chunk(self.size))


class AbsentReplicas(ReplicaGroup):
    """A group whose other replicas are absent. Their tensors count as zeros.

    Args:
        rank: The number of this replica.
        size: The number of replicas.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def joined(self, tensor: Tensor) -> Tensor:
        """Return the tensor in its place, between zeros."""
        everything = tensor.new_zeros(self.size, len(tensor))
        everything[self.rank] = tensor.detach()
        return everything.flatten()

    def sum_of_part(self, tensor: Tensor) -> Tensor:
        """Return a copy of this replica's part."""
        return tensor.detach().chunk(self.size)[self.rank].clone()

    def told(self, message: Tensor) -> list[Tensor]:
        """Return the message."""
        return [message]


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor, in a type that gloo can send."""
    return tensor.view(torch.uint8)


def replica_group() -> ReplicaGroup:
    """Return the replicas that divide the parameters of this process.

    Raises:
        RuntimeError: If there are none.
    """
    return cast(ReplicaGroup, tensor_group())


@contextmanager
def alone() -> Iterator[None]:
    """Context in which this replica runs layers to find out shapes, while the other replicas may do something else."""
    if not isinstance(group := connected_group(), ReplicaGroup):
        yield
        return
    connect(AbsentReplicas(group.rank, group.size))
    try:
        yield
    finally:
        connect(group)


USED_ELSEWHERE = (
    "zero_stage=3: a weight is used outside of the forward function of its own module (such as "
    "functional.linear(x, self.other.weight), or a penalty on weights in training_step), where each replica has only a "
    "part of it. Call the module that owns the weight, or use zero_stage=2, which leaves parameters whole."
)


class Event(IntEnum):
    """What the replicas of a stage do together."""

    GATHER = 0
    REDUCE = 1
    PASS = 2
    RELEASE = 3
    AVERAGE = 4


def agree(event: Event, value: float) -> None:
    """Check that all replicas do the same next. All replicas of this stage call this.

    Args:
        event: What this replica does.
        value: The number of the layer, the number of micro-batches, or the factor of the gradients.

    Raises:
        RuntimeError: If another replica does something else.
    """
    own = torch.tensor([event, value], dtype=torch.float64)
    for number, other in enumerate(replica_group().told(own)):
        if torch.equal(own, other):
            continue
        theirs = Event(int(other[0]))
        if theirs is not event:
            why = f"this replica reached {_NAMES[event]}, while replica {number} reached {_NAMES[theirs]}"
        elif event is Event.PASS:
            why = f"this replica has {value:g} micro-batches where replica {number} has {other[1]:g}"
        elif event is Event.RELEASE:
            why = f"this replica multiplies its gradients by {value:g} where replica {number} takes {other[1]:g}"
        else:
            why = f"this replica calls layer {value:g} where replica {number} calls layer {other[1]:g}"
        raise RuntimeError(
            f"zero_stage=3 divides parameters, so all replicas must do the same steps, but {why}. All need batches "
            "with the same number of rows, and a model that calls the same layers for each batch. Otherwise use "
            "zero_stage=2."
        )


_NAMES = {
    Event.GATHER: "the use of a layer",
    Event.REDUCE: "the gradient of a layer",
    Event.PASS: "the next pass",
    Event.RELEASE: "the backward pass of the loss",
    Event.AVERAGE: "the end of a backward pass",
}


# Parameters


class PartOfParameter(nn.Parameter):
    """A parameter that holds the part of this replica. Outside of its module's forward, nothing is computed with it.

    Raises:
        RuntimeError: From a function of torch that would compute a differentiable result of the part.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_function():
            result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() and any(getattr(leaf, "grad_fn", None) is not None for leaf in tree_leaves(result)):
            raise RuntimeError(USED_ELSEWHERE)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        make, arguments, *_ = super().__reduce_ex__(protocol)
        return _as_part, (make, arguments)


def is_part(parameter: Tensor) -> bool:
    """Return whether a parameter holds the part of this replica."""
    return isinstance(parameter, PartOfParameter)


def _as_part(make: Callable[..., nn.Parameter], arguments: tuple[Any, ...]) -> nn.Parameter:
    parameter = make(*arguments)
    cast(Any, parameter).__class__ = PartOfParameter
    return parameter


@dataclass(frozen=True)
class FlatPart:
    """A parameter that is divided into flat parts of one size, of which the last one may end with zeros.

    Attributes:
        shape: The shape of the whole parameter.
    """

    shape: torch.Size

    def of(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Return the part of a rank, a copy of shape ``[n]``."""
        return self.padded(whole, size).chunk(size)[rank].clone()

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor, from the parts of all ranks."""
        return self.whole(torch.cat([part.flatten() for part in parts]))

    def whole_shape(self, shape: Sequence[int], size: int) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self.shape)

    def padded(self, whole: Tensor, size: int) -> Tensor:
        """Return the elements of a whole tensor, followed by zeros: ``[size * n]``."""
        number = math.prod(self.shape)
        padded = whole.new_zeros(-(-number // size) * size)
        padded[:number].view(self.shape).copy_(whole.view(self.shape) if whole.ndim == 1 else whole)
        return padded

    def whole(self, padded: Tensor) -> Tensor:
        """Return the whole tensor, a view of its elements and the zeros behind them."""
        return padded[: math.prod(self.shape)].view(self.shape)


@dataclass(frozen=True)
class _Divided:
    """A divided parameter of a layer.

    Attributes:
        number: The number of the parameter, the same in all replicas.
        path: The module that has it, within the layer.
        name: The name of the parameter in this module.
        part: How it is divided.
    """

    number: int
    path: str
    name: str
    part: FlatPart

    def gathered(self, own: Tensor) -> Tensor:
        """Return the whole parameter. All replicas of the stage call this."""
        if own.is_meta:
            return torch.empty(self.part.shape, dtype=own.dtype, device="meta")
        agree(Event.GATHER, self.number)
        return self.part.whole(replica_group().joined(own.detach()))


class _Gathered(torch.autograd.Function):
    """The whole parameter, whose gradient is this replica's part of the mean over the replicas."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, divided: _Divided) -> Tensor:
        ctx.divided, ctx.length = divided, len(own)
        return divided.gathered(own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        divided: _Divided = ctx.divided
        if grad.is_sparse:
            raise RuntimeError(f"zero_stage=3: {divided.name} has a sparse gradient, which is not divided. {INSTEAD}")
        if grad.is_meta:
            return divided.part.padded(grad, 1)[: ctx.length], None
        agree(Event.REDUCE, divided.number)
        group = replica_group()
        # Divided before the sum, which might be too large for float16
        return group.sum_of_part(divided.part.padded(grad, group.size).div_(group.size)), None


# Layers


@dataclass(frozen=True)
class _KeptView:
    """What autograd keeps in place of a view of a whole parameter."""

    divided: _Divided
    parameter: nn.Parameter
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def gathered(self) -> Tensor:
        """Return the view. All replicas of the stage call this."""
        if version_of(self.parameter) != self.version:
            raise RuntimeError(
                f"zero_stage=3: {self.divided.name} of shape {list(self.divided.part.shape)} has changed since the "
                "forward pass whose gradients are computed. Step optimizers after the backward pass."
            )
        whole = self.divided.gathered(self.parameter)
        return whole.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class _Kept:
    """Another tensor that autograd keeps. Autograd does not check changes of what hooks have packed."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> "_Kept":
        """Keep a tensor without its graph: it may be an output, which would refer to itself."""
        return cls(tensor.detach(), version_of(tensor))

    def gathered(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: If it has changed, as autograd raises it.
        """
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {list(self.tensor.shape)} is at version {version_of(self.tensor)}; expected version "
                f"{self.version} instead"
            )
        return self.tensor


def _unpacked(kept: _KeptView | _Kept) -> Tensor:
    return kept.gathered()


class GatheredLayer(DividedLayer):
    """A layer that gathers its parameters from the replicas when it runs, and again in its backward pass.

    Args:
        description: The layer, for messages.
        divided: Its divided parameters.
    """

    def __init__(self, description: str, divided: Sequence[_Divided]) -> None:
        self._description, self._divided = description, divided
        self._depth = 0
        """How many calls of the layer are in progress, if it calls itself."""
        self._whole: list[tuple[nn.Module, _Divided, nn.Parameter, Tensor, tuple[int, int]]] = []
        """For each parameter that is whole now: its holder, the part, the whole, and :func:`_state_of` the whole."""
        self._compared: set[bool] = set()
        """The modes in which values have been compared after a call. ``Tensor.data`` counts no changes."""
        self._keeping: saved_tensors_hooks | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._depth += 1
        if self._depth > 1:
            return args, kwargs
        views: dict[int, tuple[_Divided, nn.Parameter]] = {}
        for divided in self._divided:
            holder = module.get_submodule(divided.path)
            parameter = cast(nn.Parameter, holder._parameters[divided.name])
            assert parameter.is_meta or is_part(parameter), "the averages over replicas would not leave it out"
            whole = cast(Tensor, _Gathered.apply(parameter, divided))
            self._whole.append((holder, divided, parameter, whole, _state_of(whole)))
            holder._parameters[divided.name] = cast(Any, whole)
            views[whole.untyped_storage().data_ptr()] = divided, parameter

        others = top_saved_tensors_hooks()
        is_nested = others is not None and others[1] is _unpacked

        def packed(tensor: Tensor) -> Any:
            found = views.get(tensor.untyped_storage().data_ptr()) if tensor.layout is torch.strided else None
            if found is None or tensor.dtype != found[1].dtype or tensor.is_meta:
                return others[0](tensor) if is_nested else _Kept.of(tensor)
            divided, parameter = found
            place = tensor.size(), tensor.stride(), int(tensor.storage_offset())
            return _KeptView(divided, parameter, version_of(parameter), *place)

        # Within torch.utils.checkpoint, the whole forward pass is repeated, and its hooks keep nothing.
        if torch.is_grad_enabled() and (others is None or is_nested):
            self._keeping = saved_tensors_hooks(packed, _unpacked)
            self._keeping.__enter__()
        return args, kwargs

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        self._depth = max(0, self._depth - 1)  # a hook that was added later may have failed before this one began
        if self._depth:
            return output
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.__exit__()
        swapped, self._whole = self._whole, []
        has_changed, compares = False, module.training not in self._compared and output is not None
        if compares:
            self._compared.add(module.training)
        for holder, divided, parameter, whole, state in swapped:
            has_changed |= holder._parameters.get(divided.name) is not whole or _state_of(whole) != state
            if compares and not has_changed and not whole.is_meta:
                group = replica_group()
                has_changed = not torch.equal(divided.part.of(whole.detach(), group.rank, group.size), parameter.data)
            holder._parameters[divided.name] = parameter
        if has_changed and output is not None:
            raise RuntimeError(
                f"zero_stage=3: {self._description} changes its weights in its forward function, where they are copies "
                f"of the parts of all replicas. {INSTEAD}"
            )
        return output


def _state_of(whole: Tensor) -> tuple[int, int]:
    """Return the count of changes of a tensor and the address of its values, which ``Tensor.data`` may replace."""
    return version_of(whole), whole.untyped_storage().data_ptr()


# Models


class GatheredModel(DividedModel):
    """A model whose large parameters are divided among replicas.

    A parameter with at least two dimensions is divided, unless it cannot be gathered for one module at a time: it
    belongs to a module that contains the pipelined layers, to layers that may be on different stages, or to a module
    that does not read it as an attribute in its forward function.

    Args:
        model: The model, with the same values on every rank. All layers are in this process.
        layers: The layers that are divided among the stages.
        rank: The number of this replica.
        size: The number of replicas.

    Raises:
        ValueError: If the model has parameters without values.
    """

    option = "zero_stage=3"
    _ranks = "replica"

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module], rank: int, size: int) -> None:
        super().__init__(model, rank, size)
        units = self._found_units([*layers])
        for module, (description, divided) in units.items():
            self._undo += GatheredLayer(description, divided).install(module)
        self._divide()
        for parameter in self._part_of:
            cast(Any, parameter).__class__ = PartOfParameter
            self._undo.append(partial(setattr, parameter, "__class__", nn.Parameter))

    def _found_units(self, layers: Sequence[nn.Module]) -> dict[nn.Module, tuple[str, list[_Divided]]]:
        """Find the modules that gather parameters, and the parameters that each of them gathers."""
        parts, holders = parts_of_parameters(self._model, layers, self._size), _holders(self._model)
        for parameter in parts:
            path, _, name = holders[parameter][0]
            if parameter.is_meta:
                raise ValueError(
                    f"{path}.{name} has no values yet, but zero_stage=3 divides values. Build the model outside of "
                    "configure_model and init_module, which make it without memory."
                )
        self._note_parts(parts)
        # nn.MultiheadAttention reads the weight of its output layer, and does not call the layer.
        attention = {
            child: (path, module)
            for path, module in self._model.named_modules()
            if isinstance(module, nn.MultiheadAttention)
            for child in module.children()
        }
        units: dict[nn.Module, tuple[str, list[_Divided]]] = {}
        for number, (parameter, part) in enumerate(parts.items()):
            for path, module, name in holders[parameter]:
                start, unit = attention.get(module, (path, module))
                within = path.removeprefix(start).removeprefix(".")
                units.setdefault(unit, (start, []))[1].append(_Divided(number, within, name, part))
        return units


def _holders(model: nn.Module) -> dict[nn.Parameter, list[tuple[str, nn.Module, str]]]:
    """Return the places of each parameter: the path of a module, the module, and the name of the parameter in it."""
    holders: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(parameter, []).append((path, module, name))
    return holders


def parts_of_parameters(model: nn.Module, layers: Iterable[nn.Module], size: int) -> dict[nn.Parameter, FlatPart]:
    """Return how the parameters of a model would be divided; see :class:`GatheredModel` for the arguments."""
    zones: dict[nn.Module, set[int]] = {}
    for number, layer in enumerate(layers):
        for module in layer.modules():
            zones.setdefault(module, set()).add(number)
    around = {
        module
        for module in model.modules()
        if module not in zones and any(inner in zones for inner in module.modules())
    }
    parts: dict[nn.Parameter, FlatPart] = {}
    for parameter, places in _holders(model).items():
        modules = [module for _, module, _ in places]
        first, *others = {frozenset(zones.get(module, ())) for module in modules}
        is_in_one = not others and len(first) < 2 and not around.intersection(modules)
        if is_in_one and _is_large(parameter, size) and all(map(_reads_its_parameters, modules)):
            parts[parameter] = FlatPart(parameter.shape)
    return parts


def _is_large(parameter: nn.Parameter, size: int) -> bool:
    return (
        type(parameter) is nn.Parameter
        and parameter.ndim >= 2
        and parameter.numel() >= size
        and parameter.is_floating_point()
        and parameter.layout is torch.strided
        and not any(gradient_hooks(parameter))
    )


def _reads_its_parameters(module: nn.Module) -> bool:
    """Whether a module reads its parameters as attributes in its forward function, and has dense gradients."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (module.sparse or module.max_norm is not None):
        return False
    return not isinstance(module, nn.ParameterList | nn.ParameterDict | nn.RNNBase)
