"""Temporary changes of objects."""

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from operator import is_
from pathlib import Path
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from strategies.common.torch_compat import is_lazy, num_changes

Restore = Callable[[], Any]
"""Restores what an object held when the function was made."""

_CONTAINERS = (list, deque, set, OrderedDict, dict, CellType)

_PLAIN = {int, float, bool, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size, nn.Parameter}
"""Types of values that refer to nothing that can change, or are not followed. The others take longer to tell apart."""

_LIBRARIES = {
    *("strategies", "trainer", "torch", "numpy"),
    *("pytorch_lightning", "lightning", "lightning_fabric", "lightning_utilities"),
}
"""Packages whose functions and objects are not followed. Those of Relay change on purpose while modules run again."""


ABSENT = object()
"""Stands for the value of an entry that does not exist."""


def set_entry(entries: dict[str, Any], name: str, value: Any) -> None:
    """Set an entry, or remove it if the value is :data:`ABSENT`."""
    if value is ABSENT:
        entries.pop(name, None)
    else:
        entries[name] = value


def replaced(holder: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method of one object. Returns a function that restores it."""
    own = vars(holder)
    before = own.get(name, ABSENT)
    own[name] = method
    return partial(set_entry, own, name, before)


@contextmanager
def unchanged(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter] = ()) -> Iterator[None]:
    """Context at whose end modules are as they were before, and so is what their code can reach from their attributes.

    Restores the attributes of the modules and of objects of user code, the entries of lists, dicts, sets and deques,
    the variables that functions of user code share with the code around them, the values of tensors and NumPy arrays,
    and the states of random number generators. Within the context, copies replace the buffers and the values of the
    given parameters. The values of other parameters are not restored. A lazy module keeps what its first call makes of
    it.
    """
    whole = list(modules)
    listed = [m for m in whole if not any(map(is_lazy, [*m.parameters(recurse=False), *m.buffers(recurse=False)]))]
    buffers = [module._buffers for module in listed]
    packages = {_package_of(type(module).__module__) for module in listed}
    restores = _saved_all([vars(module) for module in listed], buffers, packages)
    apart = {*whole}.difference(listed) | {m for m in listed if isinstance(m, torch.jit.ScriptModule)}
    restores += [partial(setattr, module, "training", module.training) for module in apart]
    copies: dict[int, Tensor] = {}
    values = {p: p.data for p in parameters if not (is_lazy(p) or p.is_inference())}
    try:
        for parameter, before in values.items():
            parameter.data = before.clone()  # also for code that changes ``parameter.data``, which counts no change
        for of_module in buffers:
            for name, buffer in of_module.items():
                if buffer is not None and not buffer.is_meta:
                    restores.append(partial(of_module.__setitem__, name, buffer))  # a ScriptModule makes its dict anew
                    of_module[name] = copies.setdefault(id(buffer), buffer.detach().clone())
        yield
    finally:
        for restore in restores:
            restore()
        for parameter, before in values.items():
            parameter.data = before


def saved_attributes(holder: Any) -> list[Restore]:
    """Return functions that restore the attributes of an object, and the containers and generators among them."""
    own = vars(holder)
    values = [own, *(value for value in own.values() if not isinstance(value, Tensor | numpy.ndarray))]
    return [restore for value in values if (restore := _saved(value, ())[0]) is not None]


def _saved_all(roots: Iterable[Any], leaves: Iterable[Any], packages: Collection[str]) -> list[Restore]:
    """Return functions that restore the roots, the leaves, and everything that the roots refer to.

    What the leaves refer to is not restored.

    Args:
        roots: Objects.
        leaves: Objects.
        packages: Packages that are user code even if they are installed.
    """
    found: dict[int, Any] = {id(leaf): leaf for leaf in leaves}  # holds the values, so that no id is used again
    restores = [restore for leaf in found.values() if (restore := _saved(leaf, packages)[0]) is not None]
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        if type(value) not in _PLAIN and id(value) not in found:
            restore, referents = _saved(value, packages)
            if restore is not None:
                restores.append(restore)
            if restore is not None or referents:
                found[id(value)] = value
                waiting += referents
    return restores


def _saved(value: Any, packages: Collection[str]) -> tuple[Restore | None, list[Any]]:
    """Return a function that restores a value, or ``None`` if it cannot change, and the values that it refers to."""
    kind = type(value)
    if issubclass(kind, _CONTAINERS):
        base = next(base for base in _CONTAINERS if issubclass(kind, base))
        items = _contents(base, value)
        return partial(_restore_contents, base, value, items), items + _attributes(value, packages)
    if issubclass(kind, tuple):
        return None, [*tuple.__iter__(value), *_attributes(value, packages)]
    if kind is Tensor and not value.is_meta:
        return partial(_restore_tensor, value, value.detach().clone(), num_changes(value)), []
    if kind is numpy.ndarray and value.flags.writeable:
        return partial(numpy.copyto, value, value.copy()), []
    if kind is MethodType:
        return None, [value.__self__]
    if kind is FunctionType:
        held = [value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)]
        return None, held if _is_user_code(value, packages) else []
    if issubclass(kind, partial):
        return None, [value.func, *([value.args, value.keywords] if _is_user_code(value.func, packages) else [])]
    return _restoring_generator(value), _attributes(value, packages)


def _attributes(value: Any, packages: Collection[str]) -> list[Any]:
    """Return the dict with the attributes of an object of user code, in a list; an empty list for any other object."""
    kind = type(value)
    if not kind.__dictoffset__ or issubclass(kind, type | ModuleType) or not _is_user_code(kind, packages):
        return []
    return [vars(value)]


def _is_user_code(made: Any, packages: Collection[str]) -> bool:
    """Return whether a function, a method, a class, or the class of any other object is user code.

    User code is neither from the standard library, nor from an installed package other than ``packages``, nor from one
    of ``_LIBRARIES``. It has no base class from the latter.
    """
    made = made.__func__ if isinstance(made, MethodType) else made
    if isinstance(made, FunctionType):
        names = [made.__globals__.get("__name__")]  # decorators change ``__module__``
    else:
        made = made if isinstance(made, type) else type(made)
        names = [base.__module__ for base in made.__mro__]
    own, *bases = map(_package_of, names)
    if own in sys.stdlib_module_names:
        return made is SimpleNamespace
    return _LIBRARIES.isdisjoint([own, *bases]) and (own in packages or not _is_installed(own))


def _package_of(name: Any) -> str:
    return str(name).partition(".")[0]


@cache
def _is_installed(package: str) -> bool:
    """Return whether a package is in a directory of installed packages."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return file is not None and not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _contents(base: Any, container: Any) -> list[Any]:
    """Return the items of a container; for a dict, each key before its value."""
    if base is CellType:
        try:
            return [container.cell_contents]
        except ValueError:  # the variable has no value
            return []
    return [*chain.from_iterable(base.items(container))] if issubclass(base, dict) else [*base.__iter__(container)]


def _restore_contents(base: Any, container: Any, before: list[Any]) -> None:
    """Restore the items of a container by methods of ``base``, because a subclass may forbid them."""
    now = _contents(base, container)
    if len(now) == len(before) and all(map(is_, now, before)):
        return
    if base is CellType:
        del container.cell_contents
        for item in before:
            container.cell_contents = item
        return
    base.clear(container)
    if issubclass(base, dict):
        for key, item in zip(before[::2], before[1::2], strict=True):
            base.__setitem__(container, key, item)
    else:
        (base.update if base is set else base.extend)(container, before)


def _restore_tensor(tensor: Tensor, before: Tensor, number: int) -> None:
    # An inference tensor has no count of its changes, and changes in inference mode only.
    may_differ = torch.is_inference_mode_enabled() if tensor.is_inference() else num_changes(tensor) != number
    if may_differ:
        with torch.no_grad():
            tensor.copy_(before)


def _restoring_generator(value: Any) -> Restore | None:
    """Return a function that restores the current state of a random number generator; ``None`` for any other value."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, numpy.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return partial(value.set_state, value.get_state())
    return None
