"""The order in which processes submit work to their devices: actions, and sends and receives between processes.

NCCL does not buffer: a send ends only when its receive runs. Streams need not progress independently, so the worst case
is a device that runs one operation at a time, in the order in which its process posted the operations. Even then, a
pipeline cannot deadlock if all processes post their operations in one common order. The first operation in this order
that has not run is the next operation of every device that takes part in it. NCCL's documentation requires the same:
operations in one order on all ranks.

Two processes under 1F1B, where ``0SEND_F1`` and ``1SEND_B0`` cross. Process 1 posts its receive first, although the
result to send already exists. Otherwise both devices would wait in a send::

    process 0           0F0 0SEND_F0 0F1 0SEND_F1          0RECV_B0 0B0 ...
    process 1  1RECV_F0 1F0 1B0          1RECV_F1 1SEND_B0 1F1 1B1 ...

A transfer that does not take place, such as of a gradient that is not required, may be left out of both rows.

Index letters: ``m`` micro-batch, ``i`` stage of a table (a chunk of layers), ``e`` edge, ``r`` rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from strategies.pipeline.schedule.deadlocks import assumed_times, running_order
from strategies.pipeline.schedule.operations import Computation, DeviceOperation, Post, edge_to


def direct_order(rows: Sequence[Sequence[Computation]], num_stages: int) -> list[list[DeviceOperation]]:
    """Return the rows with each receive directly before and each send directly after its computation.

    This order is for processes whose sends do not wait for receives. An earlier receive would only delay the
    computations in between.

    Args:
        rows: The computations of each process.
        num_stages: The number of stages.
    """
    row_of = {computation: r for r, row in enumerate(rows) for computation in row}
    receives: dict[Computation, Post] = {}
    sends: dict[Computation, list[Post]] = {}
    for r, computation, awaited in running_order(rows, num_stages):
        if awaited is not None:
            to = edge_to(computation)
            assert to is not None
            kind, edge = to
            receives[computation] = Post("RECV", kind, computation.microbatch, edge, row_of[awaited])
            sends.setdefault(awaited, []).append(Post("SEND", kind, computation.microbatch, edge, r))
    posted: list[list[DeviceOperation]] = []
    for row in rows:
        posted.append([])
        for computation in row:
            if computation in receives:
                posted[-1].append(receives[computation])
            posted[-1] += [computation, *sends.get(computation, ())]
    return posted


def posting_order(rows: Sequence[Sequence[Computation]], num_stages: int) -> list[list[DeviceOperation]]:
    """Return the operations that each process posts in a pass: its row, with sends and receives.

    A send directly follows its action. A receive directly precedes the action that needs it, unless sends would then
    wait for each other in a cycle. In that case one of their receives is posted earlier, but not before the value to
    receive exists, if actions take the assumed times. So the order costs no time if streams are independent, neither on
    the devices nor in the processes that post.

    Args:
        rows: The computations of each process.
        num_stages: The number of stages.
    """
    return _Posting(rows, num_stages).run()


class _Posting:
    """Simulates rows on devices that run one operation at a time, earliest first, and keeps the order.

    Args:
        rows: The computations of each process.
        num_stages: The number of stages.
    """

    def __init__(self, rows: Sequence[Sequence[Computation]], num_stages: int) -> None:
        self._rows = rows
        self._place = {computation: (r, k) for r, row in enumerate(rows) for k, computation in enumerate(row)}
        self._source: dict[Computation, Computation] = {}
        """For each computation that needs a result of another process, the computation of this result."""
        self._targets: dict[Computation, list[Computation]] = {}
        """For each computation, the computations of other processes that need its result."""
        order = running_order(rows, num_stages)
        for _, computation, source in order:
            if source is not None:
                self._source[computation] = source
                self._targets.setdefault(source, []).append(computation)
        self._start, self._end = assumed_times(order)
        self._posted: list[list[DeviceOperation]] = [[] for _ in rows]
        self._next = [0] * len(rows)
        self._num_unsent = [0] * len(rows)
        """For each process, the number of results of its last computation that have not been transferred."""
        self._waiting: set[Computation] = set()
        """The computations that need such a result."""
        self._arrived: set[Computation] = set()
        self._can_run: list[tuple[float, bool, Computation]] = []
        """A heap of transfers to computations (``False``) and of computations (``True``), by time."""

    def run(self) -> list[list[DeviceOperation]]:
        """Return the operations of each process."""
        for r in range(len(self._rows)):
            self._look_at(r)
        while self._can_run or self._waiting:
            if not self._can_run:  # sends wait for each other in a cycle
                self._transfer(min(filter(self._is_there, self._waiting), key=self._actions_ahead))
                continue
            _, is_computation, computation = heapq.heappop(self._can_run)
            r, place = self._place[computation]
            if is_computation and place == self._next[r]:  # otherwise it has run already: it was added twice
                self._run(computation)
            elif not is_computation and computation in self._waiting:
                self._transfer(computation)
        return self._posted

    def _look_at(self, r: int) -> None:
        """Add the operations that a process can run next."""
        if self._next[r] == len(self._rows[r]):
            return
        computation = self._rows[r][self._next[r]]
        if computation in self._waiting:
            heapq.heappush(self._can_run, (self._end[self._source[computation]], False, computation))
        elif not self._num_unsent[r] and (computation not in self._source or computation in self._arrived):
            heapq.heappush(self._can_run, (self._end[computation], True, computation))

    def _run(self, computation: Computation) -> None:
        r, _ = self._place[computation]
        self._posted[r].append(computation)
        self._next[r] += 1
        for target in self._targets.get(computation, ()):
            self._num_unsent[r] += 1
            self._waiting.add(target)
            self._look_at(self._place[target][0])
        self._look_at(r)

    def _transfer(self, target: Computation) -> None:
        source_rank, target_rank = self._place[self._source[target]][0], self._place[target][0]
        to = edge_to(target)
        assert to is not None
        kind, edge = to
        self._posted[source_rank].append(Post("SEND", kind, target.microbatch, edge, target_rank))
        self._posted[target_rank].append(Post("RECV", kind, target.microbatch, edge, source_rank))
        self._waiting.remove(target)
        self._arrived.add(target)
        self._num_unsent[source_rank] -= 1
        self._look_at(source_rank)
        self._look_at(target_rank)

    def _is_there(self, computation: Computation) -> bool:
        """Whether, at the assumed times, the input exists when the process reaches its next computation."""
        r, _ = self._place[computation]
        return self._end[self._source[computation]] <= self._start[self._rows[r][self._next[r]]]

    def _actions_ahead(self, computation: Computation) -> tuple[int, float, Computation]:
        r, k = self._place[computation]
        return k - self._next[r], self._end[self._source[computation]], computation
