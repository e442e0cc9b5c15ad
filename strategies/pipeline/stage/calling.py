"""How ``Pipe`` calls layers: what one layer returns is what the next one is called with.

    returned      next layer's forward takes       call
    tuple (a, b)  several arguments, or both ways  layer(a, b)
    tuple (a, b)  one argument only                layer((a, b))  as in nn.Sequential
    list [a, b]   several arguments only           layer(a, b)    as the original Pipe did between partitions
    list [a, b]   one argument, or both ways       layer([a, b])  as in nn.Sequential

The layers of an ``nn.Sequential`` within the module are called by the same rules.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

from torch import nn

from strategies.common.torch_compat import is_compiled_in_place
from strategies.pipeline.stage.layers import Before

CallLayer = Callable[[nn.Module, Any], Any]
"""Takes a layer and the output of the layer before it; returns the output of the layer."""


def call_with_one(layer: nn.Module, value: Any) -> Any:
    """Calls a layer with one argument, as ``nn.Sequential`` does."""
    return layer(value)


def call_partition(layers: nn.Sequential, value: Any, before: Before) -> Any:
    """Calls a partition of a ``Pipe``, hooks on it included."""
    return _called_as(layers, partial(_through, layers, before), arguments(layers, value))


def call_layer(layer: nn.Module, value: Any) -> Any:
    """Calls a layer as ``Pipe`` does."""
    return _call(layer, arguments(layer, value))


def arguments(layer: nn.Module, value: Any) -> tuple[Any, ...]:
    """The positional arguments with which a layer is called, given what the one before it returned."""
    if not isinstance(value, tuple | list):
        return (value,)
    taker: nn.Module = layer
    while _is_plain_sequential(taker) and len(taker) > 0:
        taker = taker[0]
    several, one = _takes(taker, len(value)), _takes(taker, 1)
    unpacked = several or not one if isinstance(value, tuple) else several and not one
    return tuple(value) if unpacked else (value,)


def _through(layers: nn.Sequential, before: Before, *inputs: Any) -> Any:
    """Calls the first layer with ``inputs``, and each other one with what the one before it returned."""
    value: Any = inputs[0] if len(inputs) == 1 else inputs
    for place, layer in enumerate(layers):
        given = inputs if place == 0 else arguments(layer, value)
        before(place, given)
        value = _call(layer, given)
    return value


def _call(layer: nn.Module, given: tuple[Any, ...]) -> Any:
    if _is_plain_sequential(layer):
        return _called_as(layer, partial(_through, layer, _nothing), given)
    return layer(*given)


def _nothing(place: int, given: Any) -> None:
    """What is done before a layer of an inner ``nn.Sequential``."""


def _called_as(layers: nn.Sequential, forward: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """Calls ``layers``, so that hooks on it run, with another ``forward`` than that of ``nn.Sequential``."""
    vars(layers)["forward"] = forward
    try:
        return layers(*given)
    finally:
        vars(layers).pop("forward", None)


def _is_plain_sequential(layer: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether its layers can be called one by one; what ``layer.compile()`` has compiled is called as a whole."""
    own = _forward_of(layer) is nn.Sequential.forward and "forward" not in vars(layer)
    return own and not is_compiled_in_place(layer)


def _takes(layer: nn.Module, number: int) -> bool:
    """Whether ``forward`` can be called with so many positional arguments; also if that cannot be told."""
    function = _forward_of(layer)
    if "forward" in vars(layer) or not isinstance(function, FunctionType):
        return _binds(layer.forward, number)
    known = _known.setdefault(function, {})
    if number not in known:
        known[number] = _binds(function, number + 1)
    return known[number]


def _forward_of(layer: nn.Module) -> Any:
    """What the layer's class has as ``forward``; that of a scripted module can be had from an instance only."""
    return inspect.getattr_static(type(layer), "forward", None)


_known: WeakKeyDictionary[Callable[..., Any], dict[int, bool]] = WeakKeyDictionary()
"""For the ``forward`` of a class, whether it takes so many positional arguments."""


def _binds(function: Callable[..., Any], number: int) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C, or compiled
        return True
    try:
        signature.bind(*[None] * number)
    except TypeError:
        return False
    return True
