"""Tables of actions: their timetables, their properties for every size in use, and torch's table of 1F1B."""

from collections import deque
from inspect import cleandoc

import pytest
from torch.distributed.pipelining import Schedule1F1B

from strategies.pipeline.schedule import tables
from strategies.pipeline.schedule.simulator import render, simulate
from strategies.pipeline.schedule.tables import SCHEDULES, Action, gpipe, one_f_one_b

MAX_STAGES, MAX_MICROBATCHES = 16, 64
SIZES = [(p, m) for p in range(1, MAX_STAGES + 1) for m in range(1, MAX_MICROBATCHES + 1)]


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
    for name, make in SCHEDULES.items():
        assert name in tables.__doc__
        assert all(line in tables.__doc__ for line in render(make(3, 4)).splitlines())


def test_fewer_microbatches_than_stages():
    assert render(one_f_one_b(3, 1)) == cleandoc("""
        stage 0  F0 .  .  .  .  B0
        stage 1  .  F0 .  .  B0 .
        stage 2  .  .  F0 B0 .  .
    """)


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
