"""The program of each process of a pipeline: rows of actions, the places of the user's code, and bounds on messages.

The schedules themselves, such as ``gpipe`` and ``1f1b``, are in :mod:`~strategies.pipeline.schedule.tables`.

In this module processes have ranks. The driver has the last rank, whichever row of the table it has. Under the
placement ``V`` of four stages, the process with the first and the last stage has row 0 of the table and rank 1.

Index letters: ``m`` micro-batch, ``i`` stage of a table (a chunk of layers), ``r`` rank.
"""

import pickle
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal

from strategies.pipeline.schedule.deadlocks import assumed_times, check_complete, running_order, sources_of
from strategies.pipeline.schedule.operations import (
    Computation,
    Edge,
    Operation,
    Post,
    Result,
    Row,
    Tied,
    UserCode,
    edge_to,
)
from strategies.pipeline.schedule.posting import direct_order
from strategies.pipeline.schedule.tables import Action, ActionTable, Placement

MIN_UNDER_WAY = 2
"""The number of values in transit on a channel may exceed the number of stages by at least this much."""


@dataclass(frozen=True)
class Program:
    """The operations of all processes in a pass, or in a part of a pass.

    Attributes:
        rows: The operations of each rank: its actions, sends and receives, the exchange of tied parameters, and in the
            driver's row, which is the last, the user's code: before the call of a list of layers (``b``, which sends
            the input of a micro-batch to the first stage), its backward pass (``a``, which receives the gradients of
            the input), and where the code takes the output of the last stage (:class:`Result`).
    """

    rows: Sequence[Row]

    @property
    def actions(self) -> list[list[Action]]:
        """The actions of each rank, in order."""
        return [[operation for operation in row if isinstance(operation, Action)] for row in self.rows]

    @cached_property
    def splits(self) -> bool:
        """Whether some backward passes have two parts."""
        return any(action.kind == "W" for row in self.actions for action in row)

    @cached_property
    def of_workers(self) -> list[bytes]:
        """The pickled row of each worker."""
        return [pickle.dumps(row) for row in self.rows[:-1]]

    def from_stage(self, first: int) -> "Program":
        """Return this program with its stages and edges numbered from ``first`` on."""

        def later(operation: Operation) -> Operation:
            if isinstance(operation, Post):
                return operation._replace(edge=operation.edge + first)
            if isinstance(operation, Action | UserCode):
                return operation._replace(stage=operation.stage + first)
            return operation

        return Program([[*map(later, row)] for row in self.rows])


AddPosts = Callable[[Sequence[Sequence[Computation]], int], Sequence[Row]]
"""Adds sends and receives to the computations of each process, given the number of stages."""

ProgramPart = Literal["training", "forward", "backward"]
"""Which passes a program has; see :class:`Programs`."""


class Programs(dict[tuple[ProgramPart, int, int], Program]):
    """The programs of a pipeline, by part, number of micro-batches and list of layers.

    The parts are ``"training"`` for interleaved forward and backward passes; ``"forward"`` for forward passes only;
    ``"backward"`` for the backward passes of all micro-batches, after all forward passes. A list of layers is given by
    its number. Under ``"training"``, 0 stands for all lists if there is a table of all lists; otherwise it stands for
    the first list.

    A program is computed when it is first needed. This raises a ``ValueError`` if the table is incomplete or deadlocks,
    if the order of micro-batches differs between stages, or if the placement of stages differs from ``placement``.

    Args:
        schedule: Returns the table for a number of micro-batches.
        placement: The row of the table for each stage.
        add_posts: Adds sends and receives.
        at_once: Whether each process receives all gradients before it runs its backward passes, if these follow all
            forward passes.
        num_lists: Number of lists of layers. ``schedule`` and ``placement`` are those of one list.
        lists: Returns the table of all lists, for schedules that interleave their passes.

    Attributes:
        placement: The row of the table for each stage of all lists.
        rank_of: The rank of each stage of all lists.
    """

    def __init__(
        self,
        schedule: Callable[[int], ActionTable],
        placement: Placement,
        add_posts: AddPosts = direct_order,
        *,
        at_once: bool = False,
        num_lists: int = 1,
        lists: Callable[[int], ActionTable] | None = None,
    ) -> None:
        self._schedule, self._placement, self._add_posts, self._at_once = schedule, placement, add_posts, at_once
        super().__init__()
        self._lists = lists
        self.placement = placement.repeated(num_lists)
        self.rank_of = ranks_of(self.placement)

    def __missing__(self, key: tuple[ProgramPart, int, int]) -> Program:
        part, microbatches, number = key
        assert number == 0 or part != "training" or self._lists is None, "this table has all lists"
        if number:
            found = self[part, microbatches, 0].from_stage(self.placement.firsts[number])
        elif part == "training":
            found = self._training(microbatches)
        elif part == "forward":
            found = forward_program(self._placement, microbatches, self._add_posts)
        else:
            found = self._backward(microbatches)
        self[key] = found
        return found

    def actions_of_step(self, microbatches: int) -> list[list[Action]]:
        """Return the actions of each rank in a training step, of all lists."""
        numbers = range(self.placement.num_lists)
        if self._lists is not None or len(numbers) == 1:
            return self["training", microbatches, 0].actions
        forward = [self["forward", microbatches, number].actions for number in numbers]
        backward = [self["backward", microbatches, number].actions for number in reversed(numbers)]
        return [[*chain(*rows)] for rows in zip(*forward, *backward, strict=True)]

    def _training(self, microbatches: int) -> Program:
        placement = self._placement if self._lists is None else self.placement
        table = (self._lists or self._schedule)(microbatches)
        check_order(table)
        if (other := Placement.of(table).process_of) != placement.process_of:
            raise ValueError(
                f"the table for {microbatches} micro-batches has stages 0, 1, ... on processes {other}, but the layers "
                f"were divided for {placement.process_of}; a stage must have one process in all tables"
            )
        rows: list[list[Computation]] = [list(row) for row in table]
        rows[placement.driver] = driver_row(table, placement.firsts)
        exchanges = Tied("values"), Tied("gradients")
        return _compiled(rows, _limit(rows, placement), placement, self._add_posts, exchanges)

    def _backward(self, microbatches: int) -> Program:
        placement = self._placement
        rows: list[list[Computation]] = [
            [action for action in row if action.kind != "F"] for row in self._schedule(microbatches)
        ]
        limit, own, last = _limit(rows, placement), rows[placement.driver], placement.num_stages - 1
        own += [UserCode("a", m) for kind, m, i in list(own) if i == last and kind != "W"]
        # The driver receives the gradients of inputs after its own backward passes, however many there are.
        unlimited: Edge = "B", 0
        found = _compiled(rows, limit, placement, self._add_posts, (None, Tied("gradients")), unlimited)
        return Program([_at_once(row) for row in found.rows]) if self._at_once else found


def ranks_of(placement: Placement) -> tuple[int, ...]:
    """Return the rank of the process of each stage. The driver has the last rank; the workers keep their order."""
    num = 1 + max(placement.process_of)
    return tuple((process - placement.driver - 1) % num for process in placement.process_of)


def driver_row(table: ActionTable, firsts: Sequence[int] = (0,)) -> list[Computation]:
    """Return the driver's row with the user's code before the call of the module (``b``) and its backward pass (``a``).

    If the driver has stage 0, ``b`` directly precedes the stage's forward pass, and ``a`` follows its backward pass.
    Otherwise ``b`` runs early, so that stage 0 need not wait for it: before actions of the driver that start less than
    the time of one micro-batch before the forward pass of stage 0. ``a`` runs equally long after the backward pass of
    stage 0, so that the driver need not wait either (three stages, with ``B`` twice as long as ``F``)::

        stage 0  .  F0 F1 F2 .  .  .  .  B0 == F3 .  B1 == .  B2 == .  .  B3 == .
        stage 1  .  .  F0 F1 .  .  B0 == F2 .  B1 == F3 B2 == .  .  B3 == .  .  .
        stage 2  b0 b1 b2 F0 B0 == F1 b3 B1 == F2 B2 == F3 a0 B3 == a1 a2 .  .  a3

    The places follow from the times of :func:`~strategies.pipeline.schedule.deadlocks.assumed_times`, so they
    cannot cause a deadlock. The code between two lists of layers directly follows the forward pass of the last stage of
    the earlier list, and its backward pass directly precedes that of the stage.

    Args:
        table: The table.
        firsts: The first stage of each list of layers.

    Raises:
        ValueError: If the table is incomplete or deadlocks.
    """
    placement = check_complete(table)
    start, end = assumed_times(running_order(table, placement.num_stages))
    driver, num = placement.driver, 1 + max(action.microbatch for row in table for action in row)
    row: list[Computation] = []
    gradients = {m: Action("B", m, 0) if Action("B", m, 0) in end else Action("I", m, 0) for m in range(num)}
    if len(firsts) > 1:
        inside = driver_row(table)
        for step in inside:
            between = isinstance(step, Action) and step.kind != "W" and step.stage + 1 in firsts[1:]
            if between and step[0] != "F":
                row.append(UserCode("a", step.microbatch, step.stage + 1))
            row.append(step)
            if between and step[0] == "F":
                row.append(UserCode("b", step.microbatch, step.stage + 1))
        return row
    if placement.process_of[0] == driver:
        for action in table[driver]:
            if action.stage == 0 and action.kind == "F":
                row.append(UserCode("b", action.microbatch))
            row.append(action)
            if gradients[action.microbatch] == action:
                row.append(UserCode("a", action.microbatch))
        return row
    lead = 3.0 * len(placement.stages_of(driver))
    starts = [start[action] for action in table[driver]]
    before: list[list[Computation]] = [[] for _ in range(len(starts) + 1)]
    for m in range(num):
        before[bisect_left(starts, start[Action("F", m, 0)] - lead)].append(UserCode("b", m))
    for m in range(num):
        before[bisect_left(starts, end[gradients[m]] + lead)].append(UserCode("a", m))
    for action, code in zip(table[driver], before, strict=False):
        row += [*code, action]
    return [*row, *before[-1]]


def row_at_once(table: ActionTable, placement: Placement) -> list[Computation]:
    """Return the driver's row if the code between two lists of layers runs once for a batch, between their passes.

    Its parts for the micro-batches follow each other: after all forward passes of the earlier list, and after all
    backward passes of the later list.

    Args:
        table: All forward passes, then all backward passes, one list after another.
        placement: The process of each stage.
    """
    row: list[Computation] = []
    before = 0
    for action in table[placement.driver]:
        part: Literal["b", "a"] = "b" if action.kind == "F" else "a"
        number = placement.list_of(action.stage)
        if number != before:
            numbers = [each.microbatch for each in table[placement.driver] if each[::2] == action[::2]]
            row += [UserCode(part, m, placement.firsts[max(number, before)]) for m in numbers]
        row.append(action)
        before = number
    return row


def forward_table(placement: Placement, microbatches: int) -> ActionTable:
    """Return a table of forward passes, in which each process prefers the last of its stages that can run."""
    num = placement.num_stages
    table: ActionTable = [[] for _ in range(1 + max(placement.process_of))]
    next_of = [0] * num
    while sum(next_of) < num * microbatches:
        ready = [i for i in range(num) if next_of[i] < (next_of[i - 1] if i else microbatches)]
        for process, row in enumerate(table):
            own = [i for i in ready if placement.process_of[i] == process]
            if own:
                row.append(Action("F", next_of[own[-1]], own[-1]))
        for row in table:
            if row and next_of[row[-1].stage] == row[-1].microbatch:
                next_of[row[-1].stage] += 1
    return table


def fill_drain_table(placement: Placement, microbatches: int) -> ActionTable:
    """Return ``gpipe`` under any placement: the forward passes, then the backward passes in reverse order."""
    return [[*row, *(Action("B", m, i) for _, m, i in reversed(row))] for row in forward_table(placement, microbatches)]


def forward_program(placement: Placement, microbatches: int, add_posts: AddPosts = direct_order) -> Program:
    """Return a program of forward passes only, those of :func:`forward_table`.

    The driver sends inputs at most two micro-batches per process ahead of its own actions.

    Args:
        placement: The row of the table for each stage.
        microbatches: The number of micro-batches.
        add_posts: As in :class:`Programs`.
    """
    table, driver = forward_table(placement, microbatches), placement.driver
    ahead = 1 if placement.process_of[0] == driver else 2 * len(table)
    rows: list[list[Computation]] = [list(row) for row in table]
    rows[driver] = []
    num_fed = 0
    for action in table[driver]:
        for m in range(num_fed, min(action.microbatch + ahead, microbatches)):
            rows[driver].append(UserCode("b", m))
            num_fed = m + 1
        rows[driver].append(action)
    return _compiled(rows, _limit(table, placement), placement, add_posts, (Tied("values"), None))


def _compiled(
    rows: Sequence[Sequence[Computation]],
    limit: int,
    placement: Placement,
    add_posts: AddPosts,
    exchanges: tuple[Tied | None, Tied | None],
    unlimited: Edge | None = None,
) -> Program:
    """Return the program of all processes.

    Args:
        rows: The computations of each process, in the order of the table.
        limit: Maximum number of values in transit on one channel. It bounds memory and must cause no deadlock.
        placement: The process of each stage.
        add_posts: Adds sends and receives.
        exchanges: The exchanges of tied parameters at the beginning and at the end.
        unlimited: The channel whose sends have no limit.
    """
    *others, own = add_posts(_by_rank(rows, placement.driver), placement.num_stages)
    first, last = ([] if exchange is None else [exchange] for exchange in exchanges)

    def limited(operation: Operation) -> Operation:
        if not isinstance(operation, Post):
            return operation
        is_unlimited = operation.way == "SEND" and (operation.kind, operation.edge) == unlimited
        return operation if is_unlimited else operation._replace(limit=limit)

    whole = [*others, _with_results(own, placement.num_stages - 1)]
    return Program([[*first, *map(limited, row), *last] for row in whole])


def _with_results(row: Row, last: int) -> list[Operation]:
    """Return the driver's row with the places where the user's code takes the outputs of stage ``last``."""
    results: list[Operation] = []
    for operation in row:
        results.append(operation)
        if isinstance(operation, Action) and operation.kind == "F" and operation.stage == last:
            results.append(Result(operation.microbatch))
    return results


def _at_once(row: Row) -> list[Operation]:
    """Return a row of backward passes with all receives before the passes, and all sends after them."""
    ends = [k for k, operation in enumerate(row) if isinstance(operation, Action)]
    if not ends:
        return list(row)
    begin = ends[0] - sum(isinstance(operation, Post) for operation in row[: ends[0]])
    end = ends[-1] + 1
    while end < len(row) and (sent := row[end]) and isinstance(sent, Post) and sent.way == "SEND":
        end += 1
    part = row[begin:end]
    return [
        *row[:begin],
        *(each for each in part if isinstance(each, Post) and each.way == "RECV"),
        *(each for each in part if isinstance(each, Action)),
        *(each for each in part if isinstance(each, Post) and each.way == "SEND"),
        *row[end:],
    ]


def _by_rank(rows: Sequence[Sequence[Computation]], driver: int) -> list[Sequence[Computation]]:
    return [*rows[driver + 1 :], *rows[: driver + 1]]


def check_order(table: ActionTable) -> None:
    """Check that each stage runs forward passes in ascending order, and that all stages use one order of gradients.

    A channel between two stages delivers values in the order in which they were sent.

    Raises:
        ValueError: If the order of a stage is different.
    """
    order: list[int] | None = None
    first = 0
    for i in range(1 + max(action.stage for row in table for action in row)):
        own = [action for row in table for action in row if action.stage == i]
        forward = [action.microbatch for action in own if action.kind == "F"]
        if forward != sorted(forward):
            raise ValueError(
                f"stage {i} runs the forward passes of micro-batches {forward}; each stage must run them in ascending "
                "order"
            )
        gradients = [action.microbatch for action in own if action.kind in "BI"]
        if order is not None and gradients != order:
            raise ValueError(
                f"stage {i} runs the backward passes of micro-batches {gradients}, but stage {first} those of "
                f"{order}; all stages must run them in one order"
            )
        order, first = gradients, i


def can_run(rows: Sequence[Sequence[Computation]], placement: Placement, limit: int) -> bool:
    """Whether all computations run if a process waits after each send until at most ``limit`` values are in transit.

    A value is in transit on its channel until the computation that needs it starts.
    """
    num = placement.num_stages
    row_of = {computation: r for r, row in enumerate(rows) for computation in row}
    targets: dict[Computation, list[Edge]] = {}
    """For each computation that sends, its channels."""
    sources: dict[Computation, list[Computation]] = {}
    channel_of: dict[Computation, Edge] = {}
    for r, row in enumerate(rows):
        for computation in row:
            sources[computation] = own = [need for need in sources_of(computation, num) if need in row_of]
            if own and row_of[own[-1]] != r and (edge := edge_to(computation)) is not None:
                channel_of[computation] = edge
                targets.setdefault(own[-1], []).append(edge)
    under_way: Counter[Edge] = Counter()
    place, sent, progress = [0] * len(rows), [False] * len(rows), True
    ended: set[Computation] = set()
    while progress:
        progress = False
        for r, row in enumerate(rows):
            while place[r] < len(row):
                computation = row[place[r]]
                if not sent[r]:
                    if any(need not in ended for need in sources[computation]):
                        break
                    if computation in channel_of:
                        under_way[channel_of[computation]] -= 1
                    under_way.update(targets.get(computation, ()))
                    ended.add(computation)
                    sent[r] = progress = True
                if any(under_way[channel] > limit for channel in targets.get(computation, ())):
                    break
                place[r], sent[r], progress = place[r] + 1, False, True
    return all(place[r] == len(row) for r, row in enumerate(rows))


def _limit(rows: Sequence[Sequence[Computation]], placement: Placement) -> int:
    limit = placement.num_stages + MIN_UNDER_WAY
    while not can_run(rows, placement, limit):
        limit += 1 + limit // 2
    return limit
