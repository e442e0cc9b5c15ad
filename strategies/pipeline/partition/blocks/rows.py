"""Which arguments of blocks have one row per sample, when a whole batch is split into micro-batches.

A shape alone does not tell: a mask of shape ``[8, 8]`` may have rows of a batch of 8, or positions. The evidence is a
second call of the model with fewer rows: a tensor has rows if its first dimension changes from the number of rows of
the one call to that of the other. Tensors that stay as they are, are given whole to every micro-batch.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strategies.common.torch_compat import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

Key = tuple[tuple[Any, ...] | None, ...]
"""The kinds of the tensors in a table; see :func:`kinds_of`."""


@dataclass(frozen=True)
class Rows:
    """What has rows in a batch that is split.

    Attributes:
        table: For each entry of the table, whether it has rows.
        is_joined: For each slot of an output, whether the outputs of the micro-batches can be joined.
        last: For each tensor in the output of the last block, whether it has rows; ``None`` if that is not known.
        rows: Number of rows of the batch.
    """

    table: list[bool]
    is_joined: Mapping[int, bool]
    last: list[bool] | None
    rows: int = 0

    def joins(self, slots: Sequence[int]) -> bool:
        """Return whether the outputs of some slots, and that of the last block, can be joined."""
        return all(self.is_joined.get(slot, True) for slot in slots) and all(self.last or [True])

    def sizes(self, microbatches: int) -> list[int]:
        """Return the number of rows of each micro-batch."""
        size, rest = divmod(self.rows, microbatches)
        return [size + (m < rest) for m in range(microbatches)]


def num_rows(arguments: Any) -> int:
    """Return the number of rows that most tensors in the arguments of a model have; 0 if it gets no such tensor."""
    sizes = Counter(leaf.shape[0] for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.dim())
    return max(sizes, key=lambda size: (size > 1, sizes[size]), default=0)


def with_rows(arguments: Any, rows: int, part: slice) -> Any:
    """Return a copy of the arguments, with some rows of each tensor that has ``rows`` of them.

    A tensor that is among the arguments twice is so in the copy.
    """
    copies: dict[int, Tensor] = {}

    def copied(leaf: Tensor) -> Tensor:
        if id(leaf) not in copies:
            has_rows = leaf.dim() and len(leaf) == rows
            copies[id(leaf)] = (leaf[part] if has_rows else leaf).clone()
        return copies[id(leaf)]

    return tree_map_only(Tensor, copied, arguments)


def square_in(arguments: Any, rows: int) -> Tensor | None:
    """Return a tensor of shape ``[rows, rows]`` beside others with rows: a mask or a bias, of rows or of positions.

    Tensors of integers, such as token ids, and a tensor that is the only one with rows, have rows.
    """
    having = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.shape[:1] == (rows,)]
    squares = [leaf for leaf in having if leaf.shape == (rows, rows)]
    masks = [leaf for leaf in squares if leaf.is_floating_point() or leaf.dtype == torch.bool]
    return masks[-1] if masks and len(having) > 1 else None


def all_follow(shapes: Sequence[torch.Size], others: Sequence[torch.Size], rows: int, other_rows: int) -> bool:
    """Return whether the first dimension of each tensor is a multiple of the number of rows, in two calls."""
    return len(shapes) == len(others) and all(
        len(one) > 0
        and one[1:] == other[1:]
        and one[0] != other[0]
        and one[0] % rows == 0
        and one[0] * other_rows == other[0] * rows
        for one, other in zip(shapes, others, strict=True)
    )


def decide(table: Sequence[Any], probe: Sequence[Any], rows: int, probe_rows: int) -> list[bool | None]:
    """Return for each entry of a table whether it has rows; ``None`` if that cannot be told.

    Args:
        table: The tensors of a call with ``rows`` rows; entries that are not tensors have none.
        probe: Those of a call with ``probe_rows`` rows.
        rows: Number of rows.
        probe_rows: Another number of rows.
    """
    if len(table) != len(probe):
        return [None] * len(table)
    return [_decide(one, other, rows, probe_rows) for one, other in zip(table, probe, strict=True)]


def _decide(one: Any, other: Any, rows: int, probe_rows: int) -> bool | None:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False if type(one) is type(other) else None
    if one.shape == other.shape:
        return False
    first = (one.shape[:1], other.shape[:1])
    return True if one.shape[1:] == other.shape[1:] and first == ((rows,), (probe_rows,)) else None


def kinds_of(table: Sequence[Any], rows: int) -> Key:
    """Return a key for which decisions hold: for each tensor the dtype, the number of dimensions and the first size.

    A first size of ``rows`` is replaced by -1, so that the key does not depend on the size of the batch.
    """
    return tuple(_kind_of(leaf, rows) if isinstance(leaf, Tensor) else None for leaf in table)


def _kind_of(tensor: Tensor, rows: int) -> tuple[Any, ...]:
    if not tensor.dim():
        return (tensor.dtype,)
    return tensor.dtype, tensor.dim(), -1 if len(tensor) == rows else len(tensor)


def are_rows(parts: Sequence[Tensor], rows: Sequence[int]) -> bool:
    """Return whether the parts of an output over the micro-batches can be joined along the first dimension.

    Args:
        parts: One tensor per micro-batch.
        rows: The number of rows of each micro-batch.
    """
    if any(not part.dim() or len(part) % max(1, size) for part, size in zip(parts, rows, strict=True)):
        return False
    if len({len(part) // max(1, size) for part, size in zip(parts, rows, strict=True)}) > 1:
        return False
    return len(parts) < 2 or not torch.equal(parts[0], parts[1])


def with_tensors_replaced(value: Any, places: Sequence[int], replace: Callable[[Tensor], Any]) -> Any:
    """Return a value in which the tensors at some places, counted among all its tensors, are replaced."""
    leaves, spec = tree_flatten(value)
    tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for place in (tensors[k] for k in places):
        leaves[place] = replace(leaves[place])
    return tree_unflatten(leaves, spec)
