"""How buffers travel between ranks, asynchronously; each function returns what waits for its result."""

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class InFlight:
    """Work under way, finished in the order in which it was started: the same on all ranks.

    Args:
        limit: So much may be under way; one more, and the oldest is waited for.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._finishers: deque[Callable[[], None]] = deque()

    def add(self, finish: Callable[[], None]) -> None:
        self._finishers.append(finish)
        if len(self._finishers) > self._limit:
            self._finishers.popleft()()

    def drain(self) -> None:
        """Finishes everything."""
        while self._finishers:
            self._finishers.popleft()()

    def forget(self) -> None:
        """After an error: nothing is waited for any more."""
        self._finishers.clear()


def start_sum(flat: Tensor, owner: int | None, group: ProcessGroup, tag: int) -> Callable[[], Tensor | None]:
    """Sums a buffer over all ranks, in the order of ranks, in place if it can be.

    Args:
        flat: This rank's summand; left alone until the end.
        owner: The rank that gets the sum; ``None`` for all.
        group: All ranks.
        tag: A number for messages that may be under way at the same time.

    Returns:
        What waits, and then gives the sum, or ``None`` on a rank that is not the owner.
    """
    if owner is None or flat.is_cuda:
        # NCCL reduces along a ring; gloo's own reduce sends half as much again as is needed.
        work = (
            dist.all_reduce(flat, group=group, async_op=True)
            if owner is None
            else dist.reduce(flat, owner, group=group, async_op=True)
        )
        return lambda: (work.wait(), flat if owner in (None, group.rank()) else None)[1]
    if group.rank() != owner:
        sending = group.send([flat], owner, tag)
        return lambda: (sending.wait(), None)[1]
    others = {rank: torch.empty_like(flat) for rank in range(group.size()) if rank != owner}
    receiving = {rank: group.recv([other], rank, tag) for rank, other in others.items()}

    def add_up() -> Tensor:
        for work in receiving.values():
            work.wait()
        summands = [others.get(rank, flat) for rank in range(group.size())]
        total = summands[0]
        for summand in summands[1:]:
            total = total.add_(summand)
        return total

    return add_up
