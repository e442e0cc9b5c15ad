"""The simulator: it computes times, draws timetables, and rejects tables that cannot run."""

from dataclasses import replace
from inspect import cleandoc
from itertools import pairwise

import pytest
from schedule_choices import computations_of

from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.schedule.operations import UserCode
from strategies.pipeline.schedule.tables import (
    SCHEDULES,
    Action,
    gpipe,
    interleaved,
    loop,
    one_f_one_b,
    v_half,
    zb_h1,
    zbv,
)
from strategies.planning.simulator import (
    ActionCosts,
    DriverCosts,
    PreparedTable,
    Simulation,
    on_cores,
    render,
    simulate,
    with_driver_between,
)

TWO_STAGES_EACH = [interleaved, zbv, v_half]


def test_costs_and_transfer_in_the_picture():
    simulation = simulate(gpipe(2, 2), ActionCosts(forward=1, backward=2, transfer=1))
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
    simulation = simulate(gpipe(3, 8), ActionCosts(forward=[1, 5, 1], backward=[2, 10, 2]))
    turn_around = 1 + 2  # the slow stage waits for the last one between fill and drain
    assert simulation.total_time == 1 + 8 * 5 + turn_around + 8 * 10 + 2


def test_simulated_times_respect_every_dependency():
    """Checked against the definition, not against the simulator's own notion of what an action needs."""
    forward, backward, transfer = [1.0, 3.0, 2.0, 1.5], [2.5, 4.0, 0.0, 3.0], 0.25
    for make in (gpipe, one_f_one_b):
        simulation = simulate(make(4, 7), ActionCosts(forward=forward, backward=backward, transfer=transfer))
        start, end = simulation.start, simulation.end
        for m in range(7):
            for i in range(4):
                assert end["F", m, i] == start["F", m, i] + forward[i]
                assert end["B", m, i] == start["B", m, i] + backward[i]
                assert start["B", m, i] >= end["F", m, i]
                if i > 0:
                    assert start["F", m, i] >= end["F", m, i - 1] + transfer
                    assert start["B", m, i - 1] >= end["B", m, i] + transfer
        for row in simulation.rows:
            assert all(start[after] >= end[before] for before, after in pairwise(row))


@pytest.mark.parametrize("unit", [1.0, 0.01])
def test_the_critical_path(unit):
    """The second stage takes longest. Before, it waits for the first micro-batch, and the first stage for the last."""
    costs = ActionCosts(forward=[unit, 3 * unit], backward=[2 * unit, 4 * unit], transfer=unit / 2)
    assert PreparedTable(gpipe(2, 2)).critical_path(costs) == [
        *(Action("F", 0, 0), Action("F", 0, 1), Action("F", 1, 1)),
        *(Action("B", 1, 1), Action("B", 0, 1), Action("B", 0, 0)),
    ]


def test_bad_costs():
    with pytest.raises(ValueError, match=r"forward gives 3 costs for 2 stages: \[1, 2, 3\]"):
        simulate(gpipe(2, 2), ActionCosts(forward=[1, 2, 3]))
    with pytest.raises(ValueError, match=r"backward must not be negative, got -1"):
        simulate(gpipe(2, 2), ActionCosts(backward=-1))
    with pytest.raises(ValueError, match=r"transfer must not be negative, got -0.5"):
        simulate(gpipe(2, 2), ActionCosts(transfer=-0.5))
    with pytest.raises(ValueError, match="before_backward must not be negative, got -1"):
        DriverCosts(before_backward=-1)
    with pytest.raises(ValueError, match="time_per_column must be positive, got 0"):
        render(gpipe(2, 2), time_per_column=0)


def test_free_actions_cost_nothing():
    simulation = simulate(gpipe(2, 2), ActionCosts(forward=0, backward=0))
    assert simulation.total_time == 0 and simulation.bubble_fraction == 0
    assert render(simulation) == "stage 0\nstage 1"


@pytest.mark.parametrize("make", [*TWO_STAGES_EACH, zb_h1], ids=lambda make: make.__name__)
def test_times_of_several_stages_respect_every_dependency(make):
    """Checked against the definition: every action takes its stage's time and starts after what it needs."""
    num = 3 if make is zb_h1 else 6
    costs = ActionCosts(
        forward=[1.0, 3.0, 2.0, 1.5, 1.0, 0.5][:num],
        backward=[2.5, 4.0, 0.0, 3.0, 1.0, 2.0][:num],
        input_grad=[1.0, 2.0, 0.5, 1.0, 3.0, 0.0][:num],
        weight_grad=[2.0, 0.25, 0.5, 1.0, 3.0, 1.0][:num],
        transfer=[0.0, 0.25, 0.75, 0.5, 0.125, 1.0][:num],
    )
    simulation = simulate(make(3, 5), costs)
    start, end, process_of = simulation.start, simulation.end, simulation.placement.process_of
    seconds = {"F": costs.forward, "B": costs.backward, "I": costs.input_grad, "W": costs.weight_grad}

    def arrival(action, at):
        way = costs.transfer[max(action.stage, at)]  # of the input of the later stage, or of its gradient
        return end[action] + (way if process_of[action.stage] != process_of[at] else 0)

    for action in end:
        kind, m, i = action
        assert end[action] == pytest.approx(start[action] + seconds[kind][i])
        if kind == "F" and i > 0:
            assert start[action] >= arrival(Action("F", m, i - 1), i)
        elif kind == "W":
            assert start[action] >= end["I", m, i]
        elif kind != "F":
            assert start[action] >= end["F", m, i]
            if i + 1 < len(process_of):
                assert start[action] >= arrival(action._replace(stage=i + 1), i)
    busy = 0
    for row in simulation.rows:
        assert all(start[after] >= end[before] for before, after in pairwise(row))
        busy += sum(end[action] - start[action] for action in row)
    assert simulation.total_time == max(end.values())
    assert simulation.bubble_fraction == pytest.approx(1 - busy / (3 * simulation.total_time))


def test_micro_batches_of_different_sizes():
    """Each action has the times and bytes of its micro-batch."""
    small = ActionCosts(forward=1, backward=2, activation_bytes=1, driver=DriverCosts(after_bytes=2))
    large = ActionCosts(forward=3, backward=4, transfer=[0, 2], activation_bytes=[5, 7])
    simulation = simulate(one_f_one_b(2, 2), [small, large])
    assert render(simulation) == cleandoc("""
        stage 0  F0 F1 == == B0 == .  .  .  .  .  .  .  .  .  B1 == == ==
        stage 1  .  F0 B0 == .  .  F1 == == B1 == == == .  .  .  .  .  .
    """)
    assert simulation.peak_bytes == [1 + 5, 7]
    with_code = replace(large, driver=DriverCosts(before=1))
    assert simulate(one_f_one_b(2, 2), [with_code, small]).total_time == 1 + 20
    assert simulate(one_f_one_b(2, 2), [large, large]) == simulate(one_f_one_b(2, 2), large)
    for wrong in ([small, large], [small]):
        with pytest.raises(ValueError, match=f"costs are given for {len(wrong)} micro-batches, but the table has 3"):
            simulate(one_f_one_b(2, 3), wrong)


def test_micro_batches_that_are_recomputed():
    costs = ActionCosts(forward=1, backward=2, input_grad=1, recompute=1)
    assert render(simulate(one_f_one_b(2, 3), costs, checkpoint="except_last")) == cleandoc("""
        stage 0  F0 F1 .  .  B0 == == F2 B1 == == B2 ==
        stage 1  .  F0 B0 == F1 B1 == .  F2 B2 == .  .
    """)
    each = [costs, replace(costs, recompute=10), costs]
    assert simulate(one_f_one_b(2, 3), each, checkpoint="except_last").total_time == 13 + 9
    always, never = (simulate(zb_h1(1, 3), costs, checkpoint=mode).total_time for mode in ("always", "never"))
    assert always == never + 3


def test_nothing_is_sent_within_a_process():
    """Under ``v`` the turn of the V is within a process; one process sends nothing at all."""
    free, paid = simulate(zbv(2, 1)), simulate(zbv(2, 1), ActionCosts(transfer=10.0))
    assert free.total_time == 10  # four forward passes, four input gradients, and weight gradients of stages 2 and 0
    assert paid.total_time == free.total_time + 4 * 10  # 0 -> 1, 2 -> 3 and back
    assert simulate(zbv(1, 3), ActionCosts(transfer=10.0)).total_time == simulate(zbv(1, 3)).total_time


def test_memory_of_a_row():
    """F holds 8 and 2 bytes; I frees 5 of the 8, and nothing of the 2; W and B free the rest."""
    row = [("F", 0, 0), ("F", 0, 1), ("I", 0, 1), ("W", 0, 1), ("I", 0, 0)]
    costs = ActionCosts(activation_bytes=[8, 2], kept_bytes=[3, 2])
    early = [Action(*a) for a in [*row, ("W", 0, 0)]]
    assert simulate([early], costs).peak_bytes == [10]
    late = [Action(*a) for a in [*row, ("F", 1, 0), ("F", 1, 1), ("W", 0, 0), ("B", 1, 1), ("B", 1, 0)]]
    simulation = simulate([late], costs)
    assert simulation.peak_bytes == [3 + 8 + 2]  # 3 of the first micro-batch
    assert simulation.peak_activations == [2, 1]
    assert simulate([late], ActionCosts(activation_bytes=[8, 2])).peak_bytes == [8 + 8 + 2]  # I frees nothing


def test_memory_of_schedules():
    """In activations of a stage of 1F1B; each of two stages per process holds half as much."""
    p, m = 4, 16
    half, whole = ActionCosts(activation_bytes=0.5), ActionCosts(activation_bytes=1.0)
    assert simulate(one_f_one_b(p, m), whole).peak_bytes == [4, 3, 2, 1]
    assert simulate(zb_h1(p, m), whole).peak_bytes == [4, 4, 4, 4]
    assert simulate(interleaved(p, m), half).peak_bytes == [5.5, 4.5, 3.5, 2.5]
    assert simulate(zbv(p, m), half).peak_bytes == [4, 4, 4, 4]
    assert simulate(v_half(p, m), half).peak_bytes == [3, 3, 3, 3]


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, zb_h1, *TWO_STAGES_EACH], ids=lambda make: make.__name__)
@pytest.mark.parametrize(("processes", "num"), [(1, 3), (2, 5), (4, 3), (4, 8), (5, 13)])
def test_user_code_of_the_driver(make, processes, num):
    """Each part once, ``b`` before the forward pass of stage 0, ``a`` after its backward pass, and no deadlock."""
    costs = ActionCosts(driver=DriverCosts(before=0.5, after=0.75, before_backward=0.25), transfer=0.125)
    table = make(processes, num)
    plain, simulation = simulate(table, ActionCosts(transfer=0.125)), simulate(table, costs)
    start, end, placement = simulation.start, simulation.end, simulation.placement
    last = placement.num_stages - 1
    for r, row in enumerate(simulation.rows):
        assert [step for step in row if isinstance(step, Action)] == table[r]
        assert len(row) - len(table[r]) == (2 * num if r == placement.driver else 0)
    way = 0.125 if placement.driver != placement.process_of[0] else 0.0
    for m in range(num):
        gradients = next(a for a in (Action("B", m, 0), Action("I", m, 0)) if a in end)
        assert end[UserCode("b", m)] + way <= start[Action("F", m, 0)]
        assert end[gradients] + way <= start[UserCode("a", m)]
        assert end[Action("F", m, last)] - start[Action("F", m, last)] == 1.75
    assert simulation.total_time >= plain.total_time


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1"])
@pytest.mark.parametrize(("processes", "num", "lists"), [(2, 4, 2), (3, 5, 2), (2, 3, 3)])
def test_the_rows_of_several_lists_are_those_of_the_engine(name, processes, num, lists):
    programs = Settings(schedule=name).programs(processes, num_lists=lists)
    table = SCHEDULES[name].of(processes, num, SCHEDULES[name].chunks[1], lists)
    driver = DriverCosts(0.5, 0.75, 0.25, [(0.125, 0.375)] * (lists - 1))
    plain = simulate(table, placement=programs.placement)
    simulation = simulate(table, ActionCosts(driver=driver), placement=programs.placement)
    assert simulation.rows == [*map(computations_of, programs["training", num, 0].rows)]
    start, end = simulation.start, simulation.end
    for first in programs.placement.firsts[1:]:
        for m in range(num):
            code, back = UserCode("b", m, first), UserCode("a", m, first)
            assert end[code] - start[code] == 0.125 and end[back] - start[back] == 0.375
            assert end[Action("F", m, first - 1)] <= start[code] and end[code] <= start[Action("F", m, first)]
    assert simulation.total_time > plain.total_time
    with pytest.raises(ValueError, match="between gives 1 pairs of costs for 1 lists"):
        simulate(one_f_one_b(2, 2), ActionCosts(driver=DriverCosts(between=[(1.0, 1.0)])))


def test_under_gpipe_each_list_waits_for_the_whole_batch():
    """Two processes, two micro-batches: three forward passes in a row per list, then three backward passes of two."""
    costs, placement = ActionCosts(forward=1.0, backward=2.0), loop(2).repeated(2)
    simulation = simulate(gpipe(2, 2, 2), costs, placement=placement, at_once=True)
    assert simulation.total_time == 3 + 3 + 6 + 6
    whole = with_driver_between(simulation, DriverCosts(1.0, 3.0, 2.0, [(5.0, 7.0)]))
    assert whole.total_time == 18 + 1 + 3 + 2 + 5 + 7
    start, end = whole.start, whole.end
    code, back = (next(step for step in whole.rows[1] if step[::2] == (part, 2)) for part in "ba")
    assert (start[code], end[code], start[Action("F", 0, 2)]) == (4.0, 9.0, 9.0)
    assert (start[back], end[back], start[Action("B", 1, 1)]) == (21.0, 28.0, 28.0)
    assert end[Action("F", 1, 3)] == 1 + 3 + 5 + 3 + 3  # with the loss
    busy = sum(end[step] - start[step] for step in end)
    assert busy == 2 * 4 * 3 + 18 and whole.bubble_fraction == pytest.approx(1 - busy / 72)


def test_memory_of_user_code():
    driver = DriverCosts(before=1.0, before_bytes=16.0, after_bytes=100.0)
    simulation = simulate(one_f_one_b(1, 2), ActionCosts(driver=driver, activation_bytes=4.0))
    assert simulation.peak_bytes == [16 + 4 + 100]  # while the loss of a micro-batch is computed
    assert simulate(one_f_one_b(2, 2), ActionCosts(driver=driver, activation_bytes=4.0)).peak_bytes[0] == 8


def test_processes_that_share_cores() -> None:
    """Four processes on two cores: where all of them have work, that takes twice as long."""
    table = SCHEDULES["1f1b"].table(4, 8, 1)
    alone = simulate(table, ActionCosts(forward=[1.0, 2.0, 1.0, 3.0], backward=2.0, transfer=0.125))
    last = [0.5, 0.0, 0.25, 0.0]
    assert on_cores(alone, 4, last) == (alone, max(alone.total_time, *map(sum, zip(ends(alone), last, strict=True))))
    shared, end = on_cores(alone, 2, last)
    work = sum(time - alone.start[step] for step, time in alone.end.items())
    assert max(work / 2, alone.total_time) < shared.total_time < 2 * alone.total_time
    assert sorted(shared.end, key=lambda step: (shared.end[step], step)) == sorted(
        alone.end, key=lambda step: (alone.end[step], step)
    )
    assert 0 < shared.bubble_fraction < alone.bubble_fraction
    assert shared.total_time < end <= shared.total_time + 2 * max(last)
    first = Action("F", 0, 0)
    assert shared.start[first] == 0.0 and shared.end[first] == 1.0, "nobody else has work yet"
    equal = simulate([[Action("F", 0, i), Action("B", 0, i)] for i in range(2)], ActionCosts(transfer=0.0))
    assert on_cores(equal, 1, [0.0, 0.0])[1] == equal.total_time
    assert on_cores(equal, 1, [1.0, 2.0])[1] == equal.total_time + 3.0, "all work, one after the other"


def ends(simulation: Simulation) -> list[float]:
    return [max(simulation.end[step] for step in row) for row in simulation.rows]
