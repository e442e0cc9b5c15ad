"""The state of divided optimizers, put together on one rank.

Rank 0 receives from one rank after the other, tensor by tensor, so that it never holds more than the whole state, and
no other rank more than its own part. The group is gloo's, so tensors arrive in the memory of the host.
"""

import pickle
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from strategies.common.torch_compat import timeout_of, tree_leaves, tree_map_only
from strategies.common.waiting import Wait, wait_here
from strategies.optim.restricted import in_order

_TAG = 3
"""Of these messages."""


def whole_state_dict(optimizer: Optimizer, group: ProcessGroup) -> dict[str, Any]:
    """On rank 0 the state dict of an optimizer that ranks have divided; on the others nothing. Every rank calls it."""
    state = optimizer.state_dict()
    state["state"] = gathered(state["state"], group)
    return state if group.rank() == 0 else {}


def gathered(state: dict[int, Any], group: ProcessGroup, wait: Wait = wait_here) -> dict[int, Any]:
    """Puts together what ranks have; every rank calls this.

    Args:
        state: What this rank has: by number, any structure of tensors and plain values.
        group: The ranks, on gloo.
        wait: Calls what waits for another rank.

    Returns:
        On rank 0 what all ranks have, in order of numbers; on the others nothing.
    """
    if group.rank() > 0:
        _send(state, group, wait)
        return {}
    whole = dict(state)
    for rank in range(1, group.size()):
        whole.update(_receive(rank, group, wait))
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
    """Stands for a tensor that follows."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
