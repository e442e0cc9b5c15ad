"""Snapshots of a pipeline in memory, to which it can go back when workers are lost.

    number          0     3     6     9          every process has the last two, in two places
    place           0     1     0     1

Each worker writes its part into slots of which the driver is the holder (:mod:`strategies.pipeline.transport.slots`),
so that the values outlive the worker. The driver keeps its own part as copies. A recovery goes back to the
last snapshot that is complete in every process. Number ``n + 1`` is written only when ``n`` is complete everywhere, and
never over it.
"""

import pickle
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.common.stage_layers import StageLayers
from strategies.optim.restricted import taken_apart
from strategies.pipeline.stage.layers import ProcessRandomState, Seeds
from strategies.pipeline.state.mirror import plain_attributes_of
from strategies.pipeline.state.objects import canonical, pickled_alone
from strategies.pipeline.state.remote_operations import Holder
from strategies.pipeline.transport.slots import NUM_SLOTS, Slot, have_slots

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}

_FUNCTIONS = (*(type, partial), types.FunctionType, types.BuiltinFunctionType, types.MethodType)
"""Stay as they are; other objects that can be called may keep something from call to call."""

_NEVER_CHANGE = frozenset([bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device])

Restore = Callable[[], Any]
"""Gives an object the value back that it had, and returns it."""


def check_snapshots(*, devices: Sequence[torch.device], num_hosts: int = 1, are_replaced: bool = True) -> None:
    """Check that snapshots of a pipeline can be taken.

    Args:
        devices: The device of each stage.
        num_hosts: Number of hosts with stages.
        are_replaced: Whether other workers can take over from lost ones.

    Raises:
        ValueError: If they cannot.
    """
    others = [device for device in devices if device.type != "cpu"]
    reasons = {
        f"they are in memory of the driver's host, but the stages are on {num_hosts} hosts": num_hosts > 1,
        "ranks do not replace workers in this run, because its first Trainer has neither snapshot_every_n_steps nor "
        "max_restarts": not are_replaced,
        f"they are copies of stages on CPUs, but one is on {', '.join(map(str, others[:1]))}": bool(others),
        "they need files in memory (memfd_create), which only Linux has": not have_slots(),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"snapshots cannot be taken: {reason}. Leave them out (snapshot_every_n_steps=0).")


# The driver's part


@dataclass(frozen=True)
class OwnParts:
    """What the driver holds of a pipeline.

    Attributes:
        modules: The model and its copies.
        stages: The layers of each stage; those of the last one are here.
        parameters: Parameters with their values here.
        optimizers: The user's optimizers.
        seeds: Source of the layers' random numbers.
        holders: Refer to computed values on workers.
    """

    modules: Sequence[nn.Module]
    stages: Sequence[StageLayers]
    parameters: Sequence[nn.Parameter]
    optimizers: Sequence[Optimizer]
    seeds: Seeds
    holders: Sequence[Holder]


class OwnState:
    """The driver's part of one snapshot."""

    def __init__(self) -> None:
        self.number: int | None = None
        """The number of the snapshot; ``None`` if it is not whole."""
        self._memory: list[Tensor] = []
        self._num_used = 0
        self._restore: list[Restore] = []
        self._kept: dict[int, tuple[Any, Restore]] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes of the copies of tensors."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._memory)

    def forget(self) -> None:
        """Declare the snapshot not whole."""
        self.number = None

    @torch.no_grad()
    def take(self, number: int, parts: OwnParts, *, with_grads: bool) -> None:
        """Replace the snapshot by one of the present state, in the memory of the previous one."""
        self.forget()
        self._num_used, self._kept = 0, {}
        self._restore = [
            *self._of_flags(parts.modules, parts.parameters),
            *map(self._of_buffers, dict.fromkeys(module for model in parts.modules for module in model.modules())),
            *map(self._of_told, (module for stage in parts.stages[:-1] for module in stage.modules())),
            *map(self._of_attributes, parts.stages[-1].modules()),
            *map(self._of_optimizer, parts.optimizers),
            *(self._of_parameter(parameter, with_grads) for parameter in parts.parameters),
            *map(_of_holder, parts.holders),
            _of_seeds(parts.seeds),
            ProcessRandomState().restore,
        ]
        del self._memory[self._num_used :]
        self._kept = {}
        self.number = number

    @torch.no_grad()
    def restore(self) -> None:
        """Restore all values of the snapshot; may be called several times."""
        for restore in self._restore:
            restore()

    def _copied(self, tensor: Tensor) -> Tensor:
        """Return a copy, in the memory that the same copy took in the snapshot before, if it fits."""
        place, self._num_used = self._num_used, self._num_used + 1
        tensor = tensor.detach()
        before = self._memory[place] if place < len(self._memory) else None
        if before is None or (before.shape, before.dtype, before.stride()) != (
            tensor.shape,
            tensor.dtype,
            tensor.stride(),
        ):
            before = tensor.clone()
            self._memory[place : place + 1] = [before]
        else:
            before.copy_(tensor)
        return before

    def _of_flags(self, modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> list[Restore]:
        flags = {p: p.requires_grad for p in (*(p for model in modules for p in model.parameters()), *parameters)}

        def restore() -> None:
            for parameter, flag in flags.items():
                if parameter.requires_grad != flag:
                    parameter.requires_grad_(flag)

        return [restore]

    def _of_parameter(self, parameter: nn.Parameter, with_grad: bool) -> Restore:
        value = self._copied(parameter)
        grad = self._copied(parameter.grad) if with_grad and parameter.grad is not None else None

        def restore() -> None:
            parameter.detach().copy_(value)
            parameter.grad = None if grad is None else grad.clone()

        return restore

    def _of_buffers(self, module: nn.Module) -> Restore:
        own = {name: self._keep(b) for name, b in module._buffers.items() if b is None or not b.is_meta}

        def restore() -> None:
            for name in [n for n, b in module._buffers.items() if (b is None or not b.is_meta) and n not in own]:
                del module._buffers[name]
            module._buffers.update({name: value() for name, value in own.items()})

        return restore

    def _of_told(self, module: nn.Module) -> Restore:
        """Keep the plain attributes of a layer whose original is on a worker."""
        names, attributes = frozenset(vars(module)), plain_attributes_of(module)

        def restore() -> None:
            for name in vars(module).keys() - names:
                del vars(module)[name]
            vars(module).update(attributes)

        return restore

    def _of_attributes(self, module: nn.Module) -> Restore:
        own = {name: self._keep(value) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}

        def restore() -> None:
            for name in vars(module).keys() - own.keys() - _OF_EVERY_MODULE:
                del vars(module)[name]
            vars(module).update({name: value() for name, value in own.items()})

        return restore

    def _of_optimizer(self, optimizer: Optimizer) -> Restore:
        own = {name: self._keep(value) for name, value in taken_apart(optimizer)[1].items()}

        def restore() -> None:
            for name in taken_apart(optimizer)[1].keys() - own.keys():
                del vars(optimizer)[name]
            vars(optimizer).update({name: value() for name, value in own.items()})

        return restore

    def _keep(self, value: Any) -> Restore:
        """Return a function that returns ``value`` as it is now: the same object where that is possible.

        What cannot be copied, such as functions, modules and objects that contain modules, stays as it is.
        """
        if type(value) in _NEVER_CHANGE or isinstance(value, (*_FUNCTIONS, nn.Module, nn.Parameter)):
            return lambda: value
        if id(value) in self._kept:
            return self._kept[id(value)][1]
        restore = self._kept_object(value)
        self._kept[id(value)] = value, restore
        return restore

    def _kept_object(self, value: Any) -> Restore:
        if isinstance(value, Tensor):
            return self._kept_tensor(value)
        kind = type(value)
        if kind is tuple:
            items = [self._keep(item) for item in value]
            return lambda: tuple(item() for item in items)
        if kind in (list, deque):
            items = [self._keep(item) for item in value]

            def restore_list() -> Any:
                own = [item() for item in items]
                value.clear()
                value.extend(own)
                return value

            return restore_list
        if kind in (dict, OrderedDict, defaultdict):
            entries = [(key, self._keep(item)) for key, item in value.items()]

            def restore_dict() -> Any:
                own = [(key, item()) for key, item in entries]
                value.clear()
                value.update(own)
                return value

            return restore_dict
        blob = pickled_alone(value)
        if blob is None:
            return lambda: value
        form = canonical(value)

        def restore_object() -> Any:
            return value if canonical(value) == form else pickle.loads(blob)

        return restore_object

    def _kept_tensor(self, tensor: Tensor) -> Restore:
        if tensor.is_meta or tensor.grad_fn is not None:
            return lambda: tensor  # the result of a forward pass, or a stand-in
        copy = self._copied(tensor)

        def restore() -> Tensor:
            if tensor.is_inference():
                return copy.clone()
            tensor.detach().copy_(copy)
            return tensor

        return restore


def _of_holder(holder: Holder) -> Restore:
    known = frozenset(holder.referenced)
    return lambda: holder.free_others(known)


def _of_seeds(seeds: Seeds) -> Restore:
    state = seeds.state_dict()
    return lambda: seeds.load_state_dict(state)


# Of all processes


@dataclass(frozen=True)
class Whole:
    """A snapshot that every process has.

    Attributes:
        number: Its number.
        place: Which of the two slots has it.
    """

    number: int
    place: int


class Snapshots:
    """The last two snapshots of a pipeline.

    Args:
        num_workers: Number of workers.
    """

    def __init__(self, num_workers: int) -> None:
        self.slots = [[Slot.created(f"{i}-{place}") for i in range(num_workers)] for place in range(NUM_SLOTS)]
        """At each place, the slot of each worker."""
        self._own = [OwnState() for _ in range(NUM_SLOTS)]
        self._ordered: Whole | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of memory on all processes."""
        return sum(slot.size_bytes for slots in self.slots for slot in slots) + sum(own.size_bytes for own in self._own)

    @property
    def is_under_way(self) -> bool:
        """Whether some process may still be writing the last snapshot that was ordered."""
        return self._ordered is not None and self._number_at(self._ordered.place) != self._ordered.number

    def order(self, number: int) -> Whole:
        """Return where the next snapshot is to be written, by the driver and by the workers.

        Raises:
            ValueError: If the number is not larger than that of the last one.
        """
        last = -1 if self._ordered is None else self._ordered.number
        if number <= last:
            raise ValueError(f"the number of a snapshot must be at least {last + 1}, got {number}")
        whole = self.last()
        self._ordered = Whole(number, 0 if whole is None else 1 - whole.place)
        self._own[self._ordered.place].forget()
        return self._ordered

    def take_own(self, ordered: Whole, parts: OwnParts, *, with_grads: bool) -> None:
        """Take the driver's part of a snapshot."""
        self._own[ordered.place].take(ordered.number, parts, with_grads=with_grads)

    def whole(self) -> list[Whole]:
        """Return the snapshots that every process has whole, in order."""
        found = [(self._number_at(place), place) for place in range(NUM_SLOTS)]
        whole = [Whole(number, place) for number, place in found if number is not None]
        return sorted(whole, key=lambda each: each.number)

    def last(self) -> Whole | None:
        """Return the last snapshot that every process has whole; ``None`` if there is none."""
        return next(reversed(self.whole()), None)

    def go_back(self, whole: Whole) -> None:
        """Forget the other snapshot; call this when no worker writes any more."""
        self._ordered, other = whole, 1 - whole.place
        self._own[other].forget()
        for slot in self.slots[other]:
            slot.forget()

    def restore_own(self, whole: Whole) -> None:
        """Restore the driver's part."""
        self._own[whole.place].restore()

    def close(self) -> None:
        """Release the memory; call this when no worker writes any more."""
        for slots in self.slots:
            for slot in slots:
                slot.close()

    def _number_at(self, place: int) -> int | None:
        """The number of the snapshot that all processes have at a place; ``None`` if there is none."""
        numbers = {self._own[place].number, *(slot.number for slot in self.slots[place])}
        return numbers.pop() if len(numbers) == 1 else None
