"""What each process does in a pass: ranks, orders on channels, and limits that cause no deadlock."""

from collections.abc import Callable

import pytest
from schedule_choices import CHOICES, computations_of

from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.schedule.operations import Post, Result, UserCode
from strategies.pipeline.schedule.program import (
    MIN_UNDER_WAY,
    Program,
    Programs,
    can_run,
    check_order,
    driver_row,
    forward_program,
    ranks_of,
)
from strategies.pipeline.schedule.tables import (
    SCHEDULES,
    Action,
    Placement,
    gpipe,
    interleaved,
    loop,
    one_f_one_b,
    v,
    zb_h1,
    zbv,
)
from strategies.planning.simulator import ActionCosts, DriverCosts, render, simulate

SIZES = [(p, m) for p in (1, 2, 3, 5) for m in (1, 2, 3, 7, 16)]


def limits_of(program: Program) -> set[int]:
    """Return the limits of all channels that have one."""
    posts = [operation for row in program.rows for operation in row if isinstance(operation, Post)]
    return {post.limit for post in posts if post.limit is not None}


def unlimited_of(program: Program) -> set[tuple[str, str, int]]:
    """Return the ends of channels without a limit: way, kind and edge."""
    posts = [operation for row in program.rows for operation in row if isinstance(operation, Post)]
    return {(post.way, post.kind, post.edge) for post in posts if post.limit is None}


def num_kept_early(program: Program) -> int:
    """Return how many values of one link a receiver keeps, at most, because its row takes them later than they come."""
    most = 0
    for target, row in enumerate(program.rows):
        for source, other in enumerate(program.rows):
            sent = [post for post in other if isinstance(post, Post) and (post.way, post.peer) == ("SEND", target)]
            coming = iter((post.kind, post.edge, post.microbatch) for post in sent)
            kept: set[tuple[str, int, int]] = set()
            for post in row:
                if isinstance(post, Post) and (post.way, post.peer) == ("RECV", source):
                    wanted = post.kind, post.edge, post.microbatch
                    while wanted not in kept:
                        kept.add(next(coming))
                    kept.discard(wanted)
                    most = max(most, len(kept))
    return most


def table_of(rows: list[str]) -> list[list[Action]]:
    return [[Action.parse(text) for text in row.split()] for row in rows]


def test_the_driver_has_the_last_rank() -> None:
    assert ranks_of(loop(3, 2)) == (0, 1, 2, 0, 1, 2)
    assert ranks_of(v(3)) == (2, 0, 1, 1, 0, 2)
    rows = Programs(lambda m: zbv(2, m), v(2)).actions_of_step(3)
    assert [{action.stage for action in row} for row in rows] == [{1, 2}, {0, 3}]


@pytest.mark.parametrize("name", CHOICES)
def test_every_size_runs(name: str) -> None:
    """With as many values under way as the program says, forward passes alone, backward passes alone, and both."""
    for p, m in SIZES:
        tables = Settings(**CHOICES[name]).programs(p)
        num = len(tables.rank_of)
        placed_on_driver = tables.rank_of[0] == p - 1  # stage 0, so its inputs and their gradients stay there
        for program in (tables["training", m, 0], tables["forward", m, 0], tables["backward", m, 0]):
            rows = [*map(computations_of, program.rows)]
            if program is tables["backward", m, 0]:  # which sends the gradients of the inputs without a limit
                rows[-1] = [*program.actions[-1]]
            assert can_run(rows, tables.placement, num + 2)
            is_backward = program is tables["backward", m, 0]
            assert limits_of(program) == ({num + MIN_UNDER_WAY} if p > 1 else set())
            assert unlimited_of(program) == (
                {("SEND", "B", 0)} if is_backward and p > 1 and not placed_on_driver else set()
            )
        kinds = sorted(action.kind for row in tables.actions_of_step(m) for action in row)
        assert kinds.count("F") == num * m == kinds.count("B") + kinds.count("I")
        assert tables["training", m, 0].splits == ("W" in kinds)
        forward, backward = tables["forward", m, 0].actions, tables["backward", m, 0].actions
        both = [row + more for row, more in zip(forward, backward, strict=True)]
        assert list(map(sorted, both)) == list(map(sorted, tables.actions_of_step(m)))


@pytest.mark.parametrize("name", CHOICES)
def test_receivers_keep_few_values_that_come_early(name: str) -> None:
    """Whatever the number of micro-batches. Under ``gpipe``, whose steps are two programs, none is kept."""
    for p, m in SIZES:
        tables = Settings(**CHOICES[name]).programs(p)
        num = len(tables.rank_of)
        if name == "gpipe":
            assert num_kept_early(tables["forward", m, 0]) == num_kept_early(tables["backward", m, 0]) == 0
        else:
            assert 2 * num_kept_early(tables["training", m, 0]) <= num
            assert num_kept_early(tables["forward", m, 0]) <= num


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1"])
def test_several_lists_run_in_rounds_with_code_between_them(name: str) -> None:
    """The code between two lists takes the output of the driver's stage, and receives the gradients of the next one."""
    for p, m, lists in [(1, 3, 2), (2, 2, 2), (2, 5, 3), (3, 7, 2), (4, 3, 3)]:
        tables = Settings(schedule=name).programs(p, num_lists=lists)
        placement, program = tables.placement, tables["training", m, 0]
        (limit,) = limits_of(program) if p > 1 else {1}
        assert can_run([*map(computations_of, program.rows)], placement, limit)
        row = list(program.rows[-1])
        for first in placement.firsts[1:]:
            for number in range(m):
                place = row.index(UserCode("b", number, first))
                assert row[place - 1] == Action("F", number, first - 1)
                after = row[row.index(UserCode("a", number, first)) + 1]
                assert isinstance(after, Action) and after[1:] == (number, first - 1) and after.kind in "BI"
                if p > 1:
                    assert repr(row[place + 1]) == f"{first - 1}SEND_F{number}"
                    assert row.count(UserCode("a", number, first)) == 1
                    assert [*map(repr, row)].count(f"{first - 1}RECV_B{number}") == 1
        assert len(tables["forward", m, lists - 1].rows) == p


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_the_rows_of_a_step_are_those_of_the_table_of_all_lists(name: str) -> None:
    for p, m, lists in [(2, 3, 1), (2, 3, 2), (3, 4, 3)]:
        tables = Settings(schedule=name).programs(p, num_lists=lists)
        rows = tables.actions_of_step(m)
        assert rows == SCHEDULES[name].of(p, m, 1, lists)
        if name == "gpipe":
            parts = [tables["forward", m, number].actions[-1] for number in range(lists)]
            assert rows[-1][: m * lists] == [action for row in parts for action in row]


@pytest.mark.parametrize("placement", [loop, lambda p, chunks: v(p)], ids=["loop", "v"])
def test_inputs_of_evaluations_come_early_enough(placement: Callable[[int, int], Placement]) -> None:
    """The driver sends the inputs of 2p micro-batches ahead of its own action, and no process waits for more."""
    for p, m in SIZES:
        for chunks in (1, 2, 3, 4):
            own = placement(p, chunks)
            program = forward_program(own, m)
            if own.process_of[0] == own.driver:
                continue
            rows = [*map(computations_of, program.rows)]
            assert can_run(rows, own, 2 * p + m)
            own_row = rows[-1]
            for k, step in enumerate(own_row):
                if isinstance(step, UserCode):
                    following = next(action for action in own_row[k:] if isinstance(action, Action))
                    assert following.microbatch == max(step.microbatch - 2 * p + 1, 0)


def test_a_limit_that_is_too_small_deadlocks() -> None:
    """Three values are sent before the first one is taken, because of an action in between that needs the third."""
    rows = table_of(["0F0 0F1 0F2 2F0 2F1 2F2", "1F0 1F1 1F2 3F0 3F1 3F2"])
    crossed = table_of(["0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3", "1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3"])
    assert can_run(rows, loop(2, 2), 3)
    assert can_run(crossed, loop(2, 2), 4) and not can_run(crossed, loop(2, 2), 1)
    assert min(limits_of(forward_program(loop(2, 2), 4))) >= 2


def test_orders_that_channels_cannot_bring() -> None:
    check_order(one_f_one_b(3, 4))
    swapped = table_of(["0F1 0F0 0B0 0B1", "1F1 1F0 1B0 1B1"])
    with pytest.raises(ValueError, match=r"stage 0 runs the forward passes of micro-batches \[1, 0\]"):
        check_order(swapped)
    crossed = table_of(["0F0 0F1 0B0 0B1", "1F0 1F1 1B1 1B0"])
    with pytest.raises(ValueError, match=r"stage 1 runs the backward passes of micro-batches \[1, 0\], but stage 0"):
        check_order(crossed)


def test_the_driver_runs_the_code_of_each_microbatch_once() -> None:
    for choice in [own for name, own in CHOICES.items() if name != "gpipe"]:
        row = Settings(**choice).programs(3)["training", 5, 0].rows[-1]
        codes = [step for step in row if isinstance(step, UserCode)]
        assert sorted(codes) == sorted(UserCode(part, m) for part in "ab" for m in range(5))


def test_tables_of_ones_own() -> None:
    tables = Settings(schedule=one_f_one_b, microbatches=4).programs(2)
    assert tables.rank_of == (0, 1) and not tables["training", 4, 0].splits
    assert tables.actions_of_step(3) == one_f_one_b(2, 3)
    with pytest.raises(ValueError, match="lacks"):
        Settings(schedule=lambda p, m: [row[:-1] for row in one_f_one_b(p, m)]).programs(2)


def test_tables_that_channels_cannot_run_are_refused_at_once() -> None:
    def backwards(p: int, m: int) -> list[list[Action]]:
        return [list(reversed([a for a in row if a.kind == "F"])) + row[m:] for row in gpipe(p, m)]

    with pytest.raises(ValueError, match=r"stage 0 runs the forward passes of micro-batches \[2, 1, 0\]"):
        Settings(schedule=backwards, microbatches=3).programs(2)
    with pytest.raises(ValueError, match=r"schedule='missing.csv' is the path of a table, but: .*No such file"):
        Settings(schedule="missing.csv").programs(2)


def test_tables_of_other_numbers_of_micro_batches() -> None:
    """They may split other backward passes, but must leave the stages where they are."""
    split_later = Settings(schedule=lambda p, m: (zb_h1 if m > 1 else one_f_one_b)(p, m), microbatches=4).programs(2)
    assert split_later["training", 4, 0].splits and not split_later["training", 1, 0].splits
    moved = Settings(schedule=lambda p, m: (interleaved if m == 4 else zbv)(p, m), microbatches=4).programs(2)
    with pytest.raises(
        ValueError, match=r"the table for 3 micro-batches has stages 0, 1, ... on processes \(0, 1, 1, 0"
    ):
        moved["training", 3, 0]


def test_picture_of_the_driver_row() -> None:
    simulation = simulate(one_f_one_b(3, 4), ActionCosts(backward=2, driver=DriverCosts(before=1, before_backward=1)))
    assert all(line in (driver_row.__doc__ or "") for line in render(simulation).splitlines())
    assert simulation.rows[2] == driver_row(one_f_one_b(3, 4))


def test_rows_have_exchanges_of_ties_and_the_places_where_code_takes_outputs() -> None:
    first, last = Programs(lambda m: one_f_one_b(2, m), loop(2))["training", 1, 0].rows
    assert repr([first[0], first[-1]]) == "[TIED_VALUES, TIED_GRADIENTS]" == repr([last[0], last[-1]])
    assert not any(isinstance(operation, Result) for operation in first)
    assert last[[*last].index(Action("F", 0, 1)) + 1] == Result(0)


def test_backward_passes_at_once_follow_all_receives_and_precede_all_sends() -> None:
    tables = Programs(lambda m: gpipe(3, m), loop(3), at_once=True)
    assert " ".join(map(repr, tables["backward", 2, 0].rows[1])) == (
        "1RECV_B1 1RECV_B0 1B1 1B0 1SEND_B1 1SEND_B0 TIED_GRADIENTS"
    )
