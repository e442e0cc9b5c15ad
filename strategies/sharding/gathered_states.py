"""Gather divided optimizer states on rank 0.

Rank 0 receives from one rank at a time, tensor by tensor, so it never holds more than the whole state, and no other
rank holds more than its part. (``torch.distributed.gather_object`` holds a second copy of everything as pickles.) The
group uses gloo, so tensors arrive in host memory.
"""

import pickle
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from strategies.common.torch_compat import timeout_of, tree_leaves, tree_map_only
from strategies.common.waiting import Wait, wait_here
from strategies.optim.restricted import in_order

_TAG = 3
"""Tag of these messages."""


def gather_state_dict(state: dict[str, Any], group: ProcessGroup) -> dict[str, Any]:
    """Return the whole state dict of a divided optimizer on rank 0, an empty dict elsewhere. Every rank calls this.

    Args:
        state: The state dict on this rank.
        group: The ranks, on gloo.
    """
    whole = gather_states(state["state"], group)
    return {**state, "state": whole} if group.rank() == 0 else {}


def gather_states(state: dict[int, Any], group: ProcessGroup, wait: Wait = wait_here) -> dict[int, Any]:
    """Gather the states of parameters on rank 0. Every rank calls this.

    Args:
        state: The states on this rank, by the number of the parameter: nested tensors and plain values.
        group: The ranks, on gloo.
        wait: Calls a function that waits for another rank.

    Returns:
        On rank 0 the states of all ranks, ordered by number; an empty dict on all other ranks. An empty state, which
        reading ``optimizer.state[p]`` creates, replaces no other.
    """
    if group.rank() > 0:
        _send(state, group, wait)
        return {}
    whole = dict(state)
    for rank in range(1, group.size()):
        received = _receive(rank, group, wait)
        whole.update({key: own for key, own in received.items() if key not in whole or own != {}})
    return in_order(whole)


def _send(state: dict[int, Any], group: ProcessGroup, wait: Wait) -> None:
    tensors = [leaf.detach().cpu().contiguous() for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    outlines = tree_map_only(Tensor, _Outline, state)
    description = torch.frombuffer(bytearray(pickle.dumps(outlines)), dtype=torch.uint8)
    for tensor in (torch.tensor([len(description)]), description, *tensors):
        wait(partial(group.send([tensor], 0, _TAG).wait, timeout_of(group)))


def _receive(rank: int, group: ProcessGroup, wait: Wait) -> dict[int, Any]:
    def received(*shape: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        wait(partial(group.recv([tensor], rank, _TAG).wait, timeout_of(group)))
        return tensor

    description = received(int(received(1, dtype=torch.int64)), dtype=torch.uint8)
    outlines = pickle.loads(description.numpy().tobytes())
    state: dict[int, Any] = tree_map_only(
        _Outline, lambda outline: received(*outline.shape, dtype=outline.dtype), outlines
    )
    return state


class _Outline:
    """Shape and dtype of a tensor that follows in a separate message."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
