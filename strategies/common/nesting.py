"""Describe and rebuild nested structures quickly.

A ``tree_flatten`` takes several microseconds for each node. The functions here take less for tuples, lists, dicts and
plain values, which are most of what modules take and return.
"""

import struct
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from strategies.common.torch_compat import tree_map

Marker = TypeVar("Marker")

_VALUES = frozenset([type(None), bool, int, str, bytes])
"""Types whose objects are interchangeable if they are equal and have exactly the same type."""


class Unusual(Exception):
    """Raised if a structure has parts that :func:`structure_of` cannot describe."""


def structure_of(value: Any, describe: Callable[[Tensor], Any]) -> tuple[Any, ...]:
    """Return a hashable description of ``value``, which differs for values that differ in more than their tensors.

    Args:
        value: The value.
        describe: Called for each tensor, in the order of leaves of a pytree; returns its description.

    Raises:
        Unusual: If the value has parts other than tensors, tuples, lists, dicts and plain values.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return kind, *[structure_of(part, describe) for part in value]
    if kind in _VALUES:
        return kind, value
    if isinstance(value, Tensor):
        return kind, describe(value)
    if kind is float:
        return kind, struct.pack("d", value)  # -0.0 equals 0.0, and no NaN equals any
    if kind is dict and all(type(key) in _VALUES for key in value):
        keys = [(type(key), key) for key in value]
        return kind, *keys, *[structure_of(part, describe) for part in value.values()]
    raise Unusual


def filled(template: Any, kind: type[Marker], value_of: Callable[[Marker], Any]) -> Any:
    """Return ``template`` with the value of each object of exactly the class ``kind`` in its place."""
    own = type(template)
    if own is kind:
        return value_of(template)
    if own is tuple:
        return tuple([filled(part, kind, value_of) for part in template])
    if own is list:
        return [filled(part, kind, value_of) for part in template]
    if own is dict:
        return {key: filled(part, kind, value_of) for key, part in template.items()}
    if own in _VALUES or own is float:
        return template
    return tree_map(
        lambda leaf: value_of(leaf) if isinstance(leaf, kind) else leaf,
        template,
        is_leaf=lambda node: isinstance(node, kind),
    )
