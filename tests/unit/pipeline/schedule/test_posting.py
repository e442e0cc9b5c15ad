"""The order in which processes post actions, sends and receives: it runs under NCCL's worst case and costs no time."""

import gc
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import TypeAlias

import pytest
from device_simulator import Collective, DeviceOperation, check_runs, edge_from, for_all, per_pair, with_collectives
from schedule_choices import CHOICES, computations_of

from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.schedule.deadlocks import sources_of
from strategies.pipeline.schedule.operations import (
    Computation,
    Operation,
    Post,
    UserCode,
    edge_to,
)
from strategies.pipeline.schedule.posting import direct_order, posting_order
from strategies.pipeline.schedule.program import Program, Programs, check_order
from strategies.pipeline.schedule.tables import SCHEDULES, Action, ActionTable, Placement, loop, needs_of, one_f_one_b
from strategies.planning.search import LayerCosts, ModelCosts, search
from strategies.planning.simulator import ActionCosts, simulate

Value: TypeAlias = tuple[str, int, int]
"""Kind, edge and micro-batch of what is sent."""

SEVERAL_CHUNKS = {
    **{name: CHOICES[name] for name in ("interleaved", "interleaved-3", "zb-h1-2", "zbv", "v-half")},
    "interleaved-4": {"schedule": "interleaved", "chunks": 4},
    "zb-h1-3": {"schedule": "zb-h1", "chunks": 3},
}
"""Schedules of processes with several chunks of layers."""


def num_chunks(name: str) -> int:
    """Return how many chunks each process has."""
    choice = SEVERAL_CHUNKS[name]
    return int(choice.get("chunks", SCHEDULES[choice["schedule"]].chunks[1]))


def posted(program: Program, num_stages: int) -> list[list[DeviceOperation]]:
    """Return what each process posts in a pass, the driver with the user's code."""
    return posting_order([*map(computations_of, program.rows)], num_stages)


SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "b": 0.0, "a": 0.0}


def seconds(step: Computation) -> float:
    return SECONDS[step[0]]


def passes(tables: Programs, m: int) -> Iterator[Program]:
    """Training, evaluation, and the backward part after a forward part, which is an evaluation pass, too."""
    yield tables["training", m, 0]
    yield tables["forward", m, 0]
    yield tables["backward", m, 0]


def check_complete(rows: Sequence[Sequence[Operation]], program: Program, num_stages: int) -> None:
    """Each row has its steps in order; a send directly follows its step; a step has a receive if its input is far."""
    expected = [*map(computations_of, program.rows)]
    assert [computations_of(row) for row in rows] == expected
    row_of = {step: r for r, row in enumerate(expected) for step in row}
    for r, row in enumerate(rows):
        received: set[tuple[str, int, int, int]] = set()
        last: Computation | None = None
        for operation in row:
            if isinstance(operation, Post):
                if operation.way == "RECV":
                    received.add((operation.kind, operation.edge, operation.microbatch, operation.peer))
                else:
                    assert last is not None and last.microbatch == operation.microbatch
                    targets = [step for step in row_of if edge_to(step) == (operation.kind, operation.edge)]
                    targets = [step for step in targets if step.microbatch == last.microbatch]
                    assert [row_of[step] for step in targets] == [operation.peer]
                    assert last in sources_of(targets[0], num_stages)
                continue
            assert isinstance(operation, Action | UserCode)
            last = operation
            for source in sources_of(operation, num_stages):
                if row_of.get(source, r) != r:
                    edge = edge_to(operation)
                    assert edge is not None
                    received.remove((*edge, operation.microbatch, row_of[source]))
        assert not received


def check_runs_in_turn(rows: Sequence[Sequence[Operation]]) -> None:
    """What :func:`check_runs` says of devices that run one operation at a time, much faster and in other words.

    A device runs the next step of its row, or a transfer if that is next on the other device too.

    Raises:
        ValueError: If no device can go on, if a result is sent that is not there, or if a receive comes too late.
    """
    place, ready = [0] * len(rows), list(range(len(rows)))
    unsent: list[set[Value]] = [set() for _ in rows]
    unused: list[set[Value]] = [set() for _ in rows]
    while ready:
        r = ready.pop()
        while place[r] < len(rows[r]):
            operation = rows[r][place[r]]
            if not isinstance(operation, Post):
                assert isinstance(operation, Action | UserCode)
                if (edge := edge_to(operation)) is not None:
                    unused[r].discard((*edge, operation.microbatch))
                if (edge := edge_from(operation)) is not None:
                    unsent[r].add((*edge, operation.microbatch))
                place[r] += 1
                continue
            way, kind, microbatch, edge_number, peer, _ = operation
            row = rows[peer]
            there = row[place[peer]] if place[peer] < len(row) else None
            if there != Post("RECV" if way == "SEND" else "SEND", kind, microbatch, edge_number, r):
                break
            source, target = (r, peer) if way == "SEND" else (peer, r)
            if (value := (kind, edge_number, microbatch)) not in unsent[source]:
                raise ValueError(f"process {source} sends {value} before it is there")
            unsent[source].remove(value)
            unused[target].add(value)
            place[r] += 1
            place[peer] += 1
            ready.append(peer)
    if place != [len(row) for row in rows] or any(unused):
        raise ValueError(f"processes wait at {place}, or have received {unused} for nothing")


def early(rows: Sequence[Sequence[Operation]]) -> list[tuple[int, int, int]]:
    """For each receive that does not directly precede its action: process, place, place of the action."""
    found = []
    for r, row in enumerate(rows):
        for k, operation in enumerate(row):
            if isinstance(operation, Post) and operation.way == "RECV":
                key = operation.kind, operation.edge
                at = next(
                    j
                    for j, step in enumerate(row)
                    if isinstance(step, Action | UserCode)
                    and edge_to(step) == key
                    and step.microbatch == operation.microbatch
                )
                if computations_of(row[k:at]):
                    found.append((r, k, at))
    return found


def test_the_order_of_1f1b() -> None:
    programs = Settings(schedule="1f1b").programs(2)
    program = programs["training", 3, 0]
    assert [" ".join(map(repr, row)) for row in posting_order(programs.actions_of_step(3), 2)] == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0RECV_B1 0SEND_F2 0B1 0RECV_B2 0B2",
        "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2",
    ]
    first, *_, last = posted(program, 2)[1]
    assert repr(posted(program, 2)[1][:4]) == "[b0, codeSEND_F0, b1, codeSEND_F1]"
    assert (first, last) == (UserCode("b", 0), UserCode("a", 2))


@pytest.mark.parametrize("name", CHOICES)
def test_tables_run_on_devices_in_the_worst_case(name: str) -> None:
    for p, m in [*product((1, 2, 3, 5), (1, 2, 3)), (2, 7), (3, 7), (4, 9)]:  # a slow test below has all sizes
        tables = Settings(**CHOICES[name]).programs(p)
        num = len(tables.rank_of)
        for program in passes(tables, m):
            rows = posted(program, num)
            if m < 4:
                check_complete(rows, program, num)
            check_runs(rows)
            check_runs_in_turn(rows)
            check_runs(rows, communicator=for_all)
            check_runs(rows, communicator=per_pair, independent_streams=True)


def refuses(check: Callable[[Sequence[Sequence[Operation]]], object], rows: Sequence[Sequence[Operation]]) -> bool:
    try:
        check(rows)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zbv"])
def test_both_ways_to_check_an_order_agree(name: str) -> None:
    """On orders that run, and on those in which one operation has another place."""
    draw, tables = random.Random(0), Settings(**CHOICES[name]).programs(3)
    refused = []
    for program in passes(tables, 4):
        order = posted(program, len(tables.rank_of))
        for _ in range(60):
            rows = [list(row) for row in order]
            row = draw.choice(rows)
            k = draw.randrange(len(row))
            row.insert(max(0, k + draw.choice((-3, -2, -1, 1, 2, 3))), row.pop(k))
            refused.append(refuses(check_runs_in_turn, rows))
            assert refuses(check_runs, rows) == refused[-1], rows
    assert {*refused} == {True, False}


SOME, REST = pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.nightly)


@pytest.mark.parametrize("some", [SOME, REST], ids=["some", "rest"])
@pytest.mark.parametrize("p", range(1, 17))
def test_all_tables_run_on_devices_in_the_worst_case(p: int, some: bool) -> None:
    """Up to 16 chunks and 64 micro-batches, and the largest tables of 16 processes; a nightly test has more chunks.

    Before a merge all numbers of micro-batches up to 24 and every fourth above, among them 64 on 16 processes.
    """
    all_tables = [Settings(**choice).programs(p) for choice in CHOICES.values()]
    gc.disable()  # the collector looks at each of the many tuples several times
    try:
        for m in [m for m in range(1, 65) if (m <= 24 or (m + p) % 4 == 0) == some]:
            usual = [tables for tables in all_tables if len(tables.rank_of) <= 16 or (p == 16 and m >= 63)]
            # Schedules of one placement have the same program of evaluation passes.
            each = {repr(program): (program, tables) for tables in usual for program in passes(tables, m)}
            for program, tables in each.values():
                check_runs_in_turn(posted(program, len(tables.rank_of)))
    finally:
        gc.enable()


def check_in_turn(name: str, p: int, microbatches: Iterable[int]) -> None:
    tables = Settings(**SEVERAL_CHUNKS[name]).programs(p)
    gc.disable()
    try:
        for m in microbatches:
            for program in passes(tables, m):
                check_runs_in_turn(posted(program, len(tables.rank_of)))
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("interleaved", "zb-h1-2", "zbv") else pytest.mark.slow)
        for name in SEVERAL_CHUNKS
    ],
)
def test_sixteen_processes_with_several_chunks(name: str) -> None:
    """32 to 64 chunks. A nightly test below has all numbers of micro-batches up to 64."""
    check_in_turn(name, 16, (1, 5, 16, 17, 47, 64))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "p"),
    [(name, p) for name in SEVERAL_CHUNKS for p in range(1, 17) if num_chunks(name) * p > 16],
)
def test_all_tables_of_more_than_sixteen_chunks(name: str, p: int) -> None:
    """Up to 16 processes, 64 chunks and 64 micro-batches: what the slow test above leaves out."""
    check_in_turn(name, p, range(1, 65))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOICES)
def test_the_largest_tables_run_on_independent_streams(name: str) -> None:
    """16 processes and 64 micro-batches, where posting a receive waits for its header."""
    tables = Settings(**CHOICES[name]).programs(16)
    for program in passes(tables, 64):
        check_runs(posted(program, len(tables.rank_of)), independent_streams=True)


@pytest.mark.parametrize("name", CHOICES)
def test_the_order_costs_no_time_where_streams_are_independent(name: str) -> None:
    """Neither if processes post far ahead of their devices, nor if posting takes as long as the actions."""
    for p, m in ((2, 8), (4, 9), (8, 16)):
        tables = Settings(**CHOICES[name]).programs(p)
        table = tables.actions_of_step(m)
        least = simulate(table, ActionCosts(backward=2.0)).total_time
        rows = posted(tables["training", m, 0], len(tables.rank_of))
        assert check_runs(rows, independent_streams=True, seconds=seconds) == least
        assert check_runs(rows, independent_streams=True, posting_seconds=seconds) == least
        assert check_runs(rows, seconds=seconds) >= least


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zb-h1", "zb-h1-2", "v-half"])
def test_receives_are_posted_no_earlier_than_freedom_from_deadlock_requires(name: str) -> None:
    """A receive that is posted before an earlier action closes a circle, or leaves its order, if it is not."""
    for p, m in ((2, 4), (3, 7), (4, 8)):
        tables = Settings(**CHOICES[name]).programs(p)
        rows = posted(tables["training", m, 0], len(tables.rank_of))
        num = sum(isinstance(operation, Post) for row in rows for operation in row) // 2
        moved = early(rows)
        assert len(moved) < num / 2
        for r, k, at in moved:
            row = [*rows[r][:k], *rows[r][k + 1 : at], rows[r][k], *rows[r][at:]]
            with pytest.raises(ValueError, match=r"deadlock|would get the wrong value"):
                check_runs([*rows[:r], row, *rows[r + 1 :]])


def test_forward_passes_of_a_line_need_no_early_receive() -> None:
    """If the driver's inputs do not travel: a stage sends, then receives, and so on."""
    program = Settings(schedule="1f1b").programs(4)["forward", 9, 0]
    assert not early(posting_order(program.actions, 4))


def random_table(processes: int, chunks: int, m: int, seed: int) -> ActionTable:
    """Return a table that can run, drawn by running any action that can, under any placement and any splits."""
    draw = random.Random(seed)
    process_of = list(loop(processes, chunks).process_of)
    draw.shuffle(process_of)
    num = len(process_of)
    splits = [[draw.random() < 0.4 for _ in range(m)] for _ in range(num)]
    ended: set[Action] = set()
    table: ActionTable = [[] for _ in range(processes)]
    left = {Action("F", k, i) for i in range(num) for k in range(m)}
    for i, k in product(range(num), range(m)):
        left |= {Action("I", k, i), Action("W", k, i)} if splits[i][k] else {Action("B", k, i)}
    while left:
        able = []
        for action in sorted(left):
            kind, k, i = action
            split = i + 1 < num and kind in "BI" and splits[i + 1][k]
            in_turn = kind == "W" or not any(
                a[0] in ("F" if kind == "F" else "BI") and a[1] < k and a[2] == i for a in left
            )
            if in_turn and all(need in ended for need in needs_of(action, num, split=split)):
                able.append(action)
        action = draw.choice(able)
        table[process_of[action.stage]].append(action)
        ended.add(action)
        left.remove(action)
    check_order(table)
    return table


def _given(table: ActionTable, microbatches: int) -> ActionTable:
    return table


@pytest.mark.parametrize("seeds", [range(15), pytest.param(range(15, 60), marks=pytest.mark.slow)], ids=str)
def test_tables_of_users_run_whatever_their_order(seeds: range) -> None:
    """So no table that the simulator accepts is refused for the sake of devices."""
    for seed in seeds:
        table = random_table(2 + seed % 3, 1 + seed % 2, 2 + seed % 5, seed)
        tables = Programs(partial(_given, table), Placement.of(table))
        num, m = len(tables.rank_of), 2 + seed % 5
        for program in passes(tables, m):
            rows = posted(program, num)
            check_complete(rows, program, num)
            check_runs(rows)


def test_orders_that_a_search_finds_run() -> None:
    costs = ModelCosts([LayerCosts(1.0, 1.0, 1.0)] * 7 + [LayerCosts(3.0, 2.0, 4.0)], transfer=0.1)
    for limit in (None, 9.0):
        plan = search(costs, 3, [8], effort=20_000, memory_limit_bytes=limit)
        tables = Programs(partial(_given, plan.table), plan.placement)
        check_runs(posted(tables["training", 8, 0], len(tables.rank_of)))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1-2", "zbv"])
def test_passes_run_one_after_another_with_ties_and_averages(name: str) -> None:
    """Two replicas, each with evaluation and training passes, ties before and after these, and averages per stage.

    Without some gradients: a stage whose layers are frozen sends none, for all micro-batches or for some.
    """
    p, m, draw = 3, 5, random.Random(0)
    tables = Settings(**CHOICES[name]).programs(p)
    num = len(tables.rank_of)
    trains = [tables["forward", m, 0], tables["backward", m, 0]] if name == "gpipe" else [tables["training", m, 0]]
    rows: list[list[Operation]] = [[] for _ in range(2 * p)]
    for number in range(3):
        for replica in range(2):
            own = range(replica * p, replica * p + p)
            left_out = {(e, k) for e in range(num + 1) for k in range(m) if draw.random() < 0.3}
            shared = [Collective(f"value {number} {replica}", (own[-1], own[r])) for r in range(p - 1)]
            moved = [Collective(f"gradient {number} {replica} {r}", (own[r], own[-1])) for r in range(p - 1)]
            whole: list[list[Operation]] = with_collectives([[] for _ in range(2 * p)], shared)
            for program in (tables["forward", m, 0], *trains):
                for r, row in zip(own, posted(program, num), strict=True):
                    whole[r] += [
                        operation._replace(peer=own[operation.peer]) if isinstance(operation, Post) else operation
                        for operation in row
                        if not (
                            isinstance(operation, Post)
                            and operation.kind == "B"
                            and (operation.edge, operation.microbatch) in left_out
                        )
                    ]
            for row, more in zip(rows, with_collectives(whole, moved), strict=True):
                row += more
        rows = with_collectives(rows, [Collective(f"average {number} {r}", (r, r + p)) for r in range(p)])
    check_runs(rows)
    check_runs(rows, independent_streams=True, communicator=lambda r, post: (r // p, post.kind, post.edge))
    rows[0].remove(Collective("average 1 0", (0, p)))
    with pytest.raises(ValueError, match="process 0 does not take part in average 1 0"):
        check_runs(rows)


def test_sends_that_do_not_wait_are_directly_beside_their_computations() -> None:
    assert [" ".join(map(repr, row)) for row in direct_order(one_f_one_b(3, 2), 3)] == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1",
        "2RECV_F0 2F0 2B0 2SEND_B0 2RECV_F1 2F1 2B1 2SEND_B1",
    ]
