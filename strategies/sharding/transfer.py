"""Asynchronous exchange of buffers between ranks. Each function returns a function that waits for the result."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

_Result = TypeVar("_Result")

_PIECES = 2**12
"""More than the pieces of a bucket, so that every piece has a unique tag, which helps to explain a hang."""


class InFlight:
    """Operations in flight. They are finished in the order in which they were started, which is the same on all ranks.

    Args:
        limit: Maximum number of operations in flight. Starting another operation waits for the oldest.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._finishers: deque[Callable[[], None]] = deque()

    def add(self, finish: Callable[[], None]) -> None:
        self._finishers.append(finish)
        if len(self._finishers) > self._limit:
            self._finishers.popleft()()

    def drain(self) -> None:
        """Finish all operations."""
        while self._finishers:
            self._finishers.popleft()()

    def forget(self) -> None:
        """Drop all operations without waiting for them, after an error."""
        self._finishers.clear()


class Exchange:
    """Sends buffers to their owner, and from their owner to all ranks.

    On the CPU, buffers are sent directly from rank to rank: gloo's reduce transfers 50 % more than needed and took
    twice as long (8 buffers of 12 MB, two ranks: 80 ms against 38 ms).

    Args:
        group: The ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._rank, self.size = group, group.rank(), group.size()

    def start_average(
        self, pieces: Sequence[Tensor], owner: int | None, number: int
    ) -> Callable[[], Sequence[Tensor] | None]:
        """Start to average buffers over all ranks.

        Args:
            pieces: One-dimensional buffers, of the same sizes on every rank. The caller must not use them until the
                end. Afterwards their contents are undefined if ``owner`` is ``None`` or they are on a GPU; otherwise
                they are unchanged.
            owner: The rank that gets the averages; ``None`` for all ranks.
            number: Number of this exchange among the exchanges in flight.

        Returns:
            A function that waits and then returns the averages, or ``None`` on ranks that do not get them.
        """
        if owner is None or pieces[0].is_cuda:
            return self._start_collective(pieces, owner)
        if owner == self._rank:
            return self._start_receiving(pieces, number)
        works = [self._group.send([p], owner, number * _PIECES + n) for n, p in enumerate(pieces)]
        return partial(_finished, works, pieces, None)

    def start_broadcast(self, pieces: Sequence[Tensor], owner: int, number: int) -> Callable[[], object]:
        """Start to copy the owner's buffers to all ranks, in place.

        Returns:
            A function that waits for the end.
        """
        if pieces[0].is_cuda:
            collective = [dist.broadcast(p, owner, group=self._group, async_op=True) for p in pieces]
            return partial(_finished, collective, pieces, None)
        others = [rank for rank in range(self.size) if rank != self._rank]
        works = (
            [self._group.send([p], rank, number * _PIECES + n) for n, p in enumerate(pieces) for rank in others]
            if owner == self._rank
            else [self._group.recv([p], owner, number * _PIECES + n) for n, p in enumerate(pieces)]
        )
        return partial(_finished, works, pieces, None)

    def _start_collective(self, pieces: Sequence[Tensor], owner: int | None) -> Callable[[], Sequence[Tensor] | None]:
        works = []
        for piece in pieces:
            piece.mul_(1 / self.size)
            works.append(
                dist.all_reduce(piece, group=self._group, async_op=True)
                if owner is None
                else dist.reduce(piece, owner, group=self._group, async_op=True)
            )
        return partial(_finished, works, pieces, pieces if owner in (None, self._rank) else None)

    def _start_receiving(self, pieces: Sequence[Tensor], number: int) -> Callable[[], Sequence[Tensor]]:
        """Receive buffers, and add them to the first received buffer, because gradients may share memory."""
        others = [rank for rank in range(self.size) if rank != self._rank]
        arriving = [[torch.empty_like(piece) for _ in others] for piece in pieces]
        works = [
            self._group.recv([buffer], rank, number * _PIECES + n)
            for n, buffers in enumerate(arriving)
            for rank, buffer in zip(others, buffers, strict=True)
        ]

        def add_up() -> Sequence[Tensor]:
            _finished(works, pieces, None)
            totals = []
            for own, arrived in zip(pieces, arriving, strict=True):
                total, *more = [*arrived, own]
                if more:
                    total.mul_(1 / self.size)
                for summand in more:
                    total.add_(summand, alpha=1 / self.size)
                totals.append(total)
            return totals

        return add_up


def _finished(works: Sequence[Work | None], alive: Sequence[Tensor], result: _Result) -> _Result:
    """Wait for operations; ``alive`` keeps the buffers alive until then. Returns ``result``."""
    for work in works:
        assert work is not None, "every rank is in the group"
        work.wait()
    return result
