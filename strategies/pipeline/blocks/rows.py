"""Which arguments of blocks have one row per sample, when a whole batch is split into micro-batches.

A shape alone does not tell: a mask of shape ``[8, 8]`` may have rows of a batch of 8, or positions. The evidence is a
second call of the model with fewer rows: a tensor has rows if its first dimension changes from the number of rows of
the one call to that of the other. Tensors that stay as they are, are given whole to every micro-batch.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from strategies.common.torch_compat import tree_leaves, tree_map_only

Key = tuple[tuple[Any, ...] | None, ...]
"""The kinds of the tensors in a table; see :func:`kinds_of`."""


def num_rows(arguments: Any) -> int:
    """Return the number of rows that most tensors in the arguments of a model have; 1 if no tensor has rows."""
    sizes = Counter(leaf.shape[0] for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.dim())
    return max(sizes, key=lambda size: (size > 1, sizes[size]), default=1)


def with_rows(arguments: Any, rows: int, wanted: int) -> Any:
    """Return the arguments with the first ``wanted`` rows of each tensor that has ``rows`` of them."""
    return tree_map_only(Tensor, lambda leaf: leaf[:wanted] if leaf.dim() and len(leaf) == rows else leaf, arguments)


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
