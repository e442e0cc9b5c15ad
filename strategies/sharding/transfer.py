"""How tensors travel between ranks, asynchronously; each function returns what waits for its result."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

_PIECES = 2**12
"""More pieces than a bucket has; messages with one tag arrive in order, but tags are easier to tell apart in a hang."""


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


class Exchange:
    """Moves what is in buffers to its owner, and from its owner to all.

    On CPU, buffers go straight from rank to rank: gloo's own reduce sends half as much again as is needed, and took
    twice as long (8 buffers of 12 MB, two ranks: 80 ms against 38).

    Args:
        group: The ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._rank, self._size = group, group.rank(), group.size()
        self._spare: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def start_average(self, pieces: Sequence[Tensor], owner: int | None, number: int) -> Callable[[], bool]:
        """Averages buffers over all ranks, in place.

        Args:
            pieces: One-dimensional; of the same sizes on every rank, and left alone until the end.
            owner: The rank that gets the average; ``None`` for all.
            number: Of this exchange among those that may be under way.

        Returns:
            What waits, and then tells whether this rank has got the average.
        """
        if owner is None or pieces[0].is_cuda:
            return self._start_collective(pieces, owner)
        if owner == self._rank:
            return self._start_receiving(pieces, number)
        works = [self._group.send([p], owner, number * _PIECES + n) for n, p in enumerate(pieces)]
        return partial(_finished, works, pieces, False)

    def start_broadcast(self, pieces: Sequence[Tensor], owner: int, number: int) -> Callable[[], object]:
        """Brings the owner's buffers to all ranks, in place.

        Returns:
            What waits for that.
        """
        if pieces[0].is_cuda:
            collective = [dist.broadcast(p, owner, group=self._group, async_op=True) for p in pieces]
            return partial(_finished, collective, pieces, True)
        others = [rank for rank in range(self._size) if rank != self._rank]
        works = (
            [self._group.send([p], rank, number * _PIECES + n) for n, p in enumerate(pieces) for rank in others]
            if owner == self._rank
            else [self._group.recv([p], owner, number * _PIECES + n) for n, p in enumerate(pieces)]
        )
        return partial(_finished, works, pieces, True)

    def _start_collective(self, pieces: Sequence[Tensor], owner: int | None) -> Callable[[], bool]:
        works = []
        for piece in pieces:
            piece.mul_(1 / self._size)
            works.append(
                dist.all_reduce(piece, group=self._group, async_op=True)
                if owner is None
                else dist.reduce(piece, owner, group=self._group, async_op=True)
            )
        return partial(_finished, works, pieces, owner in (None, self._rank))

    def _start_receiving(self, pieces: Sequence[Tensor], number: int) -> Callable[[], bool]:
        others = [rank for rank in range(self._size) if rank != self._rank]
        summands = [[self._taken(piece) for _ in others] for piece in pieces]
        works = [
            self._group.recv([summand], rank, number * _PIECES + n)
            for n, arriving in enumerate(summands)
            for rank, summand in zip(others, arriving, strict=True)
        ]

        def add_up() -> bool:
            _finished(works, pieces, True)
            for piece, arrived in zip(pieces, summands, strict=True):
                piece.mul_(1 / self._size)
                for summand in arrived:
                    piece.add_(summand, alpha=1 / self._size)
                    self._spare[summand.numel(), summand.dtype].append(summand)
            return True

        return add_up

    def _taken(self, like: Tensor) -> Tensor:
        """A buffer that is used again and again: new memory costs more than what is done with it here."""
        spare = self._spare.setdefault((like.numel(), like.dtype), [])
        return spare.pop() if spare else torch.empty_like(like)


def _finished(works: Sequence[Work], alive: Sequence[Tensor], result: bool) -> bool:
    """Waits; until then, what travels has to stay alive."""
    for work in works:
        work.wait()
    return result
