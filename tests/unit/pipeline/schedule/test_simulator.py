"""The simulator: it computes times, draws timetables, and rejects tables that cannot run."""

from inspect import cleandoc
from itertools import pairwise

import pytest

from strategies.pipeline.schedule.simulator import render, simulate
from strategies.pipeline.schedule.tables import SCHEDULES, Action, gpipe


def test_costs_and_transfer_in_the_picture():
    simulation = simulate(gpipe(2, 2), forward=1, backward=2, transfer=1)
    assert render(simulation) == cleandoc("""
        stage 0  F0 F1 .  .  .  .  .  B1 == B0 ==
        stage 1  .  .  F0 F1 B1 == B0 == .  .  .
    """)
    assert simulation.start[Action("F", 0, 1)] == 2 and simulation.end[Action("F", 0, 1)] == 3
    assert simulation.total_time == 11
    assert simulation.bubble_fraction == pytest.approx(1 - 12 / 22)
    assert render(simulation, time_per_column=2) == cleandoc("""
        stage 0  F0 .  .  .  B1 B0
        stage 1  .  F0 B1 B0 .  .
    """)


def test_one_slow_stage_dominates():
    simulation = simulate(gpipe(3, 8), forward=[1, 5, 1], backward=[2, 10, 2])
    turn_around = 1 + 2  # the slow stage waits for the last one between fill and drain
    assert simulation.total_time == 1 + 8 * 5 + turn_around + 8 * 10 + 2


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
