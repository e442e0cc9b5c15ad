"""Predicted and measured time of the passes under every schedule, and under the schedule that a search finds.

The simulator predicts the time from the costs of layers, of the code that the driver runs outside them and of
transfers. These costs are measured next to a busy process, because processes on shared hardware slow each other down.
The speed of such hardware changes from minute to minute, so the costs are measured again in every round, alternating
with the schedules.
"""

import multiprocessing
from collections.abc import Sequence
from contextlib import suppress
from time import sleep
from typing import Any

from benchmarks.contestants import Busy, Measurer, Relay, Shape
from benchmarks.processes import ContestantError, ContestantProcesses
from benchmarks.report import Effort, Section, Table, quartiles, ratios, spread

ROUNDS, WARM_UP = 7, 1
MICROBATCHES = (4, 8, 16)
NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "v-half", "auto")


class Contest:
    """The schedules, and the measurement of the costs of their actions, each in separate processes."""

    def __init__(self, shape: Shape, names: Sequence[str]) -> None:
        self.go = multiprocessing.get_context("spawn").Event()
        self.busy, self.measurer = ContestantProcesses(Busy, shape, self.go), ContestantProcesses(Measurer, shape)
        self.schedules = {name: ContestantProcesses(Relay, shape, name) for name in names}

    def rounds(self, microbatches: int, rounds: int) -> tuple[dict[str, Any], dict[str, list[float]], list[Any]]:
        """Return table and balance of each schedule, and for each round the seconds of its passes and the costs."""
        self.busy.call("prepare", microbatches)
        self.busy.call("step")
        for each in self.schedules.values():
            each.call("prepare", microbatches)
        plans = {name: each.call("plan")[0] for name, each in self.schedules.items()}
        times: dict[str, list[float]] = {name: [] for name in plans}
        costs = []
        for number in range(WARM_UP + rounds):
            now = {}
            for name, each in self.schedules.items():
                each.call("timed_passes")  # while it waited, other contestants have filled caches and memory
                now[name] = each.call("timed_passes")[0]
            found = self.costs(microbatches)
            if number >= WARM_UP:
                costs.append(found)
                for name, seconds in now.items():
                    times[name].append(seconds)
        return plans, times, costs

    def costs(self, microbatches: int) -> Any:
        """Return the costs of one micro-batch, measured next to a busy process."""
        self.go.set()
        self.busy.command("keep_busy")
        sleep(0.05)
        try:
            return self.measurer.call("costs", microbatches)[0]
        finally:
            self.go.clear()
            self.busy.replies()

    def end(self) -> None:
        self.go.clear()
        for processes in [*self.schedules.values(), self.measurer, self.busy]:
            with suppress(ContestantError):
                processes.end()


def table_of(contest: Contest, microbatches: int, rounds: int) -> Table:
    plans, times, costs = contest.rounds(microbatches, rounds)
    predicted = {name: [each.seconds(*plan) for each in costs] for name, plan in plans.items()}
    best = [min(now) for now in zip(*predicted.values(), strict=True)]
    rows = []
    for name, (_, balance) in plans.items():
        low, middle, high = quartiles(ratios(predicted[name], times[name]))
        row = [name, str(balance), f"{quartiles(predicted[name])[1]:.3f}", *spread(times[name])]
        row += [f"{middle:.3f} ({low:.3f} to {high:.3f})", f"{quartiles(ratios(times[name], best))[1]:.3f}"]
        rows.append(row)
    columns = ["passes", "balance", "predicted s", "median s", "quartiles"]
    columns += ["predicted / measured", "of the best predicted"]
    return Table(columns, rows, f"{microbatches} micro-batches")


def main(effort: Effort) -> Section:
    shape = Shape(num_blocks=4, width=64, rows=8, length=16) if effort.tiny else Shape()
    rounds, numbers = effort.rounds_or(ROUNDS), (4,) if effort.tiny else MICROBATCHES
    names = ("zbv", "auto") if effort.tiny else NAMES
    contest = Contest(shape, names)
    try:
        tables = [table_of(contest, number, rounds) for number in numbers]
    finally:
        contest.end()
    return Section(
        "Predicted and measured time of each schedule",
        f"The GPT of the first section, {shape.num_blocks} blocks at width {shape.width}; two processes with one "
        f"thread each; the time of the passes until all stages have finished, without optimizer step; {rounds} "
        "interleaved rounds, in each of which a schedule runs twice and the second time counts. `auto` measures alone "
        "and chooses balance and order by itself, for passes and optimizer step together; the others have an even "
        "split.",
        tables=tables,
        notes=[
            "The costs of the prediction are measured in every round, beside a busy process. The ratios are medians of "
            "the rounds' ratios; the best predicted time is that of these schedules, `auto` included."
        ],
    )
