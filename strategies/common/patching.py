"""Temporary changes of objects."""

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from strategies.common.torch_compat import num_changes

_CONTAINERS = (list, dict, OrderedDict, set)


def replaced(holder: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method of one object. Returns a function that restores it."""
    own = vars(holder)
    had, before = name in own, own.get(name)
    own[name] = method

    def undo() -> None:
        if had:
            own[name] = before
        else:
            own.pop(name, None)

    return undo


@contextmanager
def unchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context at whose end modules are as they were before.

    Restores attributes, the entries of lists, dicts and sets in attributes, the values of tensors, and the states of
    random number generators. Within the context, copies replace the buffers. Parameters are not restored.
    """
    attributes = [(module, dict(vars(module))) for module in modules]
    values = [value for _, before in attributes for value in before.values()]
    entries = [(container, type(container)(container)) for container in _containers_in(values)]
    tensors = [
        (value, value.detach().clone(), num_changes(value))
        for value in values
        if type(value) is Tensor and not value.is_meta
    ]
    generators = [restore for value in values if (restore := _restoring_generator(value)) is not None]
    copies: dict[int, Tensor] = {}
    try:
        for module, _ in attributes:
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())
        yield
    finally:
        for module, before in attributes:
            vars(module).clear()
            vars(module).update(before)
        for container, kept in entries:
            if isinstance(container, list):
                container[:] = kept
            else:
                container.clear()
                container.update(kept)
        for restore in generators:
            restore()
        with torch.no_grad():
            for value, kept_value, number in tensors:
                if num_changes(value) != number:
                    value.copy_(kept_value)


def _restoring_generator(value: Any) -> Callable[[], Any] | None:
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


def _containers_in(values: Iterable[Any]) -> list[Any]:
    """Return the lists, dicts and sets among values and nested in them, each once."""
    found: dict[int, Any] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if type(value) in _CONTAINERS and id(value) not in found:
            found[id(value)] = value
            waiting += value.values() if isinstance(value, dict) else value
    return list(found.values())
