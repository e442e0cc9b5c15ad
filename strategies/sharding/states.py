"""The state of divided optimizers, put together on one rank.

Rank 0 receives from one rank after the other, tensor by tensor, so that it never holds more than the whole state, and
no other rank more than its own part. The group is gloo's, so tensors arrive in the memory of the host.
"""

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_flatten, tree_unflatten

from strategies.optimizer import in_order


def gathered(state: dict[int, Any], group: ProcessGroup) -> dict[int, Any]:
    """Puts together what ranks have; every rank calls this.

    Args:
        state: What this rank has: by number, any structure of tensors and plain values.
        group: The ranks, on gloo.

    Returns:
        On rank 0 what all ranks have, in order of numbers; on the others nothing.
    """
    if group.rank() > 0:
        _send(state, group)
        return {}
    whole = dict(state)
    for rank in range(1, group.size()):
        whole.update(_receive(rank, group))
    return in_order(whole)


def _send(state: dict[int, Any], group: ProcessGroup) -> None:
    leaves, structure = tree_flatten(state)
    tensors = [leaf.detach().cpu().contiguous() for leaf in leaves if isinstance(leaf, Tensor)]
    outlines = [_Outline(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    description = torch.frombuffer(bytearray(pickle.dumps((outlines, structure))), dtype=torch.uint8)
    for tensor in (torch.tensor([len(description)]), description, *tensors):
        dist.send(tensor, group=group, group_dst=0)


def _receive(rank: int, group: ProcessGroup) -> dict[int, Any]:
    length = torch.empty(1, dtype=torch.int64)
    dist.recv(length, group=group, group_src=rank)
    description = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(description, group=group, group_src=rank)
    leaves, structure = pickle.loads(description.numpy().tobytes())
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, _Outline):
            leaves[number] = tensor = torch.empty(leaf.shape, dtype=leaf.dtype)
            dist.recv(tensor, group=group, group_src=rank)
    state: dict[int, Any] = tree_unflatten(leaves, structure)
    return state


class _Outline:
    """Stands for a tensor that follows."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
