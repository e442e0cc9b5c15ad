"""Schedules: the pictures, the properties for every size in use, and a simulator that rejects what cannot run."""

from collections import deque
from itertools import pairwise

import pytest
from torch.distributed.pipelining import Schedule1F1B

from strategies.pipeline.schedule.tables import SCHEDULES, Action, gpipe, one_f_one_b, render, simulate

MAX_STAGES, MAX_MICROBATCHES = 16, 64
SIZES = [(p, m) for p in range(1, MAX_STAGES + 1) for m in range(1, MAX_MICROBATCHES + 1)]


def picture(text):
    return "\n".join(line.strip() for line in text.strip().splitlines())


def test_gpipe_picture():
    assert render(gpipe(3, 4)) == picture("""
        stage 0  F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0
        stage 1  .  F0 F1 F2 F3 .  .  B3 B2 B1 B0 .
        stage 2  .  .  F0 F1 F2 F3 B3 B2 B1 B0 .  .
    """)


def test_one_f_one_b_picture():
    assert render(one_f_one_b(3, 4)) == picture("""
        stage 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        stage 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
    """)


def test_pictures_stand_in_the_docstring():
    from strategies.pipeline.schedule import tables as schedule

    for name, make in SCHEDULES.items():
        assert name in schedule.__doc__
        assert all(line in schedule.__doc__ for line in render(make(3, 4)).splitlines())


def test_fewer_microbatches_than_stages():
    assert render(one_f_one_b(3, 1)) == picture("""
        stage 0  F0 .  .  .  .  B0
        stage 1  .  F0 .  .  B0 .
        stage 2  .  .  F0 B0 .  .
    """)


def test_costs_and_transfer_in_the_picture():
    simulation = simulate(gpipe(2, 2), forward=1, backward=2, transfer=1)
    assert render(simulation) == picture("""
        stage 0  F0 F1 .  .  .  .  .  B1 == B0 ==
        stage 1  .  .  F0 F1 B1 == B0 == .  .  .
    """)
    assert simulation.start[Action("F", 0, 1)] == 2 and simulation.end[Action("F", 0, 1)] == 3
    assert simulation.total_time == 11
    assert simulation.bubble_fraction == pytest.approx(1 - 12 / 22)
    assert render(simulation, time_per_column=2) == picture("""
        stage 0  F0 .  .  .  B1 B0
        stage 1  .  F0 B1 B0 .  .
    """)


def test_one_slow_stage_dominates():
    simulation = simulate(gpipe(3, 8), forward=[1, 5, 1], backward=[2, 10, 2])
    turn_around = 1 + 2  # the slow stage waits for the last one between fill and drain
    assert simulation.total_time == 1 + 8 * 5 + turn_around + 8 * 10 + 2


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_size_runs(name):
    """The simulator raises unless each action is there once, after what it needs, without a deadlock."""
    for p, m in SIZES:
        simulation = simulate(SCHEDULES[name](p, m))
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


def test_one_f_one_b_runs_on_queues():
    """Each action once: a queue has each micro-batch once, and all of them are empty in the end."""
    for p, m in SIZES:
        table = one_f_one_b(p, m)
        assert all(len(row) == 2 * m for row in table)
        assert kept_when_run(table) == [min(p - i, m) for i in range(p)]
    with pytest.raises(AssertionError, match="waits for ever"):
        kept_when_run([[Action("F", 0, 0), Action("B", 0, 0)], [Action("B", 0, 1), Action("F", 0, 1)]])


def test_simulated_times_respect_every_dependency():
    """Checked against the definition, not against the simulator's own notion of what an action needs."""
    forward, backward, transfer = [1.0, 3.0, 2.0, 1.5], [2.5, 4.0, 0.0, 3.0], 0.25
    for make in SCHEDULES.values():
        simulation = simulate(make(4, 7), forward=forward, backward=backward, transfer=transfer)
        start, end = simulation.start, simulation.end
        for m in range(7):
            for i in range(4):
                assert end["F", m, i] == start["F", m, i] + forward[i]
                assert end["B", m, i] == start["B", m, i] + backward[i]
                assert start["B", m, i] >= end["F", m, i]
                if i > 0:
                    assert start["F", m, i] >= end["F", m, i - 1] + transfer
                    assert start["B", m, i - 1] >= end["B", m, i] + transfer
        for row in simulation.schedule:
            assert all(start[after] >= end[before] for before, after in pairwise(row))


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
    for p, m in SIZES:
        if m >= p:  # torch refuses fewer micro-batches than stages
            assert one_f_one_b(p, m) == upstream_table(p, m)
            compared += 1
    assert compared == sum(MAX_MICROBATCHES - p + 1 for p in range(1, MAX_STAGES + 1))


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_bad_counts(make):
    with pytest.raises(ValueError, match="stages must be at least 1, got 0"):
        make(0, 4)
    with pytest.raises(ValueError, match="microbatches must be at least 1, got -1"):
        make(2, -1)


def test_deadlock_names_who_waits_for_what():
    backward_before_forward = [[Action("B", 0, 0), Action("F", 0, 0)]]
    with pytest.raises(ValueError, match=r"deadlock: stage 0 is at B0 and waits for F0 of stage 0\nrow 0: B0 F0"):
        simulate(backward_before_forward)
    # Stage 0 wants the first gradient before it sends the second input, which stage 1 wants before it goes back.
    table = [
        [Action("F", 0, 0), Action("B", 0, 0), Action("F", 1, 0), Action("B", 1, 0)],
        [Action("F", 0, 1), Action("F", 1, 1), Action("B", 0, 1), Action("B", 1, 1)],
    ]
    with pytest.raises(
        ValueError,
        match=r"deadlock: stage 0 is at B0 and waits for B0 of stage 1; stage 1 is at F1 and waits for F1 of stage 0",
    ):
        simulate(table)


def test_incomplete_tables():
    with pytest.raises(ValueError, match="the schedule has no actions"):
        simulate([[], []])
    table = gpipe(2, 3)
    table[1].remove(Action("B", 2, 1))
    with pytest.raises(ValueError, match=r"stage 1 lacks B2\nrow 0: F0 F1 F2 B2 B1 B0\nrow 1: F0 F1 F2 B1 B0"):
        simulate(table)
    table = gpipe(2, 3)
    table[0].append(Action("F", 1, 0))
    with pytest.raises(ValueError, match="stage 0 has F1 more than once"):
        simulate(table)


def test_bad_costs():
    with pytest.raises(ValueError, match=r"forward gives 3 costs for 2 stages: \[1, 2, 3\]"):
        simulate(gpipe(2, 2), forward=[1, 2, 3])
    with pytest.raises(ValueError, match=r"backward must not be negative, got -1"):
        simulate(gpipe(2, 2), backward=-1)
    with pytest.raises(ValueError, match=r"transfer must not be negative, got -0.5"):
        simulate(gpipe(2, 2), transfer=-0.5)
    with pytest.raises(ValueError, match="time_per_column must be positive, got 0"):
        render(gpipe(2, 2), time_per_column=0)


def test_free_actions_cost_nothing():
    simulation = simulate(gpipe(2, 2), forward=0, backward=0)
    assert simulation.total_time == 0 and simulation.bubble_fraction == 0
    assert render(simulation) == "stage 0\nstage 1"
