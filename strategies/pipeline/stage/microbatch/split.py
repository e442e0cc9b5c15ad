"""Split values and batches into micro-batches, pack objects, and merge outputs.

    whole batch  ──split_batch──▶ a batch per micro-batch          for training_step once per micro-batch (``1f1b``)
    input        ──split──▶ a value per micro-batch ── stages ──▶ merge ──▶ output of the batch       (``gpipe``)

A value is a pytree: tensors in tuples, lists and dicts. Any other object in it (a key-value cache, a dataclass) is a
leaf that pytrees do not look into. :func:`pack_objects` replaces the object by a node whose children are its tensors:

    (x, Cache(keys=k, values=v, length=3))  ──pack──▶  (x, Packed(k, v; pickled rest))  ──unpack──▶  (x, another Cache)

So a stage sends, differentiates and recomputes these tensors like any other tensor of the value. Each micro-batch and
each recomputation gets a separate object, so a layer that changes the object does not affect any other micro-batch.
"""

import copy
import io
import pickle
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from itertools import accumulate, pairwise
from types import BuiltinFunctionType, FunctionType
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from strategies.common.torch_compat import (
    SequenceKey,
    keystr,
    num_changes,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
    without_torch_function,
)


class NoChunk(Tensor):
    """Marks a tensor among the inputs of a pipeline that every micro-batch gets whole, such as a mask for all rows.

    Its gradients are summed over the micro-batches. It is a view of the tensor: if nothing is split (in one process,
    under DDP), layers use it like the tensor itself.

    Args:
        tensor: The input.

    Raises:
        TypeError: If ``tensor`` is not a tensor; other inputs are never split.
    """

    _tensor: Tensor

    @staticmethod
    def __new__(cls, tensor: Tensor) -> "NoChunk":
        if not isinstance(tensor, Tensor):
            raise TypeError(f"NoChunk is for tensors; {type(tensor).__name__} is given to every micro-batch anyway")
        marked = tensor.as_subclass(cls)
        marked._tensor = tensor
        return marked

    @property
    def tensor(self) -> Tensor:
        """The input."""
        return self._tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_function():
            result = func(*args, **(kwargs or {}))
        converted = getattr(func, "__name__", "") in _CONVERSIONS and isinstance(args[0], NoChunk)
        return NoChunk(result) if converted and type(result) is Tensor else result

    def __deepcopy__(self, memo: Any) -> "NoChunk":
        return NoChunk(copy.deepcopy(self.tensor, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return NoChunk, (self.tensor,)


_CONVERSIONS = ("to", "cuda", "cpu", "half", "bfloat16", "float", "double", "detach", "clone", "pin_memory")
"""Methods that return a :class:`NoChunk` for a :class:`NoChunk`, such as the methods that move a batch."""


def plain(leaf: Any) -> Any:
    """Return the tensor of a :class:`NoChunk`, and any other leaf itself."""
    return leaf.tensor if isinstance(leaf, NoChunk) else leaf


@dataclass(frozen=True)
class Microbatches:
    """The micro-batches of a batch.

    Attributes:
        parts: The micro-batches, of the structure of the batch.
        sizes: The number of rows of each.
        rows: The row of the batch that each row of the micro-batches is, one after another; ``None`` if they are in
            order.
    """

    parts: list[Any]
    sizes: list[int]
    rows: list[int] | None = None


# The input of the module


def split(value: Any, microbatches: int) -> list[Any]:
    """Split every tensor of ``value`` along its first dimension into at most ``microbatches`` parts.

    Sizes differ by at most one row, the larger parts first. A batch of fewer rows than ``microbatches`` gives one part
    per row; an empty batch gives one empty part. Every part gets the whole of each :class:`NoChunk`, of each tensor
    without dimensions, and of each leaf that is not a tensor.

    Args:
        value: Tensors of shape ``[batch, ...]``, nested in any way.
        microbatches: Maximum number of parts; at least 1.

    Returns:
        The parts in order, nested like ``value``. Their tensors are views of those of ``value``.

    Raises:
        ValueError: If there are several parts and no tensor has a batch dimension, or two tensors differ in it.
    """
    leaves, spec = tree_flatten(value)
    if microbatches == 1:
        return [tree_unflatten([plain(leaf) for leaf in leaves], spec)]
    rows = _num_rows(value, leaves)
    parts = max(1, min(microbatches, rows))
    sizes = [rows // parts + (m < rows % parts) for m in range(parts)]
    columns = [leaf.split(sizes) if has_rows(leaf) else [plain(leaf)] * parts for leaf in leaves]
    return [tree_unflatten(list(column), spec) for column in zip(*columns, strict=True)]


def merge(parts: list[Any]) -> Any:
    """Join the outputs of the micro-batches: tensors along their first dimension; other objects must be equal.

    This is the inverse of :func:`split`.

    Raises:
        ValueError: If the parts differ in nesting, if a tensor has no batch dimension, or if objects that are not
            tensors differ.
    """
    flat = [tree_flatten(part, is_leaf=lambda node: isinstance(node, Packed)) for part in parts]
    spec = flat[0][1]
    if any(other_spec != spec for _, other_spec in flat[1:]):
        raise ValueError(f"the pipelined module returned differently nested outputs: {[s for _, s in flat]}")
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten([_merge_leaves(list(column)) for column in columns], spec)


def without_rows(parts: Sequence[Any], value: Any, inputs: Sequence[Any], varying: set[str]) -> str | None:
    """Describe a tensor in the outputs of several micro-batches that does not have rows; ``None`` if there is none.

    The first dimension of a tensor with rows is the same multiple of the number of rows in every micro-batch, or
    differs between micro-batches with equally many rows, as that of ``hidden[mask]`` does. If all micro-batches have
    equally many rows, the former also holds for some tensors without rows. Of these, such are found that are one tensor
    for all micro-batches, such as a weight or a :class:`NoChunk`, and such whose second dimension is the number of rows
    and differs from the first, as in ``[length, batch, features]``.

    Args:
        parts: The outputs of the micro-batches.
        value: The input of the whole batch.
        inputs: The inputs of the micro-batches, as split from ``value``.
        varying: The names of tensors whose number of entries has differed between such micro-batches; is extended.
    """
    leaves = tree_leaves(value)
    shared = [plain(leaf) for leaf in leaves if isinstance(leaf, NoChunk)]
    place = next(place for place, leaf in enumerate(leaves) if has_rows(leaf))
    rows = [len(tree_leaves(part)[place]) for part in inputs]
    names = _names(parts[0], tree_leaves(parts[0]), "output")
    for name, *column in zip(names, *map(tree_leaves, parts), strict=False):  # merge refuses different nestings
        tensors = all(isinstance(part, Tensor) and not part.is_nested for part in column)
        if tensors and _vary(column, rows):
            varying.add(name)
        if tensors and name not in varying and not _are_rows(column, rows, shared):
            return f"{name} of shape {list(column[0].shape)} for a micro-batch of {rows[0]} rows"
    return None


def _vary(column: Sequence[Tensor], rows: Sequence[int]) -> bool:
    """Whether each micro-batch has its own number of entries, and no second dimension that is its number of rows."""
    if any(not part.dim() or part.shape[1:2] == (size,) for part, size in zip(column, rows, strict=True)):
        return False
    return len({(len(part), size) for part, size in zip(column, rows, strict=True)}) > len(set(rows))


def _are_rows(column: Sequence[Tensor], rows: Sequence[int], shared: Sequence[Tensor]) -> bool:
    first = column[0]
    if any(not part.dim() or len(part) % size for part, size in zip(column, rows, strict=True)):
        return False
    if len({(len(part) // size, part.shape[1:]) for part, size in zip(column, rows, strict=True)}) > 1:
        return False
    if len(set(rows)) == 1 and len(first) != rows[0] and first.shape[1:2] == (rows[0],):
        return False
    places = {storage_address(part) and (storage_address(part), part.storage_offset()) for part in column}
    is_one = len(places) == 1 and places.isdisjoint({0, None})
    if is_one and len(first) > 1 and first.stride(0):  # not expanded to many rows
        return False
    return not any(all(part.shape == one.shape and torch.equal(part, one) for part in column) for one in shared)


def has_rows(leaf: Any) -> bool:
    """Whether :func:`split` divides a leaf; every part gets the whole of other leaves."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and not isinstance(leaf, NoChunk)


def _merge_leaves(column: list[Any]) -> Any:
    first = column[0]
    if isinstance(first, Packed):
        objects = [packed.rebuild() for packed in column]
        if any(packed.tensors for packed in column) or any(other != objects[0] for other in objects[1:]):
            raise _cannot_be_joined(objects[0])
        return first
    if not isinstance(first, Tensor):
        if any(other is not first and other != first for other in column[1:]):
            raise _cannot_be_joined(first)
        return first
    if first.dim() == 0:
        raise ValueError(
            "the pipelined module returned a tensor without a batch dimension, which cannot be joined over "
            "micro-batches; return one value per row and reduce it in training_step"
        )
    return torch.cat(column)


def _cannot_be_joined(output: Any) -> ValueError:
    return ValueError(
        f"the pipelined module returned a different {type(output).__name__} for each micro-batch, which cannot be "
        "joined: let its last layer return tensors, in tuples, lists or dicts (and call a Hugging Face model with "
        "use_cache=False)"
    )


def _num_rows(value: Any, leaves: list[Any]) -> int:
    sizes = Counter(leaf.shape[0] for leaf in leaves if has_rows(leaf))
    if not sizes:
        raise ValueError("the pipelined module got no tensor with a batch dimension, so there is nothing to split")
    rows = max(sizes, key=lambda size: (size != 1, sizes[size]))
    if len(sizes) > 1:
        names = _names(value, leaves, "input")
        odd = [
            f"{name} of shape {list(leaf.shape)} has {leaf.shape[0]}"
            for name, leaf in zip(names, leaves, strict=True)
            if has_rows(leaf) and leaf.shape[0] != rows
        ]
        usual = next(name for name, leaf in zip(names, leaves, strict=True) if has_rows(leaf) and len(leaf) == rows)
        raise ValueError(
            "every tensor given to the pipelined module is split into micro-batches along its first dimension, which "
            f"must be the batch: {usual} has {rows} rows, but {', '.join(odd)}. Wrap a tensor that all rows share in "
            "NoChunk (from strategies.pipeline import NoChunk), and every micro-batch gets it whole"
        )
    return rows


def _names(value: Any, leaves: list[Any], whole: str) -> list[str]:
    """Return the name of each leaf of a value named ``whole`` as a Python expression."""
    try:
        return [f"{whole}{keystr(path)}" for path, _ in tree_flatten_with_path(value)[0]]
    except ValueError:  # a registered container that does not name its children
        return [f"tensor or object {number} in the {whole}" for number in range(len(leaves))]


# Objects in values

PLAIN = (
    *(bool, int, float, complex, str, bytes, range, type(None), type, Enum),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
"""Types of immutable values, which are compared by value."""

_KEPT = (Tensor, *PLAIN, FunctionType, BuiltinFunctionType, nn.Module)
"""Types of leaves that :func:`pack_objects` keeps: tensors, immutable values, and modules, which are not data."""


class Packed:
    """A packed object: a pytree node whose children are the tensors of the object.

    Args:
        rest: The pickled object, with numbers in place of its tensors.
        tensors: The tensors, or other leaves if ``tree_map`` has replaced the tensors.
    """

    def __init__(self, rest: bytes, tensors: list[Any]) -> None:
        self.rest, self.tensors = rest, tensors

    def rebuild(self) -> Any:
        """Unpickle a new object with these tensors."""
        return _ObjectUnpickler(self.rest, self.tensors).load()


class _Again(int):
    """A repeated occurrence of an object in a value: the number of its :class:`Packed`."""


register_pytree_node(
    Packed,
    lambda packed: (packed.tensors, packed.rest),
    lambda tensors, rest: Packed(rest, list(tensors)),
    flatten_with_keys_fn=lambda packed: ([(SequenceKey(k), t) for k, t in enumerate(packed.tensors)], packed.rest),
)


def pack_objects(value: Any, mark: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
    """Replace each object in ``value`` that can be pickled by a :class:`Packed`.

    Args:
        value: Any value. A value without objects is returned unchanged.
        mark: Function applied to each tensor of an object.
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
        elif (packed := _pack(leaf, mark)) is not None:
            numbers[id(leaf)] = len(numbers)
            leaves[place] = packed
    return tree_unflatten(leaves, spec)


def unpack_objects(value: Any) -> Any:
    """Invert :func:`pack_objects`. Containers and objects are new, tensors are not copied."""
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


def objects_in(value: Any) -> list[Any]:
    """Return the leaves of ``value`` that :func:`pack_objects` may replace."""
    return [leaf for leaf in tree_leaves(value) if is_object(leaf)]


def is_object(leaf: Any) -> bool:
    """Return whether a leaf is neither a tensor nor a plain value."""
    return not isinstance(leaf, _KEPT)


def freeze(leaf: Any) -> Any:
    """Return a value that is equal for two states of an object if it has not changed in between."""
    packed = _pack(leaf, lambda tensor: tensor)
    return None if packed is None else (packed.rest, [(id(tensor), num_changes(tensor)) for tensor in packed.tensors])


def _pack(leaf: Any, mark: Callable[[Tensor], Tensor]) -> Packed | None:
    file = io.BytesIO()
    pickler = _ObjectPickler(file)
    try:
        pickler.dump(leaf)
    except Exception:  # an object's own methods may raise any exception
        return None
    return Packed(file.getvalue(), [mark(tensor) for tensor in pickler.tensors])


class _ObjectPickler(cloudpickle.Pickler):
    """Collects each tensor once instead of pickling it."""

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


class _ObjectUnpickler(pickle.Unpickler):
    def __init__(self, rest: bytes, tensors: list[Any]) -> None:
        super().__init__(io.BytesIO(rest))
        self._tensors = tensors

    def persistent_load(self, number: int) -> Any:
        return self._tensors[number]


# Batches of a data loader

_DEFINE = "define split_batch(self, batch, num_microbatches) on the model, which returns one batch per micro-batch"


def split_batch(batch: Any, microbatches: int) -> tuple[list[Any], list[int]]:
    """Split a batch of a data loader into at most ``microbatches`` parts of the same structure.

    Tensors and arrays are split along their first dimension, and so are lists and tuples of other values (words,
    labels) with one entry per row. In lists, tuples, dicts and dataclasses that contain such values, each entry is
    split. Every part gets any other value whole, such as a number, a string or a :class:`NoChunk`. Sizes differ by at
    most one row, the larger parts first; a part has no rows only if the batch has none.

    Args:
        batch: Tensors of shape ``[batch, ...]`` and other values, in any nesting.
        microbatches: Maximum number of parts; at least 1.

    Returns:
        The parts, and the number of rows of each. Tensors in the parts share the memory of those of ``batch``. A part
        may be changed in place without effect on what autograd has saved of other parts, unless a tensor requires a
        gradient, may share its memory with another tensor, or has rows that overlap in memory.

    Raises:
        ValueError: If the number of rows is ambiguous.
    """
    rows = _num_rows_of_batch(batch)
    parts = max(1, min(microbatches, rows))
    whole, more = divmod(rows, parts)
    sizes = [whole + (m < more) for m in range(parts)]
    bounds = [0, *accumulate(sizes)]
    apart = _counted_apart(batch) if parts > 1 else frozenset()
    return [
        _part(batch, rows, slice(*bound), is_whole=parts == 1, counted_apart=apart) for bound in pairwise(bounds)
    ], sizes


def picked(batch: Any, rows: Sequence[int]) -> Any:
    """Return some rows of a batch, in the given order; see :func:`split_batch`."""
    return _part(batch, _num_rows_of_batch(batch), rows)


def _part(
    batch: Any,
    num_rows: int,
    pick: slice | Sequence[int],
    *,
    is_whole: bool = False,
    counted_apart: Container[int] = (),
) -> Any:
    def cut(value: Any, name: str) -> Any:
        if _is_array_of_rows(value):
            return value[pick].data if id(value) in counted_apart else value[pick]
        if _is_column(value) and len(value) == num_rows:
            if not is_whole:
                _check_column(value, name)
            return value[pick] if isinstance(pick, slice) else type(value)(value[row] for row in pick)
        return _rebuilt(value, name, cut)

    return cut(batch, "batch")


def _counted_apart(batch: Any) -> frozenset[int]:
    """Return the identities of the tensors of which each part has a separate count of in-place changes.

    Views share one count, by which autograd notices that a tensor it has saved was changed. So a change in one part
    would count as a change in all of them. ``Tensor.data`` has a separate count, but then autograd does not notice a
    change through another tensor with the same memory. Therefore tensors whose memory another tensor of the batch or
    another row may contain are left out, and those that use only a part of their memory, such as a view of a buffer.
    """
    tensors = [value for _, value in _walk(batch, "batch") if isinstance(value, Tensor)]
    tensors = [tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_nested]
    with without_torch_function():
        users = Counter(map(storage_address, tensors))
        return frozenset(
            id(tensor)
            for tensor in tensors
            if type(tensor) is Tensor
            and not tensor.requires_grad
            and not tensor.is_inference()
            and users[storage_address(tensor)] == 1
            and tensor.untyped_storage().nbytes() == tensor.nbytes
            and not _may_overlap(tensor)
        )


def storage_address(tensor: Tensor) -> int | None:
    """Return the address of the memory of a tensor, which its views share; ``None`` if there is none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a subclass that wraps other tensors has no memory
        return None


def _may_overlap(tensor: Tensor) -> bool:
    """Whether two elements of a tensor may be at the same place in memory, as in an expanded or unfolded tensor."""
    extent = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= extent:
                return True
            extent += stride * (size - 1)
    return False


def _num_rows_of_batch(batch: Any) -> int:
    sizes = {name: value.shape[0] for name, value in _walk(batch, "batch") if _is_array_of_rows(value)}
    sizes = sizes or {name: len(value) for name, value in _walk(batch, "batch") if _is_column(value)}
    if not sizes:
        raise ValueError(
            f"a batch of type {type(batch).__name__} has nothing with rows (no tensor with a first dimension, no "
            f"list), so it cannot be split into micro-batches; {_DEFINE}"
        )
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} has {number}" for name, number in sizes.items())
        raise ValueError(
            f"it is not clear how many rows the batch has: {listed}. Make every tensor's first dimension the batch; "
            "wrap a tensor that all rows share in NoChunk (from strategies.pipeline import NoChunk), and every "
            f"micro-batch gets it whole; or {_DEFINE}"
        )
    return next(iter(sizes.values()))


def _is_array_of_rows(value: Any) -> bool:
    """Whether a value is a tensor or an array with a first dimension, and not a :class:`NoChunk`."""
    return _is_array(value) and bool(value.shape) and not isinstance(value, NoChunk)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_column(value: Any) -> bool:
    """Whether a value is a list or tuple with one entry per row instead of one per field."""
    return (
        isinstance(value, list | tuple)
        and not hasattr(value, "_fields")
        and not any(_is_array(leaf) and leaf.shape for _, leaf in _walk(value, ""))
    )


def _check_column(value: Any, name: str) -> None:
    if all(isinstance(entry, list | tuple) and len(entry) == len(value) for entry in value):
        raise ValueError(
            f"it is not clear how to split {name}: it has {len(value)} entries, one for each row, and each of them has "
            f"{len(value)} entries too, so either may be the rows; {_DEFINE}"
        )


def _walk(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield a value and all values nested in it, with names; a container comes before its contents."""
    yield name, value
    for inner_name, inner in _parts(value, name):
        yield from _walk(inner, inner_name)


def _parts(value: Any, name: str) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"{name}[{key!r}]", inner) for key, inner in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f"{name}.{field}", inner) for field, inner in zip(value._fields, value, strict=True)]
    if isinstance(value, list | tuple):
        return [(f"{name}[{k}]", inner) for k, inner in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [(f"{name}.{field.name}", getattr(value, field.name)) for field in fields(value)]
    return []


def _rebuilt(value: Any, name: str, cut: Callable[[Any, str], Any]) -> Any:
    """Return a copy of ``value`` with ``cut`` applied to its contents."""
    new = [cut(inner, inner_name) for inner_name, inner in _parts(value, name)]
    made: Any = copy.copy(value)
    if isinstance(value, Mapping):
        for key, inner in zip(value, new, strict=True):
            made[key] = inner
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*new)
    if isinstance(value, list | tuple):
        return type(value)(new)
    if is_dataclass(value) and not isinstance(value, type):
        for field, inner in zip(fields(value), new, strict=True):
            object.__setattr__(made, field.name, inner)  # works on frozen dataclasses too
        return made
    return value
