"""Tensor parallelism: ranks divide the weights of single layers, and all of them see the same rows.

    columns   x ─────────▶ rank 0: y₀ = x W₀ᵀ     rank 1: y₁ = x W₁ᵀ       the output is divided
    rows      y₀, y₁ ────▶ rank 0: y₀ V₀ᵀ      +  rank 1: y₁ V₁ᵀ           the sum is the whole output

In the backward pass, the gradient of ``x`` is the sum over the ranks. Between a layer divided by columns and one
divided by rows, each rank computes with its own heads or features, without communication (Shoeybi et al., Megatron-LM,
arXiv 1909.08053, section 3). The names of the styles are those of ``transformers``.

A divided parameter stays the same object and holds a plain tensor, the part of this rank. So optimizers, messages
between stages and snapshots need no knowledge of the division. (``DTensor`` parameters next to plain ones are refused
by torch's clipping and its fused optimizers, and they need torch's default process group, which workers do not have.)
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, Protocol, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from strategies.common.names import with_wildcards
from strategies.common.waiting import Wait, wait_here
from strategies.optim.restricted import is_by_element, parameters_of


class TensorGroup:
    """The ranks that divide the layers of this process.

    A tensor on the ``meta`` device is not sent: a rank may run a layer on this device alone, to find out shapes.

    Args:
        group: The ranks, on gloo. Values on GPUs travel through the memory of the host.
        wait: Calls a function that waits for other ranks.
        note: Called with each tensor that this rank gives to the others (``"sent"``) or gets (``"received"``).
    """

    def __init__(
        self,
        group: ProcessGroup,
        wait: Wait = wait_here,
        note: Callable[[Literal["sent", "received"], Tensor], None] = lambda way, tensor: None,
    ) -> None:
        self._group, self._wait, self._note = group, wait, note
        self.rank, self.size = group.rank(), group.size()

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks, in the same order of additions on every rank."""
        if tensor.is_meta:
            return torch.empty_like(tensor)
        message = tensor.detach().to("cpu", copy=True).contiguous()
        self._note("sent", message)
        work = self._group.allreduce([message])
        self._wait(work.wait)
        self._note("received", message)
        return message.to(tensor.device)

    def of_first(self, tensor: Tensor) -> Tensor:
        """Return the tensor of the first rank."""
        message = tensor.detach().to("cpu", copy=True).contiguous()
        work = self._group.broadcast(_bytes(message), 0)
        self._wait(work.wait)
        return message.to(tensor.device)

    def parts(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have one shape."""
        if tensor.is_meta:
            return [torch.empty_like(tensor) for _ in range(self.size)]
        message = tensor.detach().cpu().contiguous()
        received = [torch.empty_like(message) for _ in range(self.size)]
        self._note("sent", message)
        work = self._group.allgather([[*map(_bytes, received)]], [_bytes(message)])
        self._wait(work.wait)
        for part in received:
            self._note("received", part)
        return [part.to(tensor.device) for part in received]


def _bytes(message: Tensor) -> Tensor:
    """Return a view of a message, because gloo supports few dtypes."""
    return message.flatten().view(torch.uint8)


_LISTED = 5
"""The number of layers that a line in the log names."""

_group: TensorGroup | None = None
"""The ranks that divide the layers of this process, which is part of at most one pipeline at a time."""


def connect(group: TensorGroup | None) -> None:
    """Set the ranks with which the divided layers of this process communicate; ``None`` ends the connection."""
    global _group
    _group = group


def connected_group() -> TensorGroup | None:
    """Return the ranks that divide the layers of this process; ``None`` if there are none."""
    return _group


def tensor_group() -> TensorGroup:
    """Return the ranks that divide the layers of this process.

    Raises:
        RuntimeError: If there are none.
    """
    if _group is None:
        raise RuntimeError(
            "this layer holds a part of its weights, and computes only together with the other ranks that divide it "
            "(tensor_parallel_size, or zero_stage=3), within the call of the Trainer that divided it"
        )
    return _group


class _Copied(torch.autograd.Function):
    """The input, whose gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return tensor_group().sum(grad)


class _Summed(torch.autograd.Function):
    """The sum over the ranks, whose gradient is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return tensor_group().sum(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Joined(torch.autograd.Function):
    """The parts of all ranks, side by side in the last dimension."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return torch.cat(tensor_group().parts(value), -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        group = tensor_group()
        return grad.chunk(group.size, -1)[group.rank].contiguous()


class _Split(torch.autograd.Function):
    """The part of this rank of a tensor that every rank has, divided in the last dimension."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        group = tensor_group()
        return value.chunk(group.size, -1)[group.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.cat(tensor_group().parts(grad), -1)


copied, summed, joined, split = (
    cast(Callable[[Tensor], Tensor], kind.apply) for kind in (_Copied, _Summed, _Joined, _Split)
)


# Layers


class DividedLayer:
    """Hooks around the forward function of a layer of which this rank has a part. They travel with the layer.

    A layer whose parameters alone are divided, such as a parameter of a list of experts, has no hooks.
    """

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments with which the layer computes."""
        return args, kwargs

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the output of the layer. ``output`` is ``None`` if the layer has raised an error."""
        return output

    def install(self, module: nn.Module) -> list[Callable[[], None]]:
        """Add the hooks to a layer. Returns functions that remove them."""
        before = module.register_forward_pre_hook(self.before, with_kwargs=True, prepend=True)
        after = module.register_forward_hook(self.after, always_call=True)
        return [before.remove, after.remove]


def _first_changed(function: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args:
        return (function(args[0]), *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, {**kwargs, name: function(kwargs[name])}


class ColumnLayer(DividedLayer):
    """A layer divided by its output features; ``joins``: every rank gets the whole output."""

    def __init__(self, *, joins: bool = False) -> None:
        self._joins = joins

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _first_changed(copied, args, kwargs)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return joined(output) if self._joins and output is not None else output


class RowLayer(DividedLayer):
    """A layer divided by its input features; ``splits``: every rank has the whole input."""

    def __init__(self, *, splits: bool = False) -> None:
        self._splits = splits
        self._bias: nn.Parameter | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._bias = module._parameters.get("bias")
        if self._bias is not None:  # added once, to the sum
            module._parameters["bias"] = cast(Any, torch.zeros_like(self._bias, requires_grad=False))
        return _first_changed(split, args, kwargs) if self._splits else (args, kwargs)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        bias, self._bias = self._bias, None
        if bias is not None:
            module._parameters["bias"] = bias
        if output is None:
            return None
        total = summed(output)
        return total if bias is None else total + bias


class VocabularyLayer(DividedLayer):
    """An embedding divided by its entries. Each rank looks up its own, and the sum has all of them.

    Args:
        first: The first entry of this rank.
        whole: The number of entries of all ranks.
    """

    def __init__(self, first: int, whole: int) -> None:
        self._first, self._whole = first, whole
        self._elsewhere: Tensor | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = cast(Tensor, module.weight).shape[0]

        def own(ids: Tensor) -> Tensor:
            shifted = ids - self._first
            is_known = (ids >= 0) & (ids < self._whole)  # an unknown id fails in the lookup of every rank
            self._elsewhere = is_known & ((shifted < 0) | (shifted >= number))
            return shifted.masked_fill(self._elsewhere, 0)

        return _first_changed(own, args, kwargs)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        elsewhere, self._elsewhere = self._elsewhere, None
        if output is None or elsewhere is None:
            return output
        return summed(output.masked_fill(elsewhere.unsqueeze(-1), 0))


class PartialGradientLayer(DividedLayer):
    """A layer that every rank has, such as the norm of a head, and whose input is the part of this rank."""

    def __init__(self) -> None:
        self._parameters: dict[str, nn.Parameter | None] = {}
        self._has_checked = False

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = args[0] if args else next(iter(kwargs.values()))
        if not (self._has_checked or value.is_meta):
            self._has_checked = True
            self._check(module, value)
        self._parameters = dict(module._parameters)
        for name, parameter in self._parameters.items():
            if parameter is not None:
                module._parameters[name] = cast(Any, copied(parameter))
        return args, kwargs

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        module._parameters.update(self._parameters)
        self._parameters = {}
        return output

    def _check(self, module: nn.Module, value: Tensor) -> None:
        """Check that the input is not the same on every rank, because the sum of gradients would then be too large."""
        first, *others = tensor_group().parts(value)
        if first.any() and all(torch.equal(first, other) for other in others):
            raise RuntimeError(
                f"the tensor parallel plan gives a {type(module).__name__} the style 'replicated_with_grad_allreduce', "
                "which is for a layer whose input is divided, but every rank has the same input. Leave this layer out "
                "of the plan."
            )


class ExpertsLayer(DividedLayer):
    """A list of experts, each of which is divided: input and weights of the router are whole, outputs are summed."""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def whole(value: Any) -> Any:
            return copied(value) if isinstance(value, Tensor) and value.is_floating_point() else value

        return tuple(map(whole, args)), {name: whole(value) for name, value in kwargs.items()}

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return None if output is None else summed(output)


# Parameters


@dataclass(frozen=True)
class TensorPart:
    """How a parameter is divided.

    Attributes:
        dim: The dimension that is divided, from the end: -1 or -2.
        packed: How many tensors of equal size lie one after the other in this dimension; each is divided by itself.
    """

    dim: int
    packed: int = 1

    def of(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Return the part of a rank, a copy."""
        packs = whole.chunk(self.packed, self.dim)
        return torch.cat([pack.chunk(size, self.dim)[rank] for pack in packs], self.dim).contiguous()

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor."""
        packs = zip(*(part.chunk(self.packed, self.dim) for part in parts), strict=True)
        return torch.cat([torch.cat(pack, self.dim) for pack in packs], self.dim)

    def whole_shape(self, shape: Sequence[int], size: int) -> list[int]:
        """Return the shape of the whole tensor, given that of a part."""
        whole = list(shape)
        whole[self.dim] *= size
        return whole


class PartOfTensor(Protocol):
    """How a parameter is divided."""

    def of(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Return the part of a rank, a copy."""

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor, from the parts of all ranks."""

    def whole_shape(self, shape: Sequence[int], size: int) -> list[int]:
        """Return the shape of the whole tensor, given that of a part."""


_DivisionKind = Literal["columns", "rows", "vocabulary", "whole", "experts"]


@dataclass(frozen=True)
class Style:
    """A style of a plan: how the parameters of a layer are divided, and its hooks."""

    kind: _DivisionKind
    make: Callable[..., DividedLayer]
    packed: int = 1


STYLES: Mapping[str, Style] = {
    "colwise": Style("columns", ColumnLayer),
    "colwise_gather_output": Style("columns", lambda: ColumnLayer(joins=True)),
    "colwise_rep": Style("columns", lambda: ColumnLayer(joins=True)),
    "packed_colwise": Style("columns", ColumnLayer, packed=2),
    "rowwise": Style("rows", RowLayer),
    "rowwise_split_input": Style("rows", lambda: RowLayer(splits=True)),
    "rowwise_rep": Style("rows", lambda: RowLayer(splits=True)),
    "packed_rowwise": Style("rows", RowLayer, packed=2),
    "embedding_rowwise": Style("vocabulary", VocabularyLayer),
    "replicated_with_grad_allreduce": Style("whole", PartialGradientLayer),
    "moe_tp_experts": Style("experts", ExpertsLayer),
}
"""The styles that a plan may give to a layer or to a single parameter, by the names of ``transformers``."""


class DividedModel:
    """A model of whose parameters each rank has a part.

    Args:
        model: The model, with the same values on every rank. All layers are in this process.
        rank: The number of this rank.
        size: The number of ranks.
        copies: Copies of the model that are not called, such as averages of its weights. They are divided in the same
            way.

    Attributes:
        parts: How each divided parameter is divided, by the names that the parameter has in the model.
    """

    option: ClassVar[str]
    """The option that divides the model, for messages."""
    _ranks: ClassVar[str]
    """What the ranks are, for messages."""

    def __init__(self, model: nn.Module, rank: int, size: int, copies: Sequence[nn.Module] = ()) -> None:
        self._model, self._rank, self._size, self._copies = model, rank, size, copies
        self._part_of: dict[nn.Parameter, PartOfTensor] = {}
        self._copied: dict[nn.Parameter, PartOfTensor] = {}
        self._undo: list[Callable[[], None]] = []
        self.parts: dict[str, PartOfTensor] = {}

    def _note_parts(self, part_of: Mapping[nn.Parameter, PartOfTensor]) -> None:
        """Decide how parameters are divided. They are still whole."""
        self._part_of = dict(part_of)
        self.parts = {
            name: part_of[parameter]
            for name, parameter in self._model.named_parameters(remove_duplicate=False)
            if parameter in part_of
        }

    def _divide(self) -> None:
        """Keep the part of this rank of each divided parameter."""
        self._copied = {copy.get_parameter(name): part for copy in self._copies for name, part in self.parts.items()}
        for parameter, part in (*self._part_of.items(), *self._copied.items()):
            parameter.data = part.of(parameter.data, self._rank, self._size)
        for model in (self._model, *self._copies):
            self._undo.append(model.register_load_state_dict_pre_hook(self._take_parts).remove)

    def _take_parts(self, model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Replace whole parameters in a state dict that is being loaded, such as of a checkpoint, with the parts."""
        for name, part in self.parts.items():
            value, shape = state.get(f"{prefix}{name}"), model.get_parameter(name).shape
            if isinstance(value, Tensor) and list(value.shape) == part.whole_shape(shape, self._size):
                state[f"{prefix}{name}"] = part.of(value, self._rank, self._size)

    @property
    def divided(self) -> Mapping[nn.Parameter, PartOfTensor]:
        """How each divided parameter is divided."""
        return self._part_of

    def described(self) -> str:
        """Return how many parameters this rank has, and which layers are whole, for a line in the log.

        A parameter of the model itself, which no layer has, is listed by its name.
        """
        whole, own, undivided = 0, 0, dict[str, None]()
        for name, parameter in self._model.named_parameters():
            own += parameter.numel()
            part = self.parts.get(name)
            whole += parameter.numel() if part is None else math.prod(part.whole_shape(parameter.shape, self._size))
            if name not in self.parts:
                undivided[with_wildcards(name.rpartition(".")[0] or name)] = None
        listed = list(undivided)[:_LISTED]
        more = f" and {len(undivided) - _LISTED} more" if len(undivided) > _LISTED else ""
        kept = f"; {', '.join(listed)}{more} are whole" if listed else ""
        return f"each {self._ranks} has {own:,} of {whole:,} parameters{kept}"

    def remove_hooks(self) -> None:
        """Make the layers compute without communication again, in their whole sizes; the parameters stay parts."""
        for undo in self._undo:
            undo()
        self._undo = []

    def end(self, optimizers: Iterable[Optimizer], group: TensorGroup | None) -> None:
        """Make the states of the optimizers whole, and then the parameters; see :meth:`restore`."""
        if group is not None:
            for optimizer in optimizers:
                self.join_states(optimizer, group)
        self.restore(group)

    def restore(self, group: TensorGroup | None) -> None:
        """Remove the hooks, and make the parameters whole again.

        Args:
            group: The ranks; ``None`` leaves the parts in place, because the other ranks may have ended.

        Raises:
            RuntimeError: If the ranks have different values of a parameter that is not divided.
        """
        self.remove_hooks()
        if group is None:
            for model in (self._model, *self._copies):
                model.register_state_dict_pre_hook(check_is_whole)
                _left_divided.add(model)
            return
        for parameter, part in (*self._part_of.items(), *self._copied.items()):
            parameter.data = part.joined(group.parts(parameter.data))
            parameter.grad = None if parameter.grad is None else part.joined(group.parts(parameter.grad))
        self._part_of, self._copied = {}, {}
        self.check_equal({name: p.detach() for name, p in self._model.named_parameters()}, group)

    # States of optimizers, by the number of the parameter

    def divide_states(self, optimizer: Optimizer) -> None:
        """Keep the parts of this rank of the states of an optimizer."""
        _set_states(optimizer, self.own_states(optimizer, dict(enumerate(_states(optimizer)))))

    def join_states(self, optimizer: Optimizer, group: TensorGroup) -> None:
        """Make the states of an optimizer whole, from the parts of all ranks, which all call this."""
        _set_states(optimizer, self.whole_states(optimizer, dict(enumerate(_states(optimizer))), group))

    def own_states(self, optimizer: Optimizer, states: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return states whose tensors are the parts of this rank, from those of whole parameters."""
        return self._changed(optimizer, states, lambda part, value: part.of(value, self._rank, self._size), whole=True)

    def whole_states(self, optimizer: Optimizer, states: Mapping[Any, Any], group: TensorGroup) -> dict[Any, Any]:
        """Return states of whole parameters, from the parts of all ranks, which all call this."""
        return self._changed(optimizer, states, lambda part, value: part.joined(group.parts(value)), whole=False)

    def parts_in(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the divided parameters in a state dict of the model, which may leave some out.

        Raises:
            RuntimeError: If a tensor under another name has the shape of a part, and so may be one.
        """
        named = dict(self._model.named_parameters(remove_duplicate=False))
        known = {*named, *(name for name, _ in self._model.named_buffers(remove_duplicate=False))}
        names = {(named[name].shape, named[name].dtype): name for name in self.parts}
        for new, value in state.items():
            if new not in known and isinstance(value, Tensor) and (name := names.get((value.shape, value.dtype))):
                raise RuntimeError(
                    f"the state_dict of {type(self._model).__name__} has {new}, a name that the model does not have, "
                    f"with the shape of the part of {name} in this process; {self.option} divides that parameter. If "
                    "it is a part, only this part would be saved. A state_dict may leave parameters out; rename and "
                    "copy them in on_save_checkpoint."
                )
        return {name: state[name] for name in self.parts if name in state}

    def whole_weights(self, weights: Mapping[str, Any], group: TensorGroup) -> dict[str, Any]:
        """Return a state dict of the model with whole parameters, from the parts of all ranks, which all call this."""
        return {
            name: value if (part := self.parts.get(name)) is None else part.joined(group.parts(value))
            for name, value in weights.items()
        }

    def whole_norms(
        self, parameters: Sequence[Tensor], norms: Mapping[int, Tensor], norm_type: float, group: TensorGroup
    ) -> dict[int, Tensor]:
        """Return the norms of whole gradients of the divided parameters, from the norms of the parts of all ranks.

        Args:
            parameters: The parameters.
            norms: The norms of the gradients in this rank, by the number of the parameter.
            norm_type: The p of the p-norm.
            group: The ranks, which all call this.
        """
        numbers = [number for number in sorted(norms) if parameters[number] in self._part_of]
        if not numbers:
            return {}
        own = torch.stack([norms[number].to(torch.float64).cpu() for number in numbers])
        whole = torch.linalg.vector_norm(torch.stack(group.parts(own)), norm_type, dim=0)
        return {number: norm.to(norms[number]) for number, norm in zip(numbers, whole, strict=True)}

    def first_different(
        self, parameters: Sequence[Tensor], norms: Mapping[int, Tensor], group: TensorGroup
    ) -> int | None:
        """Return the number of the first parameter that is not divided and whose gradients differ between ranks.

        Args:
            parameters: The parameters.
            norms: The norms of the gradients in this rank, by the number of the parameter.
            group: The ranks, which all call this.

        Returns:
            The number; ``None`` if all are equal to rounding.
        """
        numbers = [number for number, p in enumerate(parameters) if p not in self._part_of]
        missing = torch.tensor(-1.0)
        place = _first_different(
            [norms.get(number, missing) for number in numbers], [parameters[number].dtype for number in numbers], group
        )
        return None if place is None else numbers[place]

    def check_equal(self, weights: Mapping[str, Tensor], group: TensorGroup) -> None:
        """Check that all ranks have the same values of the parameters that are not divided. All ranks call this.

        Args:
            weights: The parameters of the model by name, with their values.
            group: The ranks.

        Raises:
            RuntimeError: If the values of a parameter differ.
        """
        names = [name for name in weights if name not in self.parts]
        norms = [_norm(weights[name]) for name in names]
        place = _first_different(norms, [weights[name].dtype for name in names], group)
        if place is not None:
            raise RuntimeError(
                f"the {self._ranks}s of {self.option} have trained {names[place]}, of which each has the whole, to "
                "different values. Code of the model or of a callback has changed gradients or weights by something "
                f"that differs between them, such as a norm of the parts of one {self._ranks} "
                "(torch.nn.utils.clip_grad_norm_): use trainer.strategy.clip_grad_norm_(max_norm)."
            )

    def _changed(
        self,
        optimizer: Optimizer,
        states: Mapping[Any, Any],
        change: Callable[[PartOfTensor, Tensor], Tensor],
        *,
        whole: bool,
    ) -> dict[Any, Any]:
        changed = dict(states)
        for number, parameter in enumerate(parameters_of(optimizer)):
            part, state = self._part_of.get(cast(nn.Parameter, parameter)), states.get(number)
            if part is None or not state:
                continue
            shape = part.whole_shape(parameter.shape, self._size) if whole else list(parameter.shape)
            changed[number] = {
                key: change(part, value.view(shape))
                if isinstance(value, Tensor) and is_by_element(value, shape)
                else value
                for key, value in state.items()
            }
        return changed


class PlannedModel(DividedModel):
    """A model whose layers are divided by a plan: tensor parallelism.

    Args:
        model: See :class:`DividedModel`.
        plan: The style of layers, by dotted name. ``*`` stands for a number.
        rank: See :class:`DividedModel`.
        size: See :class:`DividedModel`.
        copies: See :class:`DividedModel`.

    Raises:
        ValueError: If the plan does not fit the model. The model is then unchanged.
    """

    option = "tensor_parallel_size"
    _ranks = "pipeline"

    def __init__(
        self, model: nn.Module, plan: Mapping[str, str], rank: int, size: int, copies: Sequence[nn.Module] = ()
    ) -> None:
        super().__init__(model, rank, size, copies)
        self._planned_parts: dict[nn.Parameter, TensorPart] = {}
        layers = self._planned(plan)
        self._note_parts(self._planned_parts)
        self._check_sizes()
        for module, style, _ in layers:
            is_table = style.kind == "vocabulary"
            arguments = [self._first_of(module), len(cast(Tensor, module.weight))] if is_table else []
            self._undo += style.make(*arguments).install(module)
            self._resize(module, style)
        self._divide()

    def _planned(self, plan: Mapping[str, str]) -> list[tuple[nn.Module, Style, str]]:
        """Find the layers of the plan and how their parameters are divided."""
        names = {name: module for name, module in self._model.named_modules(remove_duplicate=False)}
        used: set[str] = set()
        layers: dict[nn.Module, tuple[nn.Module, Style, str]] = {}
        single: dict[nn.Module, str] = {}
        holders: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
        for name, module in names.items():
            for own, parameter in module._parameters.items():
                if parameter is not None:
                    holders.setdefault(parameter, []).append((f"{name}.{own}", module))
                    if (key := _key(f"{name}.{own}", plan)) is not None:
                        used.add(key)
                        style = _style(key, plan[key])
                        single[module] = f"{name}.{own}"
                        self._take(parameter, TensorPart(-2 if style.kind == "columns" else -1, style.packed), name)
            if (key := _key(name, plan)) is not None:
                used.add(key)
                if module not in layers:
                    style = _style(key, plan[key])
                    layers[module] = module, style, name
                    self._take_layer(module, style, name)
        if unused := sorted(plan.keys() - used):
            raise ValueError(
                f"the tensor parallel plan names {', '.join(unused)}, but {type(self._model).__name__} has no such "
                "layer or parameter. Names are those of named_modules(); * stands for a number."
            )
        for module, name in single.items():
            if module not in layers or layers[module][1].kind != "experts":
                raise ValueError(
                    f"the tensor parallel plan divides the parameter {name}, but does not say what the layer around it "
                    "does with its part. Give the layer a style: 'moe_tp_experts' for a list of experts."
                )
        for module, style, name in layers.values():
            if style.kind == "experts" and module not in single:
                raise ValueError(
                    f"the tensor parallel plan gives {name} the style 'moe_tp_experts', which sums the outputs of all "
                    "ranks, but divides none of its parameters. Divide them, or leave it out of the plan."
                )
        for parameter, places in holders.items():  # the other uses of a tied parameter
            if (part := self._planned_parts.get(parameter)) is None:
                continue
            for name, module in places:
                if module in layers or _key(name, plan) is not None:
                    continue
                if type(module) is nn.Embedding and part == TensorPart(-2):
                    _check_table(module, name.rpartition(".")[0])
                    layers[module] = module, STYLES["embedding_rowwise"], name
                else:
                    raise ValueError(
                        f"{name} is a parameter that the tensor parallel plan divides under another name, but the plan "
                        f"says nothing of {name.rpartition('.')[0]}, a {type(module).__name__}. Add it to the plan."
                    )
        return list(layers.values())

    def _take_layer(self, module: nn.Module, style: Style, name: str) -> None:
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        if style.kind in ("whole", "experts"):
            return
        is_table = isinstance(module, nn.Embedding)
        is_linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        is_conv1d = type(module).__name__ == "Conv1D" and weight is not None and weight.ndim == 2
        if weight is None or (style.kind == "vocabulary") != is_table or not (is_table or is_linear or is_conv1d):
            needed = "an nn.Embedding" if style.kind == "vocabulary" else "an nn.Linear or a Conv1D of transformers"
            raise ValueError(
                f"the tensor parallel plan divides {name}, a {type(module).__name__}, but this style needs {needed}. "
                "Leave it out of the plan: what has no plan is computed by every rank."
            )
        if isinstance(module, nn.Embedding):
            _check_table(module, name)
        outputs_first = not is_conv1d  # a Conv1D has the shape [inputs, outputs]
        dim = -2 if (style.kind != "rows") == outputs_first else -1
        self._take(weight, TensorPart(dim, style.packed), name)
        if bias is not None and style.kind == "columns":
            self._take(bias, TensorPart(-1, style.packed), name)

    def _take(self, parameter: nn.Parameter, part: TensorPart, name: str) -> None:
        if (before := self._planned_parts.setdefault(parameter, part)) != part:
            raise ValueError(
                f"the tensor parallel plan divides a parameter of {name} in two ways, in dimensions {before.dim} and "
                f"{part.dim}: it is tied to another layer. Give both the same division, or leave both out of the plan."
            )

    def _check_sizes(self) -> None:
        names: dict[nn.Parameter, str] = {}
        for name, parameter in self._model.named_parameters():
            names[parameter] = name
        for parameter, part in self._planned_parts.items():
            if parameter.is_meta:
                raise ValueError(
                    f"{names[parameter]} has no values yet. Build the model outside of configure_model and "
                    "init_module, which make it without memory."
                )
            length, pieces = parameter.shape[part.dim], self._size * part.packed
            if length % pieces:
                raise ValueError(
                    f"tensor_parallel_size={self._size} cannot divide {names[parameter]} of shape "
                    f"{list(parameter.shape)}: {length} is not a multiple of {pieces}."
                )

    def _first_of(self, module: nn.Module) -> int:
        return self._rank * cast(Tensor, module.weight).shape[0] // self._size

    def _resize(self, module: nn.Module, style: Style) -> None:
        """Set the sizes that a layer keeps beside its weights, and the entry of an embedding without gradient."""
        changes: dict[str, Any] = {}
        if isinstance(module, nn.Embedding):
            number = module.num_embeddings // self._size
            changes["num_embeddings"] = number
            if module.padding_idx is not None:
                own = module.padding_idx - self._first_of(module)
                changes["padding_idx"] = own if 0 <= own < number else None
        else:
            for name in _SIZES.get(style.kind, ()):
                if isinstance(whole := getattr(module, name, None), int):
                    changes[name] = whole // self._size
        for name, value in changes.items():
            self._undo.append(partial(setattr, module, name, getattr(module, name)))
            setattr(module, name, value)


def _check_table(table: nn.Embedding, name: str) -> None:
    if table.max_norm is not None or table.sparse or table.scale_grad_by_freq:
        raise ValueError(
            f"the tensor parallel plan divides {name}, an embedding with max_norm, scale_grad_by_freq or sparse "
            "gradients, which need the whole table. Leave it, and layers with the same weight, out of the plan."
        )


def _states(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [optimizer.state.get(parameter, {}) for parameter in parameters_of(optimizer)]


def _set_states(optimizer: Optimizer, states: Mapping[int, dict[str, Any]]) -> None:
    for parameter, state in zip(parameters_of(optimizer), states.values(), strict=True):
        if state:
            optimizer.state[parameter] = state


_left_divided: WeakSet[nn.Module] = WeakSet()
"""The models that hold parts of their weights after a run that has failed."""


def check_is_whole(model: nn.Module, *_: Any) -> None:
    """Check that a model does not hold parts of its weights after a run that has failed. A ``state_dict`` pre-hook.

    Raises:
        RuntimeError: If it does.
    """
    if model in _left_divided:
        raise RuntimeError(
            f"this {type(model).__name__} holds only a part of its weights, because the run with tensor_parallel_size "
            "or zero_stage=3 that divided them has failed. Build a new model, and load a checkpoint."
        )


_SIZES: Mapping[str, Sequence[str]] = {"columns": ("out_features", "nf"), "rows": ("in_features", "nx")}
"""The attributes with the divided size of an ``nn.Linear`` and of a ``Conv1D`` of ``transformers``, by style."""


def _norm(value: Tensor) -> Tensor:
    """Return the 2-norm of a tensor of any dtype; torch has none of integers and of ``float8``."""
    is_known = value.is_complex() or (value.is_floating_point() and value.itemsize > 1)
    return torch.linalg.vector_norm((value if is_known else value.to(torch.float64)).flatten())


def _rounding(dtype: torch.dtype) -> float:
    """Return the relative difference that rounding may cause."""
    return torch.finfo(dtype).eps ** 0.5 if dtype.is_floating_point or dtype.is_complex else 0.0


def _first_different(norms: Sequence[Tensor], dtypes: Sequence[torch.dtype], group: TensorGroup) -> int | None:
    """Return the place of the first norm that differs between ranks by more than rounding; ``None`` if none does."""
    own = torch.tensor([norm.item() for norm in norms], dtype=torch.float64)
    first, *others = group.parts(own)
    for place, dtype in enumerate(dtypes):
        for other in others:
            if not torch.isclose(first[place], other[place], _rounding(dtype), 0.0, equal_nan=True):
                return place
    return None


def _key(name: str, plan: Mapping[str, str]) -> str | None:
    """Return the key of a plan that fits a name."""
    if name in plan:
        return name
    return general if (general := with_wildcards(name)) in plan else None


def _style(name: str, style: str) -> Style:
    if style not in STYLES:
        raise ValueError(
            f"the tensor parallel plan gives {name} the style {style!r}; supported are {', '.join(STYLES)}. Leave it "
            "out of the plan, together with the layers that depend on it, and every rank computes it."
        )
    return STYLES[style]
