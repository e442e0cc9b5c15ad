"""ZeRO stage 3 divides every parameter by rows: rank ``r`` of ``n`` has the ``r``-th of ``n`` runs of consecutive rows.

    parameter [5, k] on 3 ranks        rank 0: rows 0 and 1     rank 1: rows 2 and 3     rank 2: row 4

The runs are those of ``torch.chunk``, as in ``fully_shard``: each has ``ceil(rows / n)`` rows, and the last runs may be
shorter or empty.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from strategies.common.torch_compat import timeout_of

_TAG = 4
"""Tag of the messages with rows."""


def rows_of(num_rows: int, rank: int, size: int) -> range:
    """Return the rows that a rank has.

    >>> [rows_of(5, rank, 3) for rank in range(3)]
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    each = -(-num_rows // size)
    return range(min(num_rows, rank * each), min(num_rows, (rank + 1) * each))


def own_rows(value: Tensor, shape: Sequence[int], rank: int, size: int) -> Tensor:
    """Return a rank's part of a whole parameter, or of a state with one entry per element, as a view.

    Args:
        value: The whole tensor, in the shape of the parameter or flattened.
        shape: The shape of the parameter.
        rank: The rank.
        size: The number of ranks.
    """
    rows, entries = rows_of(shape[0], rank, size), _entries_per_row(value.shape, shape)
    return value[rows.start * entries : rows.stop * entries]


def whole_shape(value: Tensor, shape: Sequence[int], num_rows: int) -> torch.Size:
    """Return the shape of the whole tensor of which ``value`` is a rank's part.

    Args:
        value: The part, in the shape of the rank's rows or flattened.
        shape: The shape of the whole parameter.
        num_rows: The number of rows in the part.
    """
    is_flat = tuple(value.shape) != (num_rows, *shape[1:])
    return torch.Size([math.prod(shape)] if is_flat else shape)


def _entries_per_row(own: Sequence[int], shape: Sequence[int]) -> int:
    """Return the number of entries of a tensor's first dimension per row of the parameter."""
    return 1 if tuple(own) == tuple(shape) else math.prod(shape[1:])


def gather_rows(part: Tensor, whole: Sequence[int], shape: Sequence[int], group: ProcessGroup) -> Tensor | None:
    """Gather a tensor that is divided by rows in the host memory of rank 0. Every rank calls this.

    Args:
        part: This rank's part.
        whole: The shape of the whole tensor: the shape of the parameter, or flattened.
        shape: The shape of the parameter.
        group: The ranks, on gloo.

    Returns:
        The whole tensor on rank 0, ``None`` on all other ranks.
    """
    rank, size = group.rank(), group.size()
    if rank > 0:
        if part.numel():
            group.send([part.detach().cpu().contiguous()], 0, _TAG).wait(timeout_of(group))
        return None
    result = torch.empty(tuple(whole), dtype=part.dtype)
    own_rows(result, shape, 0, size).copy_(part.detach())
    for other in range(1, size):
        theirs = own_rows(result, shape, other, size)
        if theirs.numel():
            group.recv([theirs], other, _TAG).wait(timeout_of(group))
    return result
