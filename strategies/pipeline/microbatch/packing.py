"""Objects in a value, taken apart into tensors and the rest, so that each run of a stage has objects of its own.

A value is a pytree: tensors in tuples, lists and dicts. Any other object in it (a key-value cache, a dataclass) is a
leaf that pytrees do not look into. :func:`pack_objects` replaces it by a node whose children are its tensors:

    (x, Cache(keys=k, values=v, length=3))  ──pack──▶  (x, Packed(k, v; pickled rest))  ──unpack──▶  (x, another Cache)

So these tensors are sent, recomputed from and differentiated like any other tensor of the value. A layer that changes
the object changes that of one micro-batch only, and starts from the same object when it is recomputed.
"""

import io
import pickle
from collections.abc import Callable
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from strategies.common.torch_compat import SequenceKey, register_pytree_node, tree_flatten, tree_unflatten

_KEPT = (
    Tensor,
    *(bool, int, float, complex, str, bytes, range, type(None), type, Enum),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    *(FunctionType, BuiltinFunctionType, nn.Module),
)
"""Types of leaves that are not taken apart: tensors, what no layer can change, and modules, which are no data."""


class Packed:
    """An object that has been taken apart.

    Args:
        rest: The pickled object, with numbers in place of its tensors.
        tensors: The tensors; what stands in their places where a pytree of something else is made of them.
    """

    def __init__(self, rest: bytes, tensors: list[Any]) -> None:
        self.rest, self.tensors = rest, tensors

    def rebuild(self) -> Any:
        """Makes a new object of the parts."""
        return _Unpickler(self.rest, self.tensors).load()


class _Again(int):
    """Stands for an object that is in the value more than once: the number of its :class:`Packed`."""


register_pytree_node(
    Packed,
    lambda packed: (packed.tensors, packed.rest),
    lambda tensors, rest: Packed(rest, list(tensors)),
    flatten_with_keys_fn=lambda packed: ([(SequenceKey(k), t) for k, t in enumerate(packed.tensors)], packed.rest),
)


def pack_objects(value: Any, mark: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
    """Takes the objects in ``value`` apart; what cannot be pickled stays as it is.

    Args:
        value: Any value; one without objects is returned itself.
        mark: Applied to each tensor of an object.
    """
    if isinstance(value, Tensor):
        return value
    leaves, spec = tree_flatten(value)
    if all(isinstance(leaf, _KEPT) for leaf in leaves):
        return value
    numbers: dict[int, int] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, _KEPT):
            continue
        if id(leaf) in numbers:
            leaves[place] = _Again(numbers[id(leaf)])
        elif (packed := _taken_apart(leaf, mark)) is not None:
            numbers[id(leaf)] = len(numbers)
            leaves[place] = packed
    return tree_unflatten(leaves, spec)


def unpack_objects(value: Any) -> Any:
    """The inverse of :func:`pack_objects`; containers and objects are new, tensors are not."""
    if isinstance(value, Tensor):
        return value
    leaves, spec = tree_flatten(value, is_leaf=lambda node: isinstance(node, Packed))
    made: list[Any] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Packed):
            leaves[place] = leaf.rebuild()
            made.append(leaves[place])
        elif isinstance(leaf, _Again):
            leaves[place] = made[leaf]
    return tree_unflatten(leaves, spec)


def _taken_apart(leaf: Any, mark: Callable[[Tensor], Tensor]) -> Packed | None:
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(leaf)
    except Exception:  # pickling raises whatever the objects' own methods raise
        return None
    return Packed(file.getvalue(), [mark(tensor) for tensor in pickler.tensors])


class _Pickler(cloudpickle.Pickler):
    """Sets tensors aside, each one once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, rest: bytes, tensors: list[Any]) -> None:
        super().__init__(io.BytesIO(rest))
        self._tensors = tensors

    def persistent_load(self, number: int) -> Any:
        return self._tensors[number]
