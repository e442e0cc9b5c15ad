"""Rows of a plan: times are the simulator's, bytes are those that one computes by hand."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, islice, pairwise
from typing import Any

import pytest

from strategies.optim.costs import StepCost
from strategies.pipeline.partition.memory import Need
from strategies.pipeline.partition.profiling import PassBytes
from strategies.pipeline.schedule.program import ranks_of
from strategies.pipeline.schedule.tables import SCHEDULES, Placement, loop
from strategies.planning.action_costs import ACTION_SECONDS, DriverPart, PlannedLayer
from strategies.planning.plan_rows import Measured, PlanRow, activation_peaks, best_row, plan_row
from strategies.planning.search import LayerCosts
from strategies.planning.simulator import ActionCosts, DriverCosts, simulate, with_driver_between

FORWARD, BACKWARD, TRANSFER = 0.010, 0.020, 0.001
HELD = PassBytes(inner=100, input=10, input_size=10, output=0, output_size=10, forward_extra=5, backward_extra=30)
NAMES = tuple(SCHEDULES)


def needs_of(needs: Sequence[Need], balance: Sequence[int], placement: Placement) -> list[Need]:
    """Without layers that share parameters: sums, with the driver's own part."""
    found, layers = [Need()] * (max(ranks_of(placement)) + 1), iter(needs)
    for rank, number in zip(ranks_of(placement), balance, strict=True):
        found[rank] = sum(islice(layers, number), found[rank])
    return [*found[:-1], found[-1] + Need(8, 8, 16)]


def measured(
    microbatches: int = 4,
    *,
    layers: int = 4,
    driver: DriverCosts | None = None,
    driver_peak: int = 0,
    checkpoint: str = "never",
    **settings: Any,
) -> Measured:
    """Equal layers, each with 8 bytes of parameters and of gradients and 16 of states; the driver has as much."""
    costs = LayerCosts(FORWARD, BACKWARD / 2, BACKWARD / 2, BACKWARD, activation_bytes=110, kept_bytes=40)
    defaults: dict[str, Any] = {
        "layers": [PlannedLayer(costs, HELD)] * layers,
        "driver": DriverPart(driver or DriverCosts(), 0.0, driver_peak),
        "needs": [Need(8, 8, 16)] * layers,
        "outside": Need(8, 8, 16),
        "needs_of": partial(needs_of, settings.get("needs", [Need(8, 8, 16)] * layers)),
        "steps": [StepCost(0.002, 3)] * layers,
        "outside_step": StepCost(0.002, 4),
        "transfer": TRANSFER,
        "microbatches": microbatches,
        "checkpoint": checkpoint,
        "rows": 16,
        "input_bytes": 10,
    }
    return Measured(**{**defaults, **settings})


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpipe"])
def test_times_are_those_of_the_simulator(name: str) -> None:
    named, driver = SCHEDULES[name], DriverCosts(0.001, 0.003, 0.002)
    chunks = named.chunks[1]
    row = plan_row(measured(driver=driver), 2, name, chunks, balance=[4 // (2 * chunks)] * 2 * chunks)
    layers = 4 // (2 * chunks)
    costs = ActionCosts(
        forward=layers * FORWARD + ACTION_SECONDS,
        backward=layers * BACKWARD + ACTION_SECONDS,
        input_grad=layers * BACKWARD / 2 + ACTION_SECONDS,
        weight_grad=layers * BACKWARD / 2,
        transfer=TRANSFER,
        driver=driver,
    )
    simulation = simulate(named.table(2, 4, chunks), costs)
    ends = [max(simulation.end[step] for step in own) for own in simulation.rows]
    steps = [0.002 * 2] * 2
    steps[simulation.placement.driver] += 0.002
    assert row.seconds == pytest.approx(max(end + step for end, step in zip(ends, steps, strict=True)))
    assert row.idle == pytest.approx(simulation.bubble_fraction)
    assert row.rows_per_second == pytest.approx(16 / (row.seconds or 0.0))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_several_lists(name: str) -> None:
    """Times are the simulator's, with the code between the lists; each process has layers of both lists."""
    driver = DriverCosts(0.001, 0.003, 0.002, [(0.004, 0.005)])
    known = measured(driver=driver, layers=5, lengths=(2, 3))
    row = plan_row(known, 2, name, 1, balance=[1, 1, 1, 2])
    layers, placement, is_gpipe = [1, 1, 1, 2], loop(2).repeated(2), name == "gpipe"
    costs = ActionCosts(
        forward=[number * FORWARD + ACTION_SECONDS for number in layers],
        backward=[number * BACKWARD + ACTION_SECONDS for number in layers],
        input_grad=[number * BACKWARD / 2 + ACTION_SECONDS for number in layers],
        weight_grad=[number * BACKWARD / 2 for number in layers],
        transfer=TRANSFER,
        driver=DriverCosts() if is_gpipe else driver,
    )
    simulation = simulate(SCHEDULES[name].of(2, 4, 1, 2), costs, placement=placement, at_once=is_gpipe)
    if is_gpipe:
        simulation = with_driver_between(simulation, driver.of_batch(4))
    ends = [max(simulation.end[step] for step in own) for own in simulation.rows]
    assert row.seconds == pytest.approx(max(ends[0] + 2 * 0.002, ends[1] + 4 * 0.002))
    worker, last = row.processes
    assert (worker.layers, last.layers) == ([0, 2], [1, 3, 4])
    assert (worker.need, last.need) == (Need(16, 16, 32), Need(32, 32, 64))
    free = plan_row(known, 2, name, 1)
    assert sum(free.balance[:2]) == 2 and free.seconds is not None and free.seconds <= row.seconds
    assert sum(plan_row(known, 2, name, 1, memory_limit_bytes=1).balance[:2]) == 2
    without = plan_row(replace(known, has_times=False), 2, name, 1)
    assert without.seconds is None and sum(without.balance[:2]) == 2


def test_bytes_of_what_the_code_between_lists_keeps() -> None:
    """The driver holds them from the code to its backward pass; under gpipe those of all micro-batches."""
    known = measured(layers=4, lengths=(2, 2))
    for name, expected in (
        ("gpipe", 40 + 8 * 110 + 4 * 1000 + 4 * 10 + 30),  # both lists, and the gradient of the whole output
        ("1f1b", 40 + 3 * 110 + 3 * 1000 + 10),  # three of the first list are on their way when one of them comes back
    ):
        for size in (0, 1000):
            driver = known.driver._replace(between_bytes=[size])
            worker, last = plan_row(replace(known, driver=driver), 2, name, 1, balance=[1] * 4).processes
            assert worker.activations == (8 * 110 + 30 if name == "gpipe" else 5 * 110 + 30)
        assert last.activations == expected


def test_under_gpipe_the_stages_wait_for_the_driver() -> None:
    driver = DriverCosts(0.001, 0.003, 0.002)
    without, row = plan_row(measured(), 2, "gpipe", 1), plan_row(measured(driver=driver), 2, "gpipe", 1)
    assert row.simulation is not None and without.simulation is not None
    assert row.simulation.total_time == pytest.approx(without.simulation.total_time + 4 * 0.006)
    busy = 4 * (4 * (FORWARD + BACKWARD) + 2 * 2 * ACTION_SECONDS + 0.006)
    assert row.idle == pytest.approx(1 - busy / (2 * row.simulation.total_time))
    for own in row.simulation.rows:  # no two steps of a process at once
        times = sorted((row.simulation.start[step], row.simulation.end[step]) for step in own)
        assert all(first[1] <= second[0] + 1e-9 for first, second in pairwise(times))


def test_bytes_of_every_process() -> None:
    row = plan_row(measured(gradient_sets=2), 2, "1f1b", 1, balance=[3, 1])
    worker, driver = row.processes
    assert (worker.layers, driver.layers) == ([0, 1, 2], [3])
    assert (worker.need, driver.need) == (Need(24, 24, 48), Need(16, 16, 32))
    # A layer keeps 100 and its input, 10; of stage 0 two micro-batches; 30 more in the backward pass.
    assert worker.activations == 2 * 330 + 30
    assert driver.activations == 4 * 10 + 110 + 30  # its batch
    # And earlier gradients.
    assert worker.tensor_bytes == 96 + 690 + 24 and driver.tensor_bytes == 64 + 180 + 16
    for known, name in ((measured(), "1f1b"), (measured(gradient_sets=2), "gpipe")):
        assert [process.earlier_gradients for process in plan_row(known, 2, name, 1).processes] == [0, 0]
    assert (worker.step.seconds, driver.step.seconds) == (pytest.approx(0.006), pytest.approx(0.004))
    assert (worker.step.extra_bytes, driver.step.extra_bytes) == (3, 4)


def test_gradients_that_replicas_divide_are_freed_before_the_step() -> None:
    steps = {"steps": [StepCost(0.002, 1000)] * 4, "outside_step": StepCost(0.002, 1000)}
    for owners, freed in ((1, 0), (2, 12), (4, 18)):
        worker, driver = plan_row(measured(num_owners=owners, **steps), 2, "1f1b", 1, balance=[3, 1]).processes
        assert worker.need.gradients == 24 and worker.freed_gradients == freed
        assert worker.tensor_bytes == 96 + worker.step.extra_bytes - freed
        assert driver.tensor_bytes == 64 + driver.step.extra_bytes - freed * 16 // 24
    worker, _ = plan_row(measured(num_owners=4), 2, "1f1b", 1, balance=[3, 1]).processes
    assert worker.tensor_bytes == 96 + 690, "the passes need more than the step"
    kept, _ = plan_row(measured(num_owners=4, gradient_sets=1.25), 2, "1f1b", 1, balance=[3, 1]).processes
    assert kept.tensor_bytes == worker.tensor_bytes + 6


def peaks(name: str, balance: Sequence[int], **settings: Any) -> list[float]:
    named = SCHEDULES[name]
    chunks = named.chunks[1]
    known = measured(**settings)
    return activation_peaks(
        named.table(2, known.microbatches, chunks),
        named.placement(2, chunks),
        balance,
        known,
        at_once=name == "gpipe",
    )


def test_peaks_follow_the_schedule() -> None:
    assert peaks("gpipe", [2, 2]) == [4 * 220 + 30, 40 + 4 * 220 + 4 * 10 + 30]  # the gradient of the whole output
    assert peaks("1f1b", [2, 2], microbatches=8) == [2 * 220 + 30, 80 + 220 + 30]
    assert peaks("gpipe", [2, 2], driver_peak=200)[1] == 40 + 4 * 220 + 40 + 4 * 200
    assert peaks("1f1b", [2, 2], driver_peak=200)[1] == 40 + 220 + 10 + 200
    driver, worker = peaks("zbv", [1, 1, 1, 1])
    assert driver > worker  # which has the first and the last chunk, and the batch
    assert peaks("v-half", [1, 1, 1, 1], microbatches=8)[1] < peaks("zbv", [1, 1, 1, 1], microbatches=8)[1]


def test_recomputed_microbatches_keep_their_input_only() -> None:
    always, last = (peaks("gpipe", [2, 2], checkpoint=mode) for mode in ("always", "except_last"))
    assert always[0] == 3 * 10 + 220 + 30 + 10  # the inputs of all four, and one micro-batch again
    assert last[0] == 3 * 10 + 220 + 30
    assert peaks("gpipe", [2, 2])[0] > always[0]


def test_what_is_recomputed_takes_time_and_the_last_stage_of_1f1b_recomputes_nothing() -> None:
    """A micro-batch whose backward pass follows at once is kept, which the last micro-batch alone is under gpipe."""
    number, again = 8, 2 * FORWARD
    never, kept, always = (
        plan_row(measured(number, checkpoint=mode), 2, "1f1b", 1, balance=[2, 2]).seconds
        for mode in ("never", "except_last", "always")
    )
    assert always - never == pytest.approx((number + 1) * again, rel=0.01)  # the last stage, then the first stage
    assert always - kept > again and kept - never > again
    alone = (
        plan_row(measured(number, checkpoint=mode), 1, "1f1b", 1, balance=[4]).seconds
        for mode in ("never", "except_last")
    )
    assert len({*alone}) == 1
    with_logits = {"microbatches": number, "driver_peak": 200}
    assert peaks("1f1b", [2, 2], checkpoint="except_last", **with_logits)[1] == peaks("1f1b", [2, 2], **with_logits)[1]


def test_a_limit_changes_the_balance_or_marks_the_row() -> None:
    large = [Need(1000, 1000, 2000), *[Need(8, 8, 16)] * 3]
    free = plan_row(measured(needs=large), 2, "1f1b", 1)
    assert free.balance == [2, 2] and free.fits
    limited = plan_row(measured(needs=large), 2, "1f1b", 1, memory_limit_bytes=5300)
    assert limited.balance == [1, 3] and limited.fits
    assert not plan_row(measured(needs=large, gradient_sets=2), 2, "1f1b", 1, memory_limit_bytes=5300).fits
    tight = plan_row(measured(needs=large), 2, "1f1b", 1, memory_limit_bytes=4800)
    assert not tight.fits and tight.peak_bytes > 4800
    given = plan_row(measured(needs=large), 2, "1f1b", 1, balance=[2, 2], memory_limit_bytes=5300)
    assert given.balance == [2, 2] and not given.fits


@pytest.mark.parametrize("schedule", NAMES)
def test_a_balance_that_fits_is_found(schedule: str) -> None:
    sizes = [100, 900, 200, 700, 300, 400, 1200, 100]
    model = measured(layers=8, needs=[Need(size, size, 2 * size) for size in sizes], steps=[StepCost(0.002)] * 8)
    chunks = SCHEDULES[schedule].chunks[1]
    every = [
        plan_row(model, 2, schedule, chunks, balance=[b - a for a, b in pairwise([0, *cuts, 8])]).peak_bytes
        for cuts in combinations(range(1, 8), 2 * chunks - 1)
    ]
    assert plan_row(model, 2, schedule, chunks, memory_limit_bytes=min(every)).peak_bytes == min(every)


def test_without_times() -> None:
    row = plan_row(measured(has_times=False, needs=[Need(900), Need(0), Need(0), Need(0)]), 2, "1f1b", 1)
    assert row.balance == [1, 3]
    assert row.seconds is row.idle is row.rows_per_second is row.simulation is None


def test_a_limit_is_met_without_times() -> None:
    """The first stage holds two micro-batches, so layers of equal sizes are not balanced by their sizes."""
    free, limited = (
        plan_row(measured(has_times=False, layers=8, needs=[Need()] * 8), 2, "1f1b", 1, memory_limit_bytes=limit)
        for limit in (None, 900)
    )
    assert free.balance == [4, 4] and free.peak_bytes > 900
    assert limited.balance == [3, 5] and limited.fits


def test_the_best_row() -> None:
    row = plan_row(measured(), 2, "1f1b", 1)
    slow, fast = replace(row, seconds=2.0), replace(row, seconds=1.0)
    assert best_row([slow, fast]) is fast
    too_large = replace(fast, memory_limit_bytes=1)
    assert best_row([slow, too_large]) is slow
    assert best_row([too_large]) is too_large
    small: PlanRow = replace(row, seconds=None, processes=row.processes[1:])
    assert best_row([replace(row, seconds=None), small]) is small
