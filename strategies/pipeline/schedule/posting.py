"""The order in which processes give work to their devices: actions, and the sends and receives between processes.

NCCL buffers nothing: a send ends only when its receive runs. Streams need not progress independently, so the worst case
is a device that runs one operation at a time, in the order in which its process has posted them. A pipeline cannot
deadlock even then if there is one order of all actions and transfers of all processes, and every process posts its part
of them in that order: the first operation of that order that has not run is the next one on each device that takes part
in it. NCCL's documentation asks for the same: operations in one order on all ranks.

Two processes under 1F1B, where ``0SEND_F1`` and ``1SEND_B0`` cross. Process 1 posts its receive first, although the
result that it sends is there already; otherwise both devices would wait with a send::

    process 0           0F0 0SEND_F0 0F1 0SEND_F1          0RECV_B0 0B0 ...
    process 1  1RECV_F0 1F0 1B0          1RECV_F1 1SEND_B0 1F1 1B1 ...

What does not take place, such as the transfer of a gradient that nothing requires, may be left out of both rows.

Legend: m micro-batch, i stage of a table (a chunk of layers), e edge, r rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from strategies.pipeline.schedule.operations import Meeting, Operation, Post, edge_to
from strategies.pipeline.schedule.simulator import Step
from strategies.pipeline.schedule.timetable import Timetable, sources_of

_SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "b": 0.0, "a": 0.0}
"""Times of steps, as in :func:`~strategies.pipeline.schedule.simulator.driver_row`."""


def posting_order(timetable: Timetable, num_stages: int) -> list[list[Operation]]:
    """Return what each process posts in a pass: its row, with sends and receives.

    A send follows the action that it belongs to, before the next action. A receive precedes the action that needs it,
    after the action before that, unless sends would then wait for one another in a circle. In that case one of their
    receives is posted earlier, but not before what it receives is there, if actions take the times assumed here. So
    the order costs no time where streams are independent, neither on the devices nor where posting takes the time.

    Args:
        timetable: The rows.
        num_stages: The number of stages.
    """
    return _Posting([*timetable.rows[:-1], timetable.driver], num_stages).run()


def with_meetings(rows: Iterable[Sequence[Operation]], meetings: Sequence[Meeting]) -> list[list[Operation]]:
    """Append to the row of each process the meetings that it takes part in, in the order given."""
    return [[*row, *(meeting for meeting in meetings if r in meeting.ranks)] for r, row in enumerate(rows)]


class _Posting:
    """Runs rows on devices that run one operation at a time, and notes what runs. What can run earliest goes first.

    Args:
        rows: The steps of each process.
        num_stages: The number of stages.
    """

    def __init__(self, rows: Sequence[Sequence[Step]], num_stages: int) -> None:
        self._rows = rows
        self._place = {step: (r, k) for r, row in enumerate(rows) for k, step in enumerate(row)}
        self._source: dict[Step, Step] = {}
        """For each step that takes a result of another process, what computes it."""
        self._targets: dict[Step, list[Step]] = {}
        """For each step, those that take its result in other processes."""
        for r, row in enumerate(rows):
            for step in row:
                for source in sources_of(step, num_stages):
                    if source in self._place and self._place[source][0] != r:
                        self._source[step] = source
                        self._targets.setdefault(source, []).append(step)
        self._end: dict[Step, float] = {}
        """When each step ends if transfers take no time and delay no step."""
        self._start: dict[Step, float] = {}
        self._simulate()
        self._posted: list[list[Operation]] = [[] for _ in rows]
        self._next = [0] * len(rows)
        self._num_unsent = [0] * len(rows)
        """For each process, how many results of its last step have not been transferred."""
        self._waiting: set[Step] = set()
        """The steps that take such a result."""
        self._arrived: set[Step] = set()
        self._can_run: list[tuple[float, bool, Step]] = []
        """A heap of transfers to steps (``False``) and of steps (``True``), by time."""

    def run(self) -> list[list[Operation]]:
        """Return the operations of each process."""
        for r in range(len(self._rows)):
            self._look_at(r)
        while self._can_run or self._waiting:
            if not self._can_run:  # sends wait for one another in a circle
                self._transfer(min(filter(self._is_there, self._waiting), key=self._actions_ahead))
                continue
            _, is_step, step = heapq.heappop(self._can_run)
            r, place = self._place[step]
            if is_step and place == self._next[r]:  # else it has run: it was noted twice
                self._run(step)
            elif not is_step and step in self._waiting:
                self._transfer(step)
        return self._posted

    def _simulate(self) -> None:
        free, place = [0.0] * len(self._rows), [0] * len(self._rows)
        runnable, waiting = list(range(len(self._rows))), dict[Step, list[int]]()
        while runnable:
            r = runnable.pop()
            for step in self._rows[r][place[r] :]:
                source = self._source.get(step)
                if source is not None and source not in self._end:
                    waiting.setdefault(source, []).append(r)
                    break
                self._start[step] = free[r] if source is None else max(free[r], self._end[source])
                self._end[step] = free[r] = self._start[step] + _SECONDS[step[0]]
                place[r] += 1
                runnable += waiting.pop(step, [])
        assert len(self._end) == len(self._place), "the rows cannot run"

    def _look_at(self, r: int) -> None:
        """Note what a process can do next."""
        if self._next[r] == len(self._rows[r]):
            return
        step = self._rows[r][self._next[r]]
        if step in self._waiting:
            heapq.heappush(self._can_run, (self._end[self._source[step]], False, step))
        elif not self._num_unsent[r] and (step not in self._source or step in self._arrived):
            heapq.heappush(self._can_run, (self._end[step], True, step))

    def _run(self, step: Step) -> None:
        r, _ = self._place[step]
        self._posted[r].append(step)
        self._next[r] += 1
        for target in self._targets.get(step, ()):
            self._num_unsent[r] += 1
            self._waiting.add(target)
            self._look_at(self._place[target][0])
        self._look_at(r)

    def _transfer(self, target: Step) -> None:
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

    def _is_there(self, step: Step) -> bool:
        """Whether, in the simulation, the input of a step has been computed when its process comes to its next step."""
        r, _ = self._place[step]
        return self._end[self._source[step]] <= self._start[self._rows[r][self._next[r]]]

    def _actions_ahead(self, step: Step) -> tuple[int, float, Step]:
        r, k = self._place[step]
        return k - self._next[r], self._end[self._source[step]], step
