"""ZeRO stage 3: a model whose parameters, gradients and optimizer states are divided by rows among the ranks.

``torch.distributed.fsdp.fully_shard`` gathers the parameters of a block before the block runs and releases them
afterwards, in the forward pass and again in the backward pass, which also reduces their gradients to rows::

    forward    gather ─▶ block 0 ─▶ release    gather ─▶ block 1 ─▶ release    ...
    backward   ...    gather ─▶ block 1 ─▶ reduce, release    gather ─▶ block 0 ─▶ reduce, release

The blocks are the entries of the model's lists of layers. All other parameters are one more unit, the root, whose
parameters stay gathered from the start of a training step to the end of its backward pass.
"""

from binascii import crc32
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from strategies.common.torch_compat import (
    broadcast_coalesced,
    compiled_call,
    gradient_hooks,
    undo_fully_shard,
)
from strategies.common.transformers_compat import lists_of_blocks
from strategies.sharding.initialise import give_values, note_lost_values, only_in_checkpoints
from strategies.sharding.rows import gather_rows, own_rows

_BROADCAST_BYTES = 250 * 2**20
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward method, whose entries are called one by one."""


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model whose parameters are gathered together, by path.

    These are the entries of the lists of blocks that a Hugging Face model names in ``_no_split_modules``. For other
    models, they are the entries of every ``nn.ModuleList`` and ``nn.Sequential``, except for lists inside such an
    entry. A block that shares a parameter or a module with another part of the model is left out, since only one unit
    can hold the parameter.
    """
    paths = lists_of_blocks(model)
    if not paths:
        for path, module in model.named_modules():
            is_inside = any(path.startswith(f"{outer}.") for outer in paths)
            if path and not is_inside and type(module) in (nn.ModuleList, nn.Sequential):
                paths.append(path)
    found: dict[str, nn.Module] = {}
    for path in paths:
        found.update(_entries(path, model.get_submodule(path)))
    places: dict[Tensor, int] = {}
    for module in _with_repetitions(model):
        for parameter in module._parameters.values():
            if parameter is not None:
                places[parameter] = places.get(parameter, 0) + 1
    return {path: block for path, block in found.items() if _has_its_own(block, places)}


def _entries(path: str, module: nn.Module) -> dict[str, nn.Module]:
    entries: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        own = f"{path}.{name}"
        entries.update(_entries(own, child) if isinstance(child, _CONTAINERS) else {own: child})
    return entries


def _with_repetitions(model: nn.Module) -> list[nn.Module]:
    return [module for _, module in model.named_modules(remove_duplicate=False)]


def _has_its_own(block: nn.Module, places: Mapping[Tensor, int]) -> bool:
    """Return whether a block has parameters, and no other part of the model uses one of them."""
    inside: dict[Tensor, int] = {}
    for module in _with_repetitions(block):
        for parameter in module._parameters.values():
            if parameter is not None:
                inside[parameter] = inside.get(parameter, 0) + 1
    return bool(inside) and all(places[parameter] == number for parameter, number in inside.items())


def check_model(model: nn.Module) -> None:
    """Check that the parameters of a model can be divided by rows.

    Raises:
        ValueError: If they cannot be divided.
    """
    units = {**find_blocks(model), "": model}
    taken: set[Tensor] = set()
    for path, unit in units.items():
        where = path or "the part outside of its blocks"
        own = {name: p for name, p in unit.named_parameters(path) if p not in taken}
        taken.update(own.values())
        for name, parameter in own.items():
            if reason := _reason(parameter):
                raise ValueError(f"stage=3 cannot divide parameter {name} of {type(model).__name__} by rows: {reason}.")
        dtypes = {p.dtype: name for name, p in own.items() if p.requires_grad}
        if len(dtypes) > 1:
            listed = ", ".join(f"{name} ({dtype})" for dtype, name in dtypes.items())
            raise ValueError(
                f"stage=3 sends the gradients of a block together, but {where} of {type(model).__name__} has trained "
                f"parameters of several types: {listed}. Give them one type, or use stage=2."
            )
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise ValueError(
                f"fully_shard has already been applied to {name or type(model).__name__}. Leave it out: stage=3 calls "
                "it. If the model is from an earlier run that kept its parameters divided or failed, build a new model "
                "and load a checkpoint."
            )
        if compiled_call(module) is not None or name.rpartition(".")[2] == "_orig_mod":
            raise ValueError(
                f"{name or type(model).__name__} is compiled, but stage=3 gathers parameters in hooks that compiled "
                "code does not call. Leave out torch.compile, or use stage=2."
            )


def _check_same_model(model: nn.Module, group: ProcessGroup) -> None:
    """Check that all ranks have the same parameters, which may be on the ``meta`` device."""
    described = crc32(repr([(name, p.shape, p.dtype) for name, p in model.named_parameters()]).encode())
    table = torch.tensor([described, -described])
    dist.all_reduce(table, dist.ReduceOp.MAX, group=group)
    if table[0] != -table[1]:
        raise ValueError(
            f"the parameters of {type(model).__name__} differ between ranks in name, shape or type. Build the same "
            "model on every rank."
        )


def _reason(parameter: Tensor) -> str:
    """Return why a parameter cannot be divided by rows, or an empty string."""
    if is_lazy(parameter):
        return "it has no shape yet, because its layer is lazy; run a batch through the model before fit"
    if parameter.ndim == 0:
        return "it is a scalar; give it the shape [1], or use stage=2"
    if parameter.requires_grad and not parameter.numel():
        return "it has no elements, and its gradient cannot be reduced; freeze it, or use stage=2"
    if not parameter.is_contiguous():
        return "its memory is not contiguous; assign parameter.data.contiguous() to it"
    if any(gradient_hooks(parameter)):
        return "it has gradient hooks, which would be lost; use stage=2"
    if parameter.is_complex():
        return "it is complex; use stage=2"
    return ""


class ShardedModel:
    """A model whose parameters are divided by rows.

    While the model is divided, its parameters are ``DTensor`` objects outside of passes. :meth:`gather` restores the
    original parameter objects, with whole values.

    Args:
        model: The model, with the same parameters on every rank. All ranks get the values of rank 0.
        group: The ranks, on the backend of the device.
        host_group: The same ranks, on gloo.
        device: The device of this rank.
        find_unused: Backward passes may leave out parameters, and these may differ between ranks.

    Raises:
        ValueError: If the model cannot be divided. It is then unchanged. Also a call of the model raises it, if a
            checkpoint was to give values to a tensor and has not been loaded.
    """

    def __init__(
        self,
        model: nn.Module,
        group: ProcessGroup,
        host_group: ProcessGroup,
        *,
        device: torch.device,
        find_unused: bool,
    ) -> None:
        check_model(model)
        lacking = only_in_checkpoints(model)
        _check_same_model(model, host_group)
        self.model, self.is_divided = model, True
        self._find_unused, self._host_group = find_unused, host_group
        self._group, self._mesh = group, DeviceMesh.from_group(group, device.type)
        self._classes: dict[nn.Module, type[nn.Module]] = {}
        self._slots: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._sharded: dict[Tensor, DTensor] = {}
        """The divided parameter of each original parameter."""
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self._marks: list[RemovableHandle] = []
        self._reached: set[Tensor] = set()
        self._had_gradient: set[Tensor] = set()
        self._calls: list[int] = []
        self._depth, self._in_training_step = 0, False
        self._lacking = lacking
        """Why tensors have no values until a checkpoint is loaded, by name."""
        for number, unit in enumerate([*find_blocks(model).values(), model]):
            self._shard(unit, number, device)
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        cast(FSDPModule, model).set_reduce_scatter_unused_params(True)  # ranks send gradients of the same sizes
        self._marks += [
            model.register_forward_pre_hook(self._begin_call),
            model.register_forward_hook(self._end_call, always_call=True),
        ]

    # Dividing and gathering

    def _shard(self, unit: nn.Module, number: int, device: torch.device) -> None:
        modules = [module for module in unit.modules() if module not in self._classes]
        give_values(self.model, modules, device)
        self._classes.update({module: type(module) for module in modules})
        slots = [
            (module, name, parameter)
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        buffers = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
        tensors = list(dict.fromkeys([*(parameter for *_, parameter in slots), *buffers]))
        for tensor in tensors:
            tensor.data = tensor.data.to(device)
        if tensors:
            broadcast_coalesced(self._group, [tensor.detach() for tensor in tensors], _BROADCAST_BYTES, 0)
        fully_shard(unit, mesh=self._mesh)
        for module, name, original in slots:
            divided = cast(DTensor, module._parameters[name])
            vars(divided).update(vars(original))
            self._sharded[original] = divided
            original.data = original.data.new_empty(0)
        self._slots += slots
        self._marks.append(unit.register_forward_pre_hook(partial(self._enter, number, slots)))

    def gather(self) -> None:
        """Restore the model's original parameters, with whole values. Every rank calls this."""
        for divided in self._sharded.values():
            divided.grad = None  # makes room for whole values
        for original, divided in self._sharded.items():
            whole = cast(DTensor, divided.detach()).full_tensor()
            has_padding = whole.untyped_storage().nbytes() > whole.nbytes
            original.data = whole.clone() if has_padding else whole
        self._restore()

    def give_up(self) -> None:
        """Restore the model's original parameters, without values, after a rank has failed."""
        self._restore()
        lost = {
            original: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad)
            for original, p in self._sharded.items()
        }
        for module, name, original in self._slots:
            module._parameters[name] = lost[original]
        note_lost_values(self.model)

    def _restore(self) -> None:
        self.is_divided = False
        for unit in self._classes:
            if isinstance(unit, FSDPModule):
                unit.reshard()
        for original, divided in self._sharded.items():
            original.requires_grad_(divided.requires_grad)
            original.grad = None
        for module, name, original in self._slots:
            module._parameters[name] = original
        for mark in self._marks:
            mark.remove()
        for hook in self._hooks.values():
            hook.remove()
        for module, cls in self._classes.items():
            undo_fully_shard(module, cls)

    def is_from(self, made: Container[int]) -> bool:
        """Return whether all original parameters are among the objects with these ids."""
        return all(id(original) in made for original in self._sharded)

    @property
    def parameters(self) -> dict[str, DTensor]:
        """The divided parameters, by each of their names in the model's state dict."""
        return {name: p for name, p in self.model.state_dict().items() if isinstance(p, DTensor)}

    @property
    def originals(self) -> dict[Tensor, Tensor]:
        """The original parameter of each divided parameter."""
        return {divided: original for original, divided in self._sharded.items()}

    def reshard(self) -> None:
        """Release the parameters of the root, so that the model has its divided parameters."""
        cast(FSDPModule, self.model).reshard()

    # Passes

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Context in which the root's parameters stay gathered after a call of the model, for the backward pass."""
        self._in_training_step = True
        try:
            yield
        finally:
            self._in_training_step = False

    def _begin_call(self, *args: Any) -> None:
        self._depth += 1
        for reason in self._lacking.values():
            raise ValueError(reason)

    def _end_call(self, *args: Any) -> None:
        """Release the parameters of the root at the end of the outermost call: changes of them would be lost."""
        self._depth -= 1
        if not self._depth and not self._in_training_step:
            self.reshard()

    def _enter(self, number: int, slots: Iterable[tuple[nn.Module, str, nn.Parameter]], *args: Any) -> None:
        """Note that a unit runs, and which of its parameters will get a gradient."""
        if not torch.is_grad_enabled():
            return
        self._calls.append(number)
        for module, name, original in slots:
            gathered = module._parameters[name]
            if gathered is not None and gathered.requires_grad and gathered not in self._hooks:
                self._hooks[gathered] = gathered.register_post_accumulate_grad_hook(
                    lambda _, original=original: self._reached.add(original)
                )

    def before_backward(self) -> None:
        """Start to note which parameters get a gradient."""
        self._reached.clear()
        self._had_gradient = {p for p in self._sharded.values() if p.grad is not None}

    def after_backward(self) -> None:
        """Check that the ranks have run the same blocks, and that no parameter was left out unless it may be.

        Raises:
            RuntimeError: If they have not, or if a parameter was left out.
        """
        calls, self._calls = hash(tuple(self._calls)) % 2**31, []
        trained = [(original, p) for original, p in self._sharded.items() if p.requires_grad]
        missing = [p for original, p in trained if original not in self._reached]
        facts = [
            calls,
            -calls,
            *([int(original in self._reached) for original, _ in trained] if self._find_unused else []),
        ]
        table = torch.tensor(facts)
        dist.all_reduce(table, dist.ReduceOp.MAX, group=self._host_group)
        if table[0] != -table[1]:
            raise RuntimeError(
                "the ranks have not run the same blocks of the model in the same order, so they have gathered the "
                "wrong parameters. Under stage=3 a model may not choose its blocks by the data of a rank; use stage=2."
            )
        if missing and not self._find_unused:
            names = sorted(self._names[p] for p in missing)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise RuntimeError(
                f"the backward pass gave no gradient to {', '.join(names[:3])}{more}. If parameters are left out on "
                "purpose, use ZeROStrategy(find_unused_parameters=True)."
            )
        for (_, parameter), is_reached in zip(trained, table[2:].tolist(), strict=False):
            if not is_reached and parameter not in self._had_gradient:
                parameter.grad = None  # a zero would let weight decay change it

    # State dicts

    def with_rows(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict to load, in which this rank's rows replace the parameters.

        Tensors in the state dict no longer count as lacking values.

        Args:
            state: The state dict of the whole model. Its tensors may already be divided.
        """
        result = dict(state)
        self._lacking = {name: reason for name, reason in self._lacking.items() if name not in state}
        for name, p in self.parameters.items():
            whole = state.get(name)
            if isinstance(whole, Tensor) and whole.shape == p.shape:
                is_divided, rank, size = isinstance(whole, DTensor), self._group.rank(), self._group.size()
                rows = cast(DTensor, whole).to_local() if is_divided else own_rows(whole, p.shape, rank, size)
                result[name] = divided_by_rows(rows.to(p.device), p.shape, p.device_mesh)
        return result

    def whole_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Gather a state dict of the model in the host memory of rank 0, tensor by tensor. Every rank calls this.

        Returns:
            On rank 0 the state dict of one process; on all other ranks a state dict whose tensors have no values.
        """
        gathered: dict[tuple[int, torch.Size], Tensor] = {}  # tied parameters are one tensor, under several names
        for name, value in state.items():
            if not isinstance(value, DTensor):
                continue
            part = value.to_local()
            key = part.data_ptr(), value.shape
            if key not in gathered or not part.numel():
                whole = gather_rows(part, value.shape, value.shape, self._host_group)
                bare = torch.empty(value.shape, dtype=value.dtype, device="meta")
                gathered[key] = bare if whole is None else whole
            state[name] = gathered[key]
        return state


def divided_by_rows(rows: Tensor, shape: torch.Size, mesh: DeviceMesh) -> DTensor:
    """Return a ``DTensor`` of a given shape, of which this rank has ``rows``."""
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=strides)
