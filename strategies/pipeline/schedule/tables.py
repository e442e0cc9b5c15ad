"""Schedules as data: for each process a row of actions, in the order in which the process runs them.

A schedule sets the order of a process's actions and no times: a process runs the next action of its row as soon as the
input of that action has arrived. Four micro-batches on three stages, with forward and backward passes of equal cost
(printed by :func:`~strategies.planning.simulator.render`; ``F3`` is the forward pass of micro-batch 3, ``B3``
its backward pass, ``.`` is idle time)::

    gpipe: all forward, then all backward passes      1f1b: each stage runs a backward pass as soon as it can

    stage 0  F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0      stage 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    stage 1  .  F0 F1 F2 F3 .  .  B3 B2 B1 B0 .       stage 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    stage 2  .  .  F0 F1 F2 F3 B3 B2 B1 B0 .  .       stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

    live activations: 4, 4, 4                         live activations: 3, 2, 1

Both schedules take the same time; the bubble, which is the idle share of the grid, is (p - 1) / (m + p - 1). They
differ in memory: ``gpipe`` keeps the activations of every micro-batch on every stage, ``1f1b`` those of at most p - i
micro-batches on stage i.

The other schedules shorten the bubble in two ways. A process may have several stages, so that the first micro-batch
reaches the last process sooner (:func:`interleaved`). A backward pass may be split into input gradients (``I``), for
which the preceding stage waits, and weight gradients (``W``), for which no stage waits and which fill idle time
(:func:`zb_h1`). :func:`zbv` and :func:`v_half` do both.

Index letters: ``m`` micro-batch (in formulas, the number of micro-batches), ``i`` stage, ``r`` process (the number of a
row), ``p`` number of processes, ``v`` number of stages per process.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Literal, NamedTuple, TypeAlias, cast, get_args

Kind: TypeAlias = Literal["F", "B", "I", "W"]
"""Forward pass, whole backward pass, input gradients, weight gradients."""

KINDS: tuple[Kind, ...] = get_args(Kind)

_ACTION = re.compile(rf"(\d+)([{''.join(KINDS)}])(\d+)")


class Action(NamedTuple):
    """One pass of one micro-batch through one stage. Prints as ``2F0``: stage 2, forward pass, micro-batch 0.

    This is how ``torch.distributed.pipelining`` prints and parses its actions, with the same letters.
    """

    kind: Kind
    microbatch: int
    stage: int

    def __repr__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that prints as ``text``.

        Raises:
            ValueError: If ``text`` is not an action.
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"{text.strip()!r} is not an action; an action is the number of a stage, one of {', '.join(KINDS)} and "
                "the number of a micro-batch, such as 2F0"
            )
        stage, kind, microbatch = match.groups()
        return cls(cast(Kind, kind), int(microbatch), int(stage))


ActionTable: TypeAlias = list[list[Action]]
"""One row of actions per process, in the order in which the process runs them."""


def recomputed(row: Iterable[tuple[str, int, int]], mode: str, microbatches: int) -> frozenset[tuple[int, int]]:
    """Return the micro-batch and the stage of each forward pass of a row that runs again in the backward pass.

    Args:
        row: The kind, micro-batch and stage of each action of a process in a pass, or in a part of a pass.
        mode: ``"always"``, ``"never"``, or ``"except_last"``. The latter keeps the activations of the last micro-batch,
            and of every micro-batch whose backward pass is the next action of the process: its activations would be
            there again at once. Under ``1f1b`` this is so for all micro-batches of the last stage.
        microbatches: Number of micro-batches.
    """
    if mode == "never":
        return frozenset()
    again: list[tuple[int, int]] = []
    last: tuple[int, int] | None = None
    for kind, m, i in row:
        if last == (m, i) and kind != "F":
            again.pop()
        last = None
        if kind == "F" and (mode == "always" or m < microbatches - 1):
            again.append((m, i))
            last = (m, i) if mode == "except_last" else None
    return frozenset(again)


def num_recomputed(mode: str, microbatches: int) -> int:
    """Return how many micro-batches, from the first one, a stage recomputes if all forward passes come first."""
    return len(recomputed([("F", m, 0) for m in range(microbatches)], mode, microbatches))


@dataclass(frozen=True)
class Placement:
    """The process of each stage.

    Attributes:
        process_of: For each stage, its process.
        num_lists: Number of lists of layers, which run one after another. Each has equally many stages, and the driver
            has the last stage of each.
    """

    process_of: tuple[int, ...]
    num_lists: int = 1

    @property
    def firsts(self) -> list[int]:
        """The first stage of each list, which gets its input from the driver's code."""
        return [*range(0, self.num_stages, self.num_stages // self.num_lists)]

    def list_of(self, stage: int) -> int:
        """Return the number of the list of a stage."""
        return stage * self.num_lists // self.num_stages

    def repeated(self, num_lists: int) -> Placement:
        """Return the placement of several lists, each of which has the stages of this placement."""
        return Placement(self.process_of * num_lists, num_lists)

    @property
    def num_stages(self) -> int:
        return len(self.process_of)

    @property
    def driver(self) -> int:
        """The process that runs the user's script: the one with the last stage, whose output the loss needs."""
        return self.process_of[-1]

    def stages_of(self, process: int) -> list[int]:
        """Return the stages of a process, in the order of the layers."""
        return [stage for stage, own in enumerate(self.process_of) if own == process]

    @classmethod
    def of(cls, table: ActionTable) -> Placement:
        """Return the placement that a table has.

        Raises:
            ValueError: If a stage has actions on two processes, or none at all.
        """
        process_of: dict[int, int] = {}
        for process, row in enumerate(table):
            for action in row:
                known = process_of.setdefault(action.stage, process)
                if known != process:
                    raise ValueError(
                        f"process {process} has {action}, but process {known} has other actions of stage "
                        f"{action.stage}; all actions of a stage belong to one process"
                    )
        if not process_of:
            raise ValueError("the schedule has no actions")
        missing = next((stage for stage in range(max(process_of)) if stage not in process_of), None)
        if missing is not None:
            raise ValueError(f"no process has actions of stage {missing}, but there is a stage {max(process_of)}")
        return cls(tuple(process_of[stage] for stage in range(len(process_of))))


def loop(processes: int, chunks: int = 1) -> Placement:
    """Place stage i on process i % p: ``0 2 | 1 3`` for two processes with two chunks. The last process is the driver.

    Raises:
        ValueError: If there is fewer than one process or chunk.
    """
    _check_positive(processes=processes, chunks=chunks)
    return Placement(tuple(stage % processes for stage in range(processes * chunks)))


def v(processes: int) -> Placement:
    """Place stages in the shape of a V, ``0 3 | 1 2`` for two processes, so that process 0, the driver, has both ends.

    Raises:
        ValueError: If there is fewer than one process.
    """
    _check_positive(processes=processes)
    return Placement((*range(processes), *reversed(range(processes))))


def gpipe(stages: int, microbatches: int, lists: int = 1) -> ActionTable:
    """All forward passes, then all backward passes in reverse order (Huang et al., 2019, https://arxiv.org/abs/1811.06965).

    The backward passes begin with the last micro-batch: its activations were computed last, and
    ``checkpoint="except_last"`` keeps them, so the last stage starts its backward passes without recomputation.

    If there are several lists of layers, all micro-batches pass through one list after another, and back::

        process 0  0F0 0F1 .   2F0 2F1 .   .   2B1 2B0 .   0B1 0B0
        process 1  .   1F0 1F1 .   3F0 3F1 3B1 3B0 .   1B1 1B0 .

    Raises:
        ValueError: If there is fewer than one stage, micro-batch or list.
    """
    _check_positive(stages=stages, microbatches=microbatches, lists=lists)
    forward, numbers = range(0, stages * lists, stages), range(microbatches)
    return [
        [Action("F", m, first + i) for first in forward for m in numbers]
        + [Action("B", m, first + i) for first in reversed(forward) for m in reversed(numbers)]
        for i in range(stages)
    ]


def one_f_one_b(stages: int, microbatches: int) -> ActionTable:
    """Alternate forward and backward passes (Narayanan et al., 2019, "PipeDream-Flush", https://arxiv.org/abs/2006.09503).

    Stage i starts with p - i forward passes, as many as there are stages from stage i to the last one: the first
    gradient arrives after these. From then on each backward pass frees the memory that the next forward pass needs.

    Raises:
        ValueError: If there is fewer than one stage or micro-batch.
    """
    _check_positive(stages=stages, microbatches=microbatches)
    numbers = range(microbatches)
    return [
        _alternated([Action("F", m, i) for m in numbers], [Action("B", m, i) for m in numbers], warm_up=stages - 1 - i)
        for i in range(stages)
    ]


def interleaved(processes: int, microbatches: int, chunks: int = 2) -> ActionTable:
    """1F1B over several stages per process (Narayanan et al., 2021, section 2.2, https://arxiv.org/abs/2104.04473)::

        process 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
        process 1  .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .

    The micro-batches form rounds of about p. A process runs a round through its first stage, then through its second
    stage, and so on; backward passes use the stages in reverse order. The bubble is 1 / v of the bubble of 1F1B,
    because it consists of passes through stages that are v times shorter. Process r holds up to
    (v - 1) p + 2 (p - 1 - r) + 1 activations of such stages if rounds have p micro-batches.

    The paper requires m to be a multiple of p. Here, m // p rounds differ in size by at most one; the larger ones come
    first.

    Raises:
        ValueError: If there is fewer than one process, micro-batch or chunk.
    """
    return _in_rounds(processes, microbatches, chunks, hop=2)


def zb_h1(processes: int, microbatches: int, chunks: int = 1) -> ActionTable:
    """Delay weight gradients until the preceding stage has its gradients (Qi et al., 2023, https://arxiv.org/abs/2401.10241)::

        stage 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        stage 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        stage 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    The order is that of 1F1B; ``W`` runs on process r with a delay of r micro-batches. So every process holds the
    activations of up to p micro-batches, which is the maximum under 1F1B, and the bubble is (p - 1)(F + I - W) instead
    of (p - 1)(F + I + W).

    With several chunks per process, the order of :func:`interleaved` replaces the order of 1F1B.

    Raises:
        ValueError: If there is fewer than one process, micro-batch or chunk.
    """
    return _in_rounds(processes, microbatches, chunks, hop=1, splits=True)


def zbv(processes: int, microbatches: int) -> ActionTable:
    """Split backward passes under the placement :func:`v` (Qi et al., 2023, section 6, https://arxiv.org/abs/2401.10241)::

        process 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .
        process 1  .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    If forward pass, input gradients and weight gradients take the same time, the bubble consists of p - 1 passes
    through a stage, from 2p - 1 micro-batches on. Each process holds up to 2p activations of stages that are half as
    long as those of 1F1B: as much as the first process under 1F1B.

    Raises:
        ValueError: If there is fewer than one process or micro-batch.
    """
    _check_positive(processes=processes, microbatches=microbatches)
    num = max(microbatches, 2 * processes - 1)  # as many as fill the pipeline; the surplus is left out below
    rows = []
    for r in range(processes):
        row, (first, last) = _GrowingRow(), v(processes).stages_of(r)
        row.add(first, "F", times=2 * (processes - r) - 1)
        for _ in range(r):
            row.add(last, "F").add(first, "F")
        row.add(last, "F", "I", "W", times=processes - r)
        while row.count["F", last] < num:
            if row.count["F", first] < num:
                row.add(first, "F")
            row.add(first, "I", "W").add(last, "F", "I", "W")
        for _ in range(r):
            row.add(first, "I").add(last, "I")
        row.add(first, "I", "W", times=processes - r)
        for stage in (last, first):
            row.add(stage, "W", times=num - row.count["W", stage])
        rows.append(row.actions)
    return shortened(rows, microbatches)


def v_half(processes: int, microbatches: int) -> ActionTable:
    """Half of 1F1B's activations, under the placement :func:`v` (Qi et al., 2024, https://arxiv.org/abs/2405.15362)::

        process 0  0F0 .   .   3F0 3I0 0F1 3W0 .   3F1 3I1 0F2 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2
        process 1  .   1F0 2F0 .   .   2I0 1F1 2F1 1I0 2W0 2I1 1F2 1W0 2F2 1I1 2W1 2I2 1I2 1W1 2W2 1W2

    Every micro-batch repeats the same block, six units of time later than the previous micro-batch. A unit is a forward
    pass, an input gradient or a weight gradient of one stage. Within a block, adjacent stages run a micro-batch 2 units
    apart in one direction and 1 unit apart in the other. Forward and backward pass together, and so the lifetime of
    activations, take 3 units per stage, instead of 6 under :func:`zbv`.

    The blocks give the order of ``F`` and ``I``. ``W`` fills the time in which a process would wait, and precedes a
    forward pass that would exceed the memory of the repeating part: p + 1 activations if p is odd, p + 2 if p is even,
    of stages that are half as long as those of 1F1B.

    Raises:
        ValueError: If there is fewer than one process or micro-batch.
    """
    _check_positive(processes=processes, microbatches=microbatches)
    p, process_of = processes, v(processes).process_of
    timed = sorted(
        (start + _BLOCK_UNITS * m, action._replace(microbatch=m))
        for action, start in _block(p).items()
        for m in range(microbatches)
    )
    rows = [[action for _, action in timed if process_of[action.stage] == r] for r in range(p)]
    limit = [p + 1 if p % 2 else p + 2] * p
    return with_weight_gradients(rows, lambda action: 1.0, limit)


_BLOCK_UNITS = 6  # a process runs F, I and W of two stages


def _block(p: int) -> dict[Action, int]:
    """Return when V-Half starts each forward pass and each input gradient of micro-batch 0, in units.

    A micro-batch goes down the V through stages 0 to p - 1, up through p to 2p - 1, and back the same way. A delay at
    each of the three turns keeps the four passes of a process apart, modulo the units of a block.
    """
    placement = v(p)
    down, up = range(p), range(p, 2 * p)
    forward = [[Action("F", 0, i) for i in stages] for stages in (down, up)]
    back = [[Action("I", 0, i) for i in reversed(stages)] for stages in (up, down)]
    for delays in sorted(product(range(1, _BLOCK_UNITS + 1), repeat=3), key=sum):
        starts: dict[Action, int] = {}
        time = 0
        for passes, step, delay in zip([*forward, *back], (2, 1, 2, 1), (*delays, 0), strict=True):
            starts |= {action: time + step * k for k, action in enumerate(passes)}
            time += step * (p - 1) + delay
        slots = Counter((placement.process_of[action.stage], time % _BLOCK_UNITS) for action, time in starts.items())
        if max(slots.values()) == 1:
            return starts
    raise AssertionError(f"no delays keep the passes of {p} processes apart")


def with_weight_gradients(
    rows: ActionTable, seconds: Callable[[Action], float], limit: Iterable[int] | None = None
) -> ActionTable:
    """Insert ``W`` into rows of ``F`` and ``I`` where a process would wait or has no memory left. Keeps their order.

    Args:
        rows: A table that can run, except that it has no weight gradients.
        seconds: Returns the time of an action. Transfers take no time.
        limit: The maximum number of activations of each process. A forward pass that would exceed it waits for weight
            gradients, if there are any to compute. Without limits, ``W`` only fills idle time.
    """
    limits = list(limit) if limit is not None else [sum(map(len, rows))] * len(rows)
    num_stages = 1 + max(action.stage for row in rows for action in row)
    filled: ActionTable = [[] for _ in rows]
    ended: dict[Action, float] = {}
    held, place = [0] * len(rows), [0] * len(rows)
    pending: list[deque[Action]] = [deque() for _ in rows]
    free = [(0.0, r) for r in range(len(rows))]  # a heap: when a process can take its next action
    idle: list[int] = []
    while free:
        now, r = heapq.heappop(free)
        chosen = None
        if place[r] < len(rows[r]):
            action = rows[r][place[r]]
            is_ready = all(ended.get(need, now + 1) <= now for need in needs_of(action, num_stages, split=True))
            if is_ready and (action.kind != "F" or held[r] < limits[r] or not pending[r]):
                chosen = action
                place[r] += 1
        if chosen is None and pending[r]:
            chosen = pending[r].popleft()
        if chosen is None:
            idle.append(r)
        else:
            filled[r].append(chosen)
            ended[chosen] = now + seconds(chosen)
            held[r] += {"F": 1, "W": -1}.get(chosen.kind, 0)
            if chosen.kind == "I":
                pending[r].append(chosen._replace(kind="W"))
            heapq.heappush(free, (ended[chosen], r))
        if free and (chosen is not None or free[0][0] > now):  # idle processes may wait for the action that ends next
            for waiting in idle:
                heapq.heappush(free, (free[0][0], waiting))
            idle = []
    assert place == [len(row) for row in rows], "the rows cannot run"
    return filled


def needs_of(action: Action, num_stages: int, *, split: bool) -> tuple[Action, ...]:
    """Return the actions whose results an action needs.

    Args:
        action: The action.
        num_stages: The number of stages.
        split: Whether the next stage splits the micro-batch's backward pass.
    """
    kind, m, i = action
    if kind == "F":
        return (Action("F", m, i - 1),) if i > 0 else ()
    if kind == "W":
        return (Action("I", m, i),)
    own = Action("F", m, i)
    return (own, Action("I" if split else "B", m, i + 1)) if i + 1 < num_stages else (own,)


def shortened(table: ActionTable, microbatches: int) -> ActionTable:
    """Return the first ``microbatches`` micro-batches of a table. The result can run if the whole table can."""
    return [[action for action in row if action.microbatch < microbatches] for row in table]


def _in_rounds(p: int, microbatches: int, chunks: int, *, hop: int, splits: bool = False) -> ActionTable:
    """Run micro-batches through the stages of a process in rounds.

    Args:
        p: The number of processes.
        microbatches: The number of micro-batches.
        chunks: The number of stages per process.
        hop: The number of forward passes by which a process is ahead of the next process.
        splits: Whether backward passes are split. In that case ``W`` of process r runs r passes after ``I``.
    """
    _check_positive(processes=p, microbatches=microbatches, chunks=chunks)
    num_rounds = max(1, microbatches // p)
    size, num_larger = divmod(microbatches, num_rounds)
    starts = [size * k + min(k, num_larger) for k in range(num_rounds + 1)]
    rounds = [range(start, end) for start, end in pairwise(starts)]
    rows = []
    for r in range(p):
        stages = loop(p, chunks).stages_of(r)
        forward = [Action("F", m, i) for these in rounds for i in stages for m in these]
        gradients = [Action("I" if splits else "B", m, i) for these in rounds for i in reversed(stages) for m in these]
        warm_up = (chunks - 1) * len(rounds[0]) + hop * (p - 1 - r)
        row = _alternated(forward, gradients, warm_up=warm_up)
        rows.append(_delayed_weight_gradients(row, delay=r) if splits else row)
    return rows


def _alternated(forward: list[Action], backward: list[Action], *, warm_up: int) -> list[Action]:
    """Return ``warm_up`` forward passes, then alternating forward and backward passes, then all remaining passes."""
    row, rest = forward[:warm_up], forward[warm_up:]
    for k, action in enumerate(backward):
        row += [*rest[k : k + 1], action]
    return row


def _delayed_weight_gradients(row: list[Action], *, delay: int) -> list[Action]:
    pending: deque[Action] = deque()
    filled = []
    for action in row:
        filled.append(action)
        if action.kind == "I":
            pending.append(action._replace(kind="W"))
            if len(pending) > delay:
                filled.append(pending.popleft())
    return [*filled, *pending]


class _GrowingRow:
    """A row under construction. Each kind of action of a stage takes the micro-batches in ascending order.

    Attributes:
        actions: The row.
        count: For each kind and stage, the number of actions.
    """

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.count: Counter[tuple[Kind, int]] = Counter()

    def add(self, stage: int, *kinds: Kind, times: int = 1) -> _GrowingRow:
        """Append an action of each kind, for the next micro-batch of this kind; do this ``times`` times."""
        for kind in kinds * times:
            self.actions.append(Action(kind, self.count[kind, stage], stage))
            self.count[kind, stage] += 1
        return self


class Named(NamedTuple):
    """A schedule that a user can choose by name.

    Attributes:
        table: Returns the table for a number of processes, micro-batches and stages per process.
        placement: Returns the process of each stage, given the number of processes and of stages per process.
        chunks: The smallest, the default and the largest number of stages per process.
        lists: Returns the table of several lists of layers, given the number of stages per process in all lists: each
            list is one more round over the processes. ``None`` if the schedule is for one list.
    """

    table: Callable[[int, int, int], ActionTable]
    placement: Callable[[int, int], Placement]
    chunks: tuple[int, int, int]
    lists: Callable[[int, int, int], ActionTable] | None = None

    def of(self, processes: int, microbatches: int, chunks: int, num_lists: int = 1) -> ActionTable:
        """Return the table of all lists of layers.

        Args:
            processes: Number of processes.
            microbatches: Number of micro-batches.
            chunks: Number of stages per process in each list.
            num_lists: Number of lists.
        """
        if num_lists == 1:
            return self.table(processes, microbatches, chunks)
        assert self.lists is not None
        return self.lists(processes, microbatches, chunks * num_lists)


SCHEDULES: Mapping[str, Named] = {
    "gpipe": Named(lambda p, m, chunks: gpipe(p, m), loop, (1, 1, 1), gpipe),
    "1f1b": Named(lambda p, m, chunks: one_f_one_b(p, m), loop, (1, 1, 1), interleaved),
    "interleaved": Named(interleaved, loop, (2, 2, 2**10), interleaved),
    "zb-h1": Named(zb_h1, loop, (1, 1, 2**10), zb_h1),
    "zbv": Named(lambda p, m, chunks: zbv(p, m), lambda p, chunks: v(p), (2, 2, 2)),
    "v-half": Named(lambda p, m, chunks: v_half(p, m), lambda p, chunks: v(p), (2, 2, 2)),
}
"""The schedules that a user can choose, by name."""


def _check_positive(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
