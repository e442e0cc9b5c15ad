"""Predicted and measured time of the passes under every schedule, and under the one that a search finds.

The simulator predicts from the costs of layers, of the driver's own part and of transfers, measured beside a process
that works, because processes on shared hardware slow each other down. Schedules take turns.
"""

import multiprocessing
from collections.abc import Sequence
from contextlib import suppress
from time import sleep
from typing import Any

from benchmarks.contestants import Busy, Measurer, Relay, Shape
from benchmarks.processes import ContestantError, ContestantProcesses
from benchmarks.report import Effort, Section, Table, quartiles, spread

ROUNDS = 7
MICROBATCHES = (4, 8, 16)
NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "v-half", "auto")


def measured_costs(shape: Shape, microbatches: int) -> Any:
    """Returns the costs of one micro-batch, measured beside a process that works."""
    go = multiprocessing.get_context("spawn").Event()
    busy, measurer = ContestantProcesses(Busy, shape, go), ContestantProcesses(Measurer, shape)
    try:
        busy.call("prepare", microbatches)
        busy.call("step")
        go.set()
        busy.command("keep_busy")
        sleep(0.05)
        (costs,) = measurer.call("costs", microbatches)
        return costs
    finally:
        go.clear()
        with suppress(ContestantError):
            busy.replies()
        busy.end()
        measurer.end()


def timed(
    shape: Shape, names: Sequence[str], microbatches: int, rounds: int
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Returns the table and the balance of each schedule, and the seconds of its passes in each round."""
    contestants = {name: ContestantProcesses(Relay, shape, name) for name in names}
    try:
        for each in contestants.values():
            each.call("prepare", microbatches)
        plans = {name: each.call("plan")[0] for name, each in contestants.items()}
        times: dict[str, list[float]] = {name: [] for name in names}
        for number in range(rounds + 2):
            for name, each in contestants.items():
                (seconds,) = each.call("timed_passes")
                if number >= 2:  # after warm-up
                    times[name].append(seconds)
        return plans, times
    finally:
        for each in contestants.values():
            each.end()


def table_of(shape: Shape, names: Sequence[str], microbatches: int, rounds: int) -> Table:
    costs = measured_costs(shape, microbatches)
    plans, times = timed(shape, names, microbatches, rounds)
    predicted = {name: costs.seconds(*plan) for name, plan in plans.items()}
    best = min(predicted.values())
    rows = []
    for name, (_, balance) in plans.items():
        middle = quartiles(times[name])[1]
        shares = f"{predicted[name] / middle:.3f}", f"{middle / best:.3f}"
        rows.append([name, str(balance), f"{predicted[name]:.3f}", *spread(times[name]), *shares])
    columns = [
        "passes",
        "balance",
        "predicted s",
        "median s",
        "quartiles",
        "predicted / measured",
        "of the best predicted",
    ]
    return Table(columns, rows, f"{microbatches} micro-batches")


def main(effort: Effort) -> Section:
    shape = Shape(num_blocks=4, width=64, rows=8, length=16) if effort.tiny else Shape()
    rounds, numbers = effort.rounds_or(ROUNDS), (4,) if effort.tiny else MICROBATCHES
    names = ("zbv", "auto") if effort.tiny else NAMES
    return Section(
        "Predicted and measured time of each schedule",
        f"The GPT of the first section, {shape.num_blocks} blocks at width {shape.width}; two processes with one "
        f"thread each; the time of the passes until all stages have finished, without optimizer step; {rounds} "
        "interleaved rounds. `auto` measures alone and chooses balance and order by itself; the others have an even "
        "split.",
        tables=[table_of(shape, names, number, rounds) for number in numbers],
        notes=[
            "The costs of the prediction are measured anew for each number of micro-batches, beside a busy process; "
            "the best predicted time is that of these schedules, `auto` included."
        ],
    )
