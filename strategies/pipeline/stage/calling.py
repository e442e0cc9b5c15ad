"""How ``Pipe`` calls each layer with the return value of the layer before it.

    return value  arguments that the next forward accepts  call
    tuple (a, b)  two, or one as well as two               layer(a, b)
    tuple (a, b)  one only                                 layer((a, b))  as in nn.Sequential
    list [a, b]   two only                                 layer(a, b)    as the original Pipe did between partitions
    list [a, b]   one, or one as well as two               layer([a, b])  as in nn.Sequential

The same rules apply to the layers of an ``nn.Sequential`` within the module.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

from torch import nn

from strategies.common.torch_compat import compiled_call
from strategies.pipeline.stage.layers import Before

CallLayer = Callable[[nn.Module, Any], Any]
"""Takes a layer and the output of the layer before it; returns the output of the layer."""


def call_with_one(layer: nn.Module, value: Any) -> Any:
    """Call a layer with one argument, as ``nn.Sequential`` does."""
    return layer(value)


def call_partition(layers: nn.Sequential, value: Any, before: Before) -> Any:
    """Call a partition of a ``Pipe`` and run the hooks on it."""
    return _called_as(layers, partial(_through, layers, before), arguments(layers, value))


def call_layer(layer: nn.Module, value: Any) -> Any:
    """Call a layer as ``Pipe`` does."""
    return _call(layer, arguments(layer, value))


def arguments(layer: nn.Module, value: Any) -> tuple[Any, ...]:
    """Return the positional arguments for a layer, given the return value of the layer before it."""
    if not isinstance(value, tuple | list):
        return (value,)
    taker: nn.Module = layer
    while _is_plain_sequential(taker) and len(taker) > 0:
        taker = taker[0]
    several, one = _takes(taker, len(value)), _takes(taker, 1)
    unpacked = several or not one if isinstance(value, tuple) else several and not one
    return tuple(value) if unpacked else (value,)


def _through(layers: nn.Sequential, before: Before, *inputs: Any) -> Any:
    """Call the first layer with ``inputs``, and each other layer with the return value of the layer before it."""
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
    """Do nothing: the ``before`` of an inner ``nn.Sequential``."""


def _called_as(layers: nn.Sequential, forward: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """Call ``layers`` with ``forward`` in place of its own method, so that hooks on ``layers`` run."""
    vars(layers)["forward"] = forward
    try:
        return layers(*given)
    finally:
        vars(layers).pop("forward", None)


def _is_plain_sequential(layer: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether the layers in ``layer`` can be called one by one, which is not so after ``layer.compile()``."""
    own = _forward_of(layer) is nn.Sequential.forward and "forward" not in vars(layer)
    return own and compiled_call(layer) is None


def _takes(layer: nn.Module, number: int) -> bool:
    """Whether ``forward`` accepts ``number`` positional arguments; ``True`` if its signature is not known."""
    function = _forward_of(layer)
    if "forward" in vars(layer) or not isinstance(function, FunctionType):
        return _binds(layer.forward, number)
    known = _known.setdefault(function, {})
    if number not in known:
        known[number] = _binds(function, number + 1)
    return known[number]


def _forward_of(layer: nn.Module) -> Any:
    """The ``forward`` of the layer's class; not a function for a scripted module, whose instances provide it."""
    return inspect.getattr_static(type(layer), "forward", None)


_known: WeakKeyDictionary[Callable[..., Any], dict[int, bool]] = WeakKeyDictionary()
"""For the ``forward`` of a class: whether it accepts a number of positional arguments."""


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
