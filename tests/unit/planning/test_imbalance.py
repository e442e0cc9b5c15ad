"""What recorded steps say of a balance: slow processes, the better balance, and what it is predicted to bring."""

from typing import Any

import pytest

from strategies.pipeline.schedule.operations import UserCode
from strategies.pipeline.schedule.tables import SCHEDULES, ActionTable
from strategies.pipeline.stage.records import LayerRecord, ProcessRecords, Record
from strategies.planning.imbalance import Imbalance, MeasuredStep, assess, measured_step
from strategies.planning.simulator import ActionCosts, DriverCosts, simulate

MICROBATCHES = 4


def table_of(name: str, processes: int) -> ActionTable:
    return SCHEDULES[name].table(processes, MICROBATCHES, SCHEDULES[name].chunks[1])


def recorded_step(
    name: str,
    forward: list[float],
    balance: list[int],
    slowness: list[float],
    *,
    elements: int = 8,
    loss: float = 0.0,
    before: float = 0.0,
    checkpoint: str = "never",
) -> MeasuredStep | None:
    """Return what a step says in which each layer takes the given time, twice that backwards, and slow processes more.

    Args:
        name: The schedule.
        forward: Of each layer, on a process that is not slow.
        balance: The number of layers of each chunk.
        slowness: Of each process.
        elements: Of the input of each layer.
        loss: What the driver's code after the call of the module takes.
        before: What the driver's code before the call takes.
        checkpoint: Which micro-batches are recomputed.
    """
    table = table_of(name, len(slowness))
    places = [range(sum(balance[:i]), sum(balance[: i + 1])) for i in range(len(balance))]
    process = {action.stage: r for r, row in enumerate(table) for action in row}
    own = [slowness[process[i]] * sum(forward[place] for place in places[i]) for i in range(len(balance))]
    driver = DriverCosts(before, loss, before / 2)
    costs = ActionCosts(own, [2 * t for t in own], own, own, own, transfer=0.01, driver=driver)
    simulation = simulate(table, costs, checkpoint=checkpoint)
    rows: list[list[Record]] = []
    for steps in simulation.rows:
        row = []
        for step in steps:
            start, end = simulation.start[step], simulation.end[step]
            if isinstance(step, UserCode):
                row.append(Record(step.part, step.microbatch, step.stage, 0, start, start, end, end))
                continue
            is_last = step.kind == "F" and step.stage == len(balance) - 1
            row.append(Record(*step, 0, start, start, end - loss * is_last, end - loss * is_last))
            if is_last:
                row.append(Record("loss", step.microbatch, step.stage, 0, end - loss, end - loss, end, end))
        rows.append(row)
    recorded = [
        ProcessRecords(
            row,
            0,
            {
                place: LayerRecord(slowness[r] * forward[place], elements)
                for i in process
                if process[i] == r
                for place in places[i]
            },
        )
        for r, row in enumerate(rows)
    ]
    return measured_step(rows, recorded, balance, whole_batch=False, checkpoint=checkpoint)


def assessed(
    name: str,
    forward: list[float],
    balance: list[int],
    slowness: list[float],
    kinds: list[str] | None = None,
    **more: Any,
) -> Imbalance:
    step = recorded_step(name, forward, balance, slowness, **more)
    assert step is not None
    return assess([step], kinds or ["block"] * len(forward), lambda m: table_of(name, len(slowness)), balance)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_a_slow_process_is_found_and_relieved(name: str) -> None:
    found = assessed(name, [1.0] * 12, [6, 6], [2.0, 1.0])
    assert found.slowness == pytest.approx([2.0, 1.0]) and found.busiest == found.slowest == 0
    assert found.better == [4, 8]  # both take 8 for a forward pass; before, stage 0 took 12
    better = recorded_step(name, [1.0] * 12, [4, 8], [2.0, 1.0])
    assert better is not None and found.better_seconds == pytest.approx(better.seconds, rel=1e-3)
    assert found.gain == pytest.approx(1 - better.seconds / found.seconds, abs=1e-3) and found.gain > 0.15


def test_with_several_chunks_and_code_of_the_driver() -> None:
    forward, balance = [1.0] * 12, [3, 3, 3, 3]
    found = assessed("interleaved", forward, balance, [1.0, 1.75], loss=0.5, before=0.25)
    assert found.slowness == pytest.approx([1.0, 1.75]) and found.slowest == 1
    assert sum(found.better) == 12 and found.better[0] + found.better[2] > 6
    better = recorded_step("interleaved", forward, found.better, [1.0, 1.75], loss=0.5, before=0.25)
    assert better is not None and found.better_seconds == pytest.approx(better.seconds, rel=0.02)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_a_process_that_recomputes_more_is_not_slow(name: str) -> None:
    """Except under gpipe, the driver recomputes nothing here, so it can have more layers than the other stage."""
    found = assessed(name, [1.0] * 12, [6, 6], [1.0, 1.0], checkpoint="except_last")
    assert found.slowness == pytest.approx([1.0, 1.0]) and found.slowest is None
    better = recorded_step(name, [1.0] * 12, found.better, [1.0, 1.0], checkpoint="except_last")
    assert better is not None and found.better_seconds == pytest.approx(better.seconds, rel=1e-3)
    assert (found.better[1] > 6) == (name != "gpipe")


def test_layers_that_are_heavier_do_not_make_a_process_slow() -> None:
    found = assessed("1f1b", [2.0, 2.0, 2.0, 1.0, 1.0], [3, 2], [1.0, 1.0], ["wide"] * 3 + ["thin"] * 2)
    assert found.slowness == [1.0, 1.0] and found.slowest is None and found.busiest == 0
    assert found.better == [2, 3] and found.gain > 0.1


def test_layers_with_smaller_inputs_are_of_another_kind() -> None:
    step = recorded_step("1f1b", [2.0, 2.0, 1.0, 1.0], [2, 2], [1.0, 1.0])
    assert step is not None
    step.elements[:] = [64, 64, 32, 32]
    found = assess([step], ["block"] * 4, lambda m: table_of("1f1b", 2), [2, 2])
    assert found.slowness == [1.0, 1.0]


def test_groups_of_processes_without_layers_in_common() -> None:
    kinds = ["a", "a", "a", "b", "b", "b"]
    found = assessed("1f1b", [1.0, 1.0, 1.0, 5.0, 5.0, 5.0], [1, 2, 2, 1], [2.0, 1.0, 1.0, 1.5], kinds)
    assert found.slowness == pytest.approx([2.0, 1.0, 1.0, 1.5])


def test_an_even_balance_is_kept() -> None:
    found = assessed("gpipe", [1.0] * 4, [2, 2], [1.0, 1.0])
    assert found.better == found.balance == [2, 2] and found.gain == 0 and found.slowest is None


def test_a_slow_process_without_a_better_balance() -> None:
    found = assessed("gpipe", [1.0] * 2, [1, 1], [1.0, 1.8])
    told = found.described(["stage 0", "the driver"], least_gain=0.05)
    assert found.gain == 0 and "The driver takes 1.8 times as long for its layers as others would." in told
    assert "Balance" not in told and told.startswith("most waiting is for the driver (busy ")


def test_words() -> None:
    found = Imbalance([0.91, 0.48, 0.5], [1.0, 1.0, 1.0], 0.437, [6, 6], [5, 7], 0.412)
    assert found.described(["stage 0", "stage 1", "the driver"], least_gain=0.05) == (
        "most waiting is for stage 0 (busy 91% of the passes; the others 49%). Balance [5, 7] instead of [6, 6]: "
        "passes predicted in 412 ms instead of 437 (-6%)."
    )


def test_the_median_of_several_steps_counts() -> None:
    steps = [recorded_step("1f1b", [1.0] * 12, [6, 6], [slow, 1.0]) for slow in (1.0, 1.0, 3.0)]
    known = [step for step in steps if step is not None]
    found = assess(known, ["block"] * 12, lambda m: table_of("1f1b", 2), [6, 6])
    assert found.better == [6, 6] and found.slowest is None


def test_a_step_that_lacks_a_backward_pass_or_layers_says_nothing() -> None:
    evaluated, layers = [[Record("F", 0, 0, 0, 0.0, 0.0, 1.0, 1.0)]], {0: LayerRecord(1.0, 8)}
    own = [ProcessRecords(evaluated[0], 0, layers)]
    assert measured_step(evaluated, own, [1], whole_batch=True, checkpoint="never") is None
    trained = [[*evaluated[0], Record("B", 0, 0, 0, 1.0, 1.0, 2.0, 2.0)]]
    assert measured_step(trained, [ProcessRecords(trained[0], 0)], [1], whole_batch=True, checkpoint="never") is None
    own = [ProcessRecords(trained[0], 0, layers)]
    assert measured_step(trained, own, [1], whole_batch=True, checkpoint="never") is not None
