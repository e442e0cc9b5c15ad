"""Values of Python objects at one moment: remembered, and restored in place.

Objects keep their identity: a list gets its entries back, a tensor its values, an object its attributes. What cannot be
copied is watched, as far as that is possible, so that a change of it is known.
"""

import inspect
import io
import multiprocessing.queues
import queue
import random
import socket
import subprocess
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from enum import Enum
from functools import cache, partial
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Condition, Event, SemLock
from pathlib import PurePath
from threading import Lock, RLock
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor, nn

from strategies.common.torch_compat import num_changes

_SMALL = 4096
"""A tensor with at most this many elements is copied each time."""
_MAX_TENSOR_BYTES = 64 << 20
"""A tensor with more bytes is watched instead of copied."""
_MAX_ARRAY_BYTES = 4 << 20
"""A NumPy array with more bytes is taken as unchanged: arrays do not count their changes."""
_MAX_OBJECTS = 5000
"""An attribute that consists of more objects is taken as unchanged as long as its length is the same."""
_ATOMS_PER_OBJECT = 50
"""How many numbers or strings in a list cost as much as one other object."""

_ATOMS = {
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type, type(Ellipsis), type(NotImplemented)),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, types.MappingProxyType),
    *(types.GenericAlias, types.UnionType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, property, partial, ReferenceType),
    *(type(Lock()), type(RLock()), inspect.Signature),
}
"""Types whose objects do not change, or not in a way that matters."""
_SHARED = (
    *(threading.Thread, threading.Condition, threading.Event, threading.Semaphore, threading.Barrier, threading.local),
    *(queue.Queue, queue.SimpleQueue, Future, Executor, subprocess.Popen, socket.socket),
    *(BaseProcess, multiprocessing.queues.Queue, multiprocessing.queues.SimpleQueue, SemLock, Condition, Event),
)
"""Objects that other threads or processes use meanwhile: to put back their attributes would break them."""
_ATOMIC_BASES = (Enum, PurePath, type, np.dtype, np.generic)

_OF_MODULES = frozenset(vars(nn.Module()).keys() - {"training"})
"""Attributes with the tensors, children and hooks of a module, which the engine restores or nobody changes."""


class Remembered:
    """What objects held at one moment."""

    def __init__(self) -> None:
        self._kept: list[tuple[Callable[[Any, Any], None], Any, Any]] = []
        self._watched: list[tuple[str, Callable[[], Any], Any]] = []

    def restore(self) -> None:
        """Restore the values of every object."""
        for put_back, holder, kept in self._kept:
            put_back(holder, kept)

    def changed(self) -> list[str]:
        """Return the names of objects that have changed since, or may have, and cannot be restored."""
        return list(dict.fromkeys(name for name, look, before in self._watched if look() != before))

    def keep(self, put_back: Callable[[Any, Any], None], holder: Any, kept: Any) -> None:
        """Restore ``holder`` by ``put_back(holder, kept)``."""
        self._kept.append((put_back, holder, kept))

    def watch(self, name: str, look: Callable[[], Any]) -> None:
        """Report an object as changed if ``look()`` returns another value later."""
        self._watched.append((name, look, look()))

    @property
    def num_kept(self) -> int:
        """The number of objects that will be restored."""
        return len(self._kept)

    def forget_since(self, number: int) -> None:
        """Forget all kept objects but the first ``number``."""
        del self._kept[number:]


class RememberedValues:
    """Remembers values of objects, again and again, and copies a large tensor only if it has changed.

    Args:
        elsewhere: Tensors and modules that other code restores.
        foreign: Classes whose objects are not looked into, and not restored.
    """

    def __init__(self, elsewhere: Iterable[Tensor | nn.Module], foreign: tuple[type, ...]) -> None:
        self._elsewhere: dict[int, Any] = {id(each): each for each in elsewhere}
        self._foreign = foreign
        self._copies: dict[int, tuple[ReferenceType[Tensor], int, Tensor]] = {}
        self._large: dict[str, int] = {}
        self._is_atomic = cache(self._is_atomic_class)
        self.taken_as_unchanged: dict[str, str] = {}
        """Names of what is neither restored nor watched, and why."""

    def take(self, holders: Iterable[tuple[str, Any]], *, copies_tensors: bool = True) -> Remembered:
        """Remember objects and what they refer to.

        Args:
            holders: Each with its name. Of a module, its attributes without tensors, children and hooks.
            copies_tensors: Whether tensors are copied; otherwise they are watched.
        """
        found, seen = Remembered(), dict(self._elsewhere)
        for name, holder in holders:
            if isinstance(holder, nn.Module):
                own: dict[str, Any] = {key: value for key, value in vars(holder).items() if key not in _OF_MODULES}
                found.keep(_put_attributes_of_module, holder, own)
                children = own
            elif type(holder) is dict or not hasattr(holder, "__dict__"):
                self._walk(found, seen, name, holder, copies_tensors)
                continue
            else:
                children = dict(vars(holder))
                found.keep(_put_attributes, holder, children)
            seen[id(holder)] = holder
            for key, value in children.items():
                if type(value) not in _ATOMS:
                    self._attribute(found, seen, f"{name}.{key}", value, copies_tensors)
        return found

    def _attribute(self, found: Remembered, seen: dict[int, Any], name: str, value: Any, copies: bool) -> None:
        if self._large.get(name) == id(value):
            found.watch(name, partial(_length, value))
            return
        number = found.num_kept
        if not self._walk(found, seen, name, value, copies):
            found.forget_since(number)
            found.watch(name, partial(_length, value))
            self._large[name] = id(value)
            self.taken_as_unchanged[name] = "holds very many objects"

    def _walk(self, found: Remembered, seen: dict[int, Any], name: str, value: Any, copies: bool) -> bool:
        """Remember what an object refers to; return whether it consists of at most ``_MAX_OBJECTS`` objects."""
        waiting, num_objects = [value], 0.0
        while waiting:
            each = waiting.pop()
            cls: Any = type(each)
            if cls in _ATOMS or id(each) in seen:
                continue
            seen[id(each)] = each
            if self._is_atomic(cls):
                continue
            num_objects += 1
            if isinstance(each, Tensor):
                self._tensor(found, name, each, copies)
                continue
            num_objects += self._keep(found, name, each, waiting)
            if num_objects > _MAX_OBJECTS:
                return False
        return True

    def _is_atomic_class(self, cls: Any) -> bool:
        return issubclass(cls, (*self._foreign, *_ATOMIC_BASES))

    def _keep(self, found: Remembered, name: str, value: Any, waiting: list[Any]) -> float:
        """Remember one object and append the objects that it refers to to ``waiting``; return the cost."""
        cost, is_known = 0.0, True
        kind: Any = type(value)
        if (shared := _shared_by(value)) is not None:
            if hasattr(kind, "__next__"):
                found.watch(name, object)  # such as the iterator of a DataLoader with workers
            else:
                self.taken_as_unchanged.setdefault(name, _is_or_holds(shared))
            return cost
        if isinstance(value, dict):
            found.keep(_put_items, value, list(value.items()))
            cost = _add(waiting, value.values())
        elif isinstance(value, list | deque):
            found.keep(_put_entries, value, list(value))
            cost = _add(waiting, value)
        elif isinstance(value, set):
            found.keep(_put_members, value, set(value))
        elif isinstance(value, tuple | frozenset):
            cost = _add(waiting, value)
        else:
            is_known = self._keep_special(found, name, value)
        if hasattr(value, "__dict__"):
            found.keep(_put_attributes, value, dict(vars(value)))
            cost += _add(waiting, vars(value).values())
            is_known = True
        if names := _slots(kind):
            slots = {slot: getattr(value, slot) for slot in names if hasattr(value, slot)}
            found.keep(_put_slots, value, slots)
            cost += _add(waiting, slots.values())
            is_known = True
        if not is_known and hasattr(type(value), "__next__"):
            found.watch(name, object)  # its position cannot be read
        elif not is_known:
            self.taken_as_unchanged.setdefault(name, _is_or_holds(kind))
        return cost

    def _keep_special(self, found: Remembered, name: str, value: Any) -> bool:
        """Remember an object whose state is not in Python objects; return whether it is of a known kind."""
        if isinstance(value, np.ndarray):
            if value.nbytes > _MAX_ARRAY_BYTES:
                self.taken_as_unchanged.setdefault(name, "is or holds a NumPy array of more than 4 MiB")
            elif value.flags.writeable:
                found.keep(_put_array, value, value.copy())
        elif isinstance(value, bytearray):
            found.keep(_put_bytes, value, bytes(value))
        elif isinstance(value, torch.Generator):
            found.keep(_put_generator, value, value.get_state())
        elif isinstance(value, random.Random):
            found.keep(_put_random, value, value.getstate())
        elif isinstance(value, np.random.Generator):
            found.keep(_put_bit_generator, value.bit_generator, value.bit_generator.state)
        elif isinstance(value, np.random.RandomState):
            found.keep(_put_random_state, value, value.get_state())
        elif isinstance(value, io.IOBase):
            found.watch(name, partial(_position, value))
        else:
            return False
        return True

    def _tensor(self, found: Remembered, name: str, tensor: Tensor, copies: bool) -> None:
        if tensor.is_meta:
            return
        is_small = tensor.numel() <= _SMALL
        is_watched = not copies or (isinstance(tensor, nn.Parameter) and not is_small)
        if is_watched or tensor.numel() * tensor.element_size() > _MAX_TENSOR_BYTES:
            found.watch(name, partial(num_changes, tensor))
            return
        number = num_changes(tensor)
        known = self._copies.get(id(tensor))
        if is_small or tensor.is_inference() or known is None or known[0]() is not tensor or known[1] != number:
            copy = tensor.detach().clone()
            if not is_small:
                gone = partial(self._copies.pop, id(tensor), None)
                known = ref(tensor, lambda _: gone()), number, copy
                self._copies[id(tensor)] = known
        else:
            copy = known[2]
        found.keep(_put_values, tensor, copy)


def _shared_by(value: Any) -> type | None:
    """Return the class of a thread, queue or the like that an object is or has as an attribute."""
    for each in (value, *getattr(value, "__dict__", {}).values()):
        if isinstance(each, _SHARED):
            return type(each)
    return None


def _is_or_holds(kind: type) -> str:
    return f"is or holds a {kind.__module__}.{kind.__qualname__}"


def _add(waiting: list[Any], values: Iterable[Any]) -> float:
    """Add values that can change, or refer to what can; return the cost of those that cannot."""
    listed = list(values)
    others = {type(value) for value in listed} - _ATOMS
    if others:
        waiting += [value for value in listed if type(value) in others]
    return len(listed) / _ATOMS_PER_OBJECT


@cache
def _slots(cls: Any) -> list[str]:
    """Return the names of the slots of a class and its bases that are written in Python."""
    found: list[str] = []
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot in ("__dict__", "__weakref__"):
                continue
            is_private = slot.startswith("__") and not slot.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{slot}" if is_private else slot)
    return found


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except TypeError:
        return None


def _position(file: io.IOBase) -> Any:
    try:
        return file.closed or file.tell()
    except (OSError, ValueError):
        return None


# How values are put back


def _put_attributes_of_module(module: nn.Module, kept: Mapping[str, Any]) -> None:
    own = vars(module)
    for key in [key for key in own if key not in kept and key not in _OF_MODULES]:
        del own[key]
    own.update(kept)


def _put_attributes(holder: Any, kept: Mapping[str, Any]) -> None:
    own = vars(holder)
    for key in [key for key in own if key not in kept]:
        del own[key]
    own.update(kept)


def _put_slots(holder: Any, kept: Mapping[str, Any]) -> None:
    kind: Any = type(holder)
    for slot in _slots(kind):
        if slot in kept:
            object.__setattr__(holder, slot, kept[slot])
        elif hasattr(holder, slot):
            object.__delattr__(holder, slot)


def _put_items(holder: dict[Any, Any], kept: list[tuple[Any, Any]]) -> None:
    if len(kept) != len(holder) or any(
        key is not old or value is not before for (key, value), (old, before) in zip(holder.items(), kept, strict=True)
    ):
        kind: Any = OrderedDict if isinstance(holder, OrderedDict) else dict  # not what a subclass makes of them
        kind.clear(holder)
        for key, value in kept:
            kind.__setitem__(holder, key, value)


def _put_entries(holder: Any, kept: list[Any]) -> None:
    if isinstance(holder, deque):
        holder.clear()
        holder.extend(kept)
    else:
        list.__setitem__(holder, slice(None), kept)


def _put_members(holder: set[Any], kept: set[Any]) -> None:
    holder.clear()
    holder.update(kept)


def _put_bytes(holder: bytearray, kept: bytes) -> None:
    holder[:] = kept


def _put_array(holder: "np.ndarray[Any, Any]", kept: "np.ndarray[Any, Any]") -> None:
    holder[...] = kept


def _put_generator(holder: torch.Generator, kept: Tensor) -> None:
    holder.set_state(kept)


def _put_random(holder: random.Random, kept: Any) -> None:
    holder.setstate(kept)


def _put_bit_generator(holder: Any, kept: Any) -> None:
    holder.state = kept


def _put_random_state(holder: np.random.RandomState, kept: Any) -> None:
    holder.set_state(kept)


def _put_values(holder: Tensor, kept: Tensor) -> None:
    if holder.shape != kept.shape:
        holder.data = kept.clone()
        return
    with torch.inference_mode() if holder.is_inference() else torch.no_grad():
        holder.detach().copy_(kept)
