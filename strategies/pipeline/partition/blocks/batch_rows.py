"""Decide which arguments of blocks have one row per sample, to split a whole batch into micro-batches.

The shape does not suffice: a mask of shape ``[8, 8]`` may have the rows of a batch of 8, or positions. The evidence is
a second call of the model with fewer rows: a tensor has rows if its first dimension equals the number of rows in both
calls. Every micro-batch gets the whole of a tensor whose shape is the same in both calls.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from strategies.common.torch_compat import (
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    without_torch_function,
)
from strategies.pipeline.stage.microbatch.split import has_rows, storage_address

TableKinds = tuple[tuple[Any, ...] | None, ...]
"""The kinds of the tensors in a table; see :func:`kinds_of`."""


@dataclass(frozen=True)
class Rows:
    """Which values of a split batch have rows.

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
    """Return the most frequent number of rows of the tensors in the arguments of a model; 0 if there are none."""
    sizes = Counter(leaf.shape[0] for leaf in tree_leaves(arguments) if has_rows(leaf))
    return max(sizes, key=lambda size: (size > 1, sizes[size]), default=0)


def with_rows(arguments: Any, rows: int, part: slice, own: Iterable[Tensor] = ()) -> Any:
    """Return a copy of the arguments, with some rows of each tensor that has ``rows`` rows.

    A tensor that occurs twice in the arguments also occurs twice in the copy.

    Args:
        arguments: The arguments of a call.
        rows: The number of rows.
        part: The rows of the copy.
        own: The parameters and buffers of the model. They and their views have no rows, unless expanded to the rows.
    """
    copies: dict[int, Tensor] = {}
    with without_torch_function():
        whole = {storage_address(tensor) for tensor in own} - {0, None}

    def copied(leaf: Tensor) -> Tensor:
        if id(leaf) not in copies:
            is_split = has_rows(leaf) and len(leaf) == rows
            if is_split and storage_address(leaf) in whole and leaf.stride(0):
                is_split = False
            copies[id(leaf)] = (leaf[part] if is_split else leaf).clone()
        return copies[id(leaf)]

    return tree_map_only(Tensor, copied, arguments)


def square_in(arguments: Any, rows: int) -> Tensor | None:
    """Return a tensor of shape ``[rows, rows]``, a mask or a bias, if it is not clear whether it has rows or positions.

    Integer tensors, such as token ids, have rows. So does a tensor that is the only one with this number of rows.
    """
    having = [leaf for leaf in tree_leaves(arguments) if has_rows(leaf) and len(leaf) == rows]
    squares = [leaf for leaf in having if leaf.shape == (rows, rows)]
    masks = [leaf for leaf in squares if leaf.is_floating_point() or leaf.dtype == torch.bool]
    return masks[-1] if masks and len(having) > 1 else None


def follows(shape: torch.Size, probe_shape: torch.Size, rows: int, probe_rows: int) -> bool:
    """Return whether the first dimension of an output is the number of rows, in two calls.

    A multiple of it does not suffice, because ``[heads * rows, ...]`` may be in the order of the heads.
    """
    return shape[1:] == probe_shape[1:] and (shape[:1], probe_shape[:1]) == ((rows,), (probe_rows,))


def decide(table: Sequence[Any], probe: Sequence[Any], rows: int, probe_rows: int) -> list[bool | None]:
    """Return for each entry of a table whether it has rows; ``None`` if this is not clear.

    Args:
        table: The tensors of a call with ``rows`` rows. Entries that are not tensors have no rows.
        probe: The tensors of a call with ``probe_rows`` rows.
        rows: The number of rows of the first call.
        probe_rows: The number of rows of the second call.
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


def kinds_of(table: Sequence[Any], rows: int) -> TableKinds:
    """Return a cache key for decisions: for each tensor the dtype, the number of dimensions and the first size.

    A first size of ``rows`` becomes -1, so that the key does not depend on the size of the batch.
    """
    return tuple(_kind_of(leaf, rows) if isinstance(leaf, Tensor) else None for leaf in table)


def _kind_of(tensor: Tensor, rows: int) -> tuple[Any, ...]:
    if not tensor.dim():
        return (tensor.dtype,)
    return tensor.dtype, tensor.dim(), -1 if len(tensor) == rows else len(tensor)


def are_rows(parts: Sequence[Tensor], rows: Sequence[int], inputs: Sequence[Tensor]) -> bool:
    """Return whether the parts of an output over the micro-batches can be joined along the first dimension.

    Equal parts are taken for an output without rows if they were computed from different rows.

    Args:
        parts: One tensor per micro-batch.
        rows: The number of rows of each micro-batch.
        inputs: The tensors with rows of the whole batch, from which the parts were computed.
    """
    if any(not part.dim() or len(part) % max(1, size) for part, size in zip(parts, rows, strict=True)):
        return False
    if len({len(part) // max(1, size) for part, size in zip(parts, rows, strict=True)}) > 1:
        return False
    for part, start, size in zip(parts[1:], accumulate(rows), rows[1:], strict=False):
        if not all(torch.equal(tensor[: rows[0]], tensor[start : start + size]) for tensor in inputs):
            return not torch.equal(parts[0], part)
    return True


def with_tensors_replaced(value: Any, places: Sequence[int], replace: Callable[[Tensor], Any]) -> Any:
    """Replace the tensors of a value whose indices among all its tensors are in ``places``."""
    leaves, spec = tree_flatten(value)
    tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for place in (tensors[k] for k in places):
        leaves[place] = replace(leaves[place])
    return tree_unflatten(leaves, spec)
