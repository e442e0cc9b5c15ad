"""Tables of actions: their timetables, their properties for every size in use, and torch's tables."""

from collections import deque
from inspect import cleandoc

import pytest
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import _Action

from strategies.pipeline.schedule import tables
from strategies.pipeline.schedule.tables import (
    KINDS,
    Action,
    Placement,
    gpipe,
    interleaved,
    loop,
    one_f_one_b,
    shortened,
    v,
    v_half,
    with_weight_gradients,
    zb_h1,
    zbv,
)
from strategies.planning.simulator import ActionCosts, render, simulate

ONE_STAGE_EACH = {"gpipe": gpipe, "1f1b": one_f_one_b}
SIZES = [(p, m) for p in range(1, 17) for m in (*range(1, 2 * p + 2), 48, 64)]
"""Stages and micro-batches: fewer of them than stages, about as many, and many more."""

SMALL_SIZES = [(p, m) for p, m in SIZES if p <= 5 and m <= 48]
OF_ALL_SIZES = pytest.mark.parametrize("sizes", [SMALL_SIZES, pytest.param(SIZES, marks=pytest.mark.slow)], ids=len)

SIZES_OF_TORCH = [(p, m) for p in range(1, 9) for m in range(1, 33)]


def test_gpipe_picture():
    assert render(gpipe(3, 4)) == cleandoc("""
        stage 0  F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0
        stage 1  .  F0 F1 F2 F3 .  .  B3 B2 B1 B0 .
        stage 2  .  .  F0 F1 F2 F3 B3 B2 B1 B0 .  .
    """)


def test_one_f_one_b_picture():
    assert render(one_f_one_b(3, 4)) == cleandoc("""
        stage 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        stage 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
    """)


def test_pictures_stand_in_the_docstring():
    for name, make in ONE_STAGE_EACH.items():
        assert name in tables.__doc__
        assert all(line in tables.__doc__ for line in render(make(3, 4)).splitlines())


@pytest.mark.parametrize(
    ("make", "processes", "num"), [(interleaved, 2, 4), (zb_h1, 3, 4), (zbv, 2, 3), (v_half, 2, 3)]
)
def test_pictures_of_the_docstrings(make, processes, num):
    assert "\n".join(render(make(processes, num)).splitlines()) in cleandoc(make.__doc__).replace("    ", "")


def test_picture_of_gpipe_with_two_lists():
    simulation = simulate(gpipe(2, 2, 2), placement=loop(2).repeated(2), at_once=True)
    assert render(simulation) in cleandoc(gpipe.__doc__).replace("    ", "")


def test_actions_print_and_parse_as_those_of_torch():
    for kind in KINDS:
        action = Action(kind, 12, 3)
        upstream = _Action.from_str(repr(action))
        assert repr(upstream) == repr(action) == f"3{kind}12"
        assert (upstream.computation_type.value, upstream.microbatch_index, upstream.stage_index) == action
        assert Action.parse(f" {action!r} ") == action
    for text in ("F0", "2F", "2X0", "2F0x", "-1F0", ""):
        with pytest.raises(ValueError, match=f"'{text}' is not an action; .* such as 2F0"):
            Action.parse(text)


def test_placements():
    assert loop(2).process_of == (0, 1) and loop(2, 2).process_of == (0, 1, 0, 1)
    assert loop(3, 2).driver == 2 and loop(3, 2).stages_of(1) == [1, 4]
    assert v(3).process_of == (0, 1, 2, 2, 1, 0)
    assert v(3).driver == 0 and v(3).stages_of(0) == [0, 5]
    assert v(3).num_stages == 6
    for p in range(1, 5):
        for table, placement in (
            (gpipe(p, 3), loop(p)),
            (one_f_one_b(p, 3), loop(p)),
            (zb_h1(p, 3), loop(p)),
            (interleaved(p, 3, 3), loop(p, 3)),
            (zbv(p, 3), v(p)),
            (v_half(p, 3), v(p)),
        ):
            assert Placement.of(table) == placement


def test_fewer_microbatches_than_stages():
    assert render(one_f_one_b(3, 1)) == cleandoc("""
        stage 0  F0 .  .  .  .  B0
        stage 1  .  F0 .  .  B0 .
        stage 2  .  .  F0 B0 .  .
    """)


@OF_ALL_SIZES
@pytest.mark.parametrize("name", ONE_STAGE_EACH)
def test_every_size_runs(name, sizes):
    """The simulator raises unless each action is there once, after what it needs, without a deadlock."""
    for p, m in sizes:
        simulation = simulate(ONE_STAGE_EACH[name](p, m))
        assert len(simulation.end) == 2 * p * m
        assert simulation.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
        assert simulation.total_time == 2 * (m + p - 1)
        limit = [m] * p if name == "gpipe" else [min(p - i, m) for i in range(p)]
        assert simulation.peak_activations == limit


def kept_when_run(table):
    """Runs a table with queues between neighbours, as stages do, and not in the simulator's way.

    Returns:
        The most micro-batches that each stage has kept; fails if a stage takes what is not next in its queue.
    """
    last, m = len(table) - 1, len(table[0]) // 2
    inputs = [deque(range(m)), *(deque() for _ in table[1:])]
    grads = [deque() for _ in table]
    kept, most = [set() for _ in table], [0] * len(table)
    places, moved = [0] * len(table), True
    while moved:
        moved = False
        for i, row in enumerate(table):
            while places[i] < len(row):
                kind, microbatch, stage = row[places[i]]
                assert stage == i
                queue = inputs[i] if kind == "F" else grads[i]
                if not queue:
                    break  # it waits
                assert queue.popleft() == microbatch
                if kind == "F":
                    kept[i].add(microbatch)
                    most[i] = max(most[i], len(kept[i]))
                    (grads[i] if i == last else inputs[i + 1]).append(microbatch)
                else:
                    kept[i].remove(microbatch)  # its forward pass came before
                    if i > 0:
                        grads[i - 1].append(microbatch)
                places[i] += 1
                moved = True
    assert places == [len(row) for row in table], "a stage waits for ever"
    assert not any(kept) and not any(inputs) and not any(grads)
    return most


@OF_ALL_SIZES
def test_one_f_one_b_runs_on_queues(sizes):
    """Each action once: a queue has each micro-batch once, and all of them are empty in the end."""
    for p, m in sizes:
        table = one_f_one_b(p, m)
        assert all(len(row) == 2 * m for row in table)
        assert kept_when_run(table) == [min(p - i, m) for i in range(p)]
    with pytest.raises(AssertionError, match="waits for ever"):
        kept_when_run([[Action("F", 0, 0), Action("B", 0, 0)], [Action("B", 0, 1), Action("F", 0, 1)]])


def upstream_table(p, m):
    """torch's table, which it builds without processes; it numbers the last stage's forward passes from 1."""
    schedule = object.__new__(Schedule1F1B)
    schedule._num_stages, schedule._n_microbatches = p, m
    order = schedule._get_pipeline_order()
    rows = []
    for i in range(p):
        actions = [a for a in order[i] if a is not None and a.computation_type.value in ("F", "B")]
        first = min(a.microbatch_index for a in actions if a.computation_type.value == "F")
        assert first == (1 if i == p - 1 else 0)
        rows.append(
            [
                (a.computation_type.value, a.microbatch_index - (first if a.computation_type.value == "F" else 0), i)
                for a in actions
            ]
        )
    return rows


def test_one_f_one_b_equals_torch():
    compared = 0
    for p, m in SIZES_OF_TORCH:
        if m >= p:  # torch refuses fewer micro-batches than stages
            assert one_f_one_b(p, m) == upstream_table(p, m)
            compared += 1
    assert compared == 8 * 32 - sum(range(8))


def rows_of_torch(actions):
    """The compute actions of torch's table, as ours."""
    return [
        [(a.computation_type.value, a.microbatch_index, a.stage_index) for a in row if a and a.is_compute_op]
        for row in actions
    ]


def test_gpipe_equals_torch_but_for_the_order_of_backward_passes():
    """Ours begins with the last micro-batch, whose activations are not recomputed; torch's with the first."""
    for p, m in SIZES_OF_TORCH:
        schedule = object.__new__(ScheduleGPipe)
        schedule._num_stages, schedule._n_microbatches = p, m
        upstream = rows_of_torch(schedule._get_pipeline_order().values())
        for own, theirs in zip(gpipe(p, m), upstream, strict=True):
            assert own[:m] == theirs[:m]
            assert own[m:] == theirs[m:][::-1]


@pytest.mark.parametrize(
    ("make", "upstream"), [(interleaved, ScheduleInterleaved1F1B), (zb_h1, ScheduleInterleavedZeroBubble)]
)
def test_rounds_equal_those_of_torch(make, upstream):
    compared = 0
    for p in range(1, 9):
        for chunks in range(1, 8 // p + 1):
            for m in range(1, 33):
                schedule = object.__new__(upstream)
                schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = p, chunks, m
                schedule.number_of_rounds = max(1, m // p)
                schedule.microbatches_per_round = m // schedule.number_of_rounds
                if m % schedule.number_of_rounds:
                    continue  # torch refuses this number of micro-batches
                table = [schedule._calculate_single_rank_operations(r) for r in range(p)]
                assert make(p, m, chunks) == rows_of_torch(table)
                compared += 1
    assert compared == 472  # of 640; torch refuses the others


def test_zbv_equals_torch():
    for p in range(1, 5):
        for m in range(1, 33):
            schedule = object.__new__(ScheduleZBVZeroBubble)
            schedule.pp_group_size, schedule.num_stages, schedule._n_microbatches = p, 2 * p, m
            assert zbv(p, m) == rows_of_torch([schedule._calculate_single_rank_operations(r) for r in range(p)])


UP_TO = pytest.mark.parametrize("limit", [4, pytest.param(8, marks=pytest.mark.slow)])


def sizes_up_to(limit):
    """Numbers of processes and of micro-batches, with multiples and fewer than there are processes."""
    return [(p, m) for p in range(1, limit + 1) for m in (*range(1, 2 * p + 2), 4 * p, 4 * p + 3, 32)]


@UP_TO
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("make", [interleaved, zb_h1])
def test_rounds_run_for_every_number_of_microbatches(make, chunks, limit):
    """The simulator raises unless each action is there once and no process waits for ever."""
    for p, m in sizes_up_to(limit):
        simulation = simulate(make(p, m, chunks), ActionCosts(backward=2.0), placement=loop(p, chunks))
        assert len(simulation.end) == (2 if make is interleaved else 3) * p * m * chunks
        bubble = simulation.total_time - 3 * m * chunks
        if m % p == 0:
            assert bubble == (p - 1) * (3 if make is interleaved else 1)  # in passes through a stage
        if make is zb_h1 and m % p == 0:
            assert max(simulation.peak_bytes) == p * chunks  # activations; of stages that are as many times shorter


@UP_TO
def test_zbv_and_v_half_run_for_every_number_of_microbatches(limit):
    for p, m in sizes_up_to(limit):
        zero, half = (simulate(make(p, m), placement=v(p)) for make in (zbv, v_half))
        assert len(zero.end) == len(half.end) == 6 * p * m
        if m >= 2 * p:
            assert zero.total_time - 6 * m == p - 1
        if m >= p:
            assert half.total_time - 6 * m <= 3 * (p - 1)  # 1F1B: 6 (p - 1)
        assert all(held <= 2 * p for held in zero.peak_bytes)
        assert all(held <= (p + 1 if p % 2 else p + 2) for held in half.peak_bytes)
        if m >= 2 * p:
            assert max(zero.peak_bytes) == 2 * p


def test_bubbles_with_unequal_parts_of_a_pass():
    """ZB-H1: (p - 1)(F + I - W), under 1F1B (p - 1)(F + I + W)."""
    costs = ActionCosts(forward=1.0, backward=2.0, input_grad=1.25, weight_grad=0.75)
    assert simulate(zb_h1(4, 16), costs).total_time == 16 * 3 + 3 * (1 + 1.25 - 0.75)
    assert simulate(one_f_one_b(4, 16), costs).total_time == 16 * 3 + 3 * 3


def test_weight_gradients_fill_idle_time():
    """A process takes W where it would wait, or where a forward pass would exceed its limit."""
    rows = [[action for action in row if action.kind != "W"] for row in zb_h1(2, 3)]
    free = with_weight_gradients(rows, lambda action: 1.0)
    assert render(free) == cleandoc("""
        stage 0  F0 F1 .  I0 F2 I1 W0 I2 W1 W2
        stage 1  .  F0 I0 F1 I1 F2 I2 W0 W1 W2
    """)
    tight = with_weight_gradients(rows, lambda action: 1.0, [2, 1])
    assert render(tight) == cleandoc("""
        stage 0  F0 F1 .  I0 W0 F2 I1 W1 .  I2 W2
        stage 1  .  F0 I0 W0 F1 I1 W1 F2 I2 W2 .
    """)
    with pytest.raises(AssertionError, match="the rows cannot run"):
        with_weight_gradients([row[::-1] for row in rows], lambda action: 1.0)
    assert with_weight_gradients(rows, lambda action: 0.0)  # actions without any time end as well


def test_shortened_tables_run():
    for make in (gpipe, one_f_one_b, interleaved, zb_h1, zbv, v_half):
        for m in range(1, 9):
            assert len(simulate(shortened(make(3, 9), m)).end) == len(simulate(make(3, m)).end)


@pytest.mark.parametrize("make", [interleaved, zb_h1, zbv, v_half, v, loop])
def test_bad_numbers_of_processes(make):
    arguments = () if make in (v, loop) else (4,)
    with pytest.raises(ValueError, match="processes must be at least 1, got 0"):
        make(0, *arguments)
    if arguments:
        with pytest.raises(ValueError, match="microbatches must be at least 1, got 0"):
            make(2, 0)
    if make in (interleaved, zb_h1, loop):
        with pytest.raises(ValueError, match="chunks must be at least 1, got 0"):
            make(2, *arguments, chunks=0)


@pytest.mark.parametrize("make", ONE_STAGE_EACH.values(), ids=ONE_STAGE_EACH)
def test_bad_counts(make):
    with pytest.raises(ValueError, match="stages must be at least 1, got 0"):
        make(0, 4)
    with pytest.raises(ValueError, match="microbatches must be at least 1, got -1"):
        make(2, -1)
