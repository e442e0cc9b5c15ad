"""What snapshots cost a training step, and how long a pipeline takes to go back to one when its worker is killed.

The model, the batch and the optimizer of the benchmark ``pipeline_step``, on two processes of one thread each. Steps
with a snapshot (``snapshot_every_n_steps=1``) and without are in turns.
"""

import os
import re
import signal
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

from benchmarks.contestants import Relay, Shape
from benchmarks.plots import boxes, plot
from benchmarks.processes import ContestantProcesses
from benchmarks.report import Effort, Section, Table, ratios, spread
from strategies.common.errors import WorkerLost

SCHEDULES, MICROBATCHES, ROUNDS, KILLS = ("gpipe", "1f1b"), 8, 15, 7
TINY = Shape(num_blocks=2, width=32, rows=8, length=8)


class Turn(NamedTuple):
    """A step, until all processes have done all of it.

    Attributes:
        seconds: What it took.
        cpu_seconds: What both processes computed.
    """

    seconds: float
    cpu_seconds: float


class Recovery(NamedTuple):
    """Times from the kill of the worker on, in seconds.

    Attributes:
        noticed: Until the driver had the error.
        restored: From then on, until the pipeline had the state of the snapshot.
        repeated: From then on, until the end of the repeated step.
    """

    noticed: float
    restored: float
    repeated: float


def cpu_seconds(pid: int) -> float:
    """Returns for how long the threads of a process have run."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


class WithSnapshots(Relay):
    """Relay, whose worker is killed now and then."""

    def __init__(self, number: int, shape: Shape, schedule: str) -> None:
        super().__init__(number, shape, schedule)
        self.num_snapshots = 0

    def begin(self) -> int:
        """Starts the pipeline and takes the first snapshots; returns their bytes."""
        self.prepare(MICROBATCHES)
        assert self.pipeline is not None
        self.step()
        for _ in range(2):  # with the states of the optimizer; each takes memory that the kernel has yet to give
            self.take()
            self.pipeline.wait()
        return self.pipeline.snapshot_bytes

    def take(self) -> float:
        """Takes a snapshot; returns the seconds after which the driver goes on."""
        assert self.pipeline is not None
        began = perf_counter()
        self.pipeline.snapshot(self.num_snapshots)
        self.num_snapshots += 1
        return perf_counter() - began

    def turn(self, with_snapshot: bool) -> Turn:
        assert self.pipeline is not None
        pids = os.getpid(), self.worker()
        before, began = sum(map(cpu_seconds, pids)), perf_counter()
        self.passes()
        self.pipeline.optimizers.step_remotes(self.optimizer, {})  # workers step while this process does
        self.optimizer.step()
        if with_snapshot:
            self.take()
        self.pipeline.wait()
        return Turn(perf_counter() - began, sum(map(cpu_seconds, pids)) - before)

    def copied(self) -> float:
        """Returns the seconds of the driver's own copy."""
        assert self.pipeline is not None
        self.pipeline.wait()
        return self.take()

    def kill(self) -> Recovery:
        """Kills the worker in the middle of a step, and repeats the step."""
        assert self.pipeline is not None
        self.take()
        self.pipeline.wait()
        os.kill(self.worker(), signal.SIGKILL)
        killed = perf_counter()
        try:
            self.step()
            raise AssertionError("the worker has been killed, but the step has no error")
        except WorkerLost:
            noticed = perf_counter()
        self.num_snapshots = self.pipeline.recover() + 1
        restored = perf_counter()
        self.step()
        return Recovery(noticed - killed, restored - noticed, perf_counter() - restored)

    def worker(self) -> int:
        """Returns the process id of the worker."""
        assert self.pipeline is not None
        found = re.search(r"process (\d+)", self.pipeline.remotes[0].process.description)
        assert found is not None
        return int(found[1])


def main(effort: Effort) -> Section:
    rounds, kills = effort.rounds_or(ROUNDS), 1 if effort.tiny else KILLS
    costs, recoveries, pictured = [], [], {}
    sizes = []
    for schedule in SCHEDULES:
        relay = ContestantProcesses(WithSnapshots, TINY if effort.tiny else Shape(), schedule)
        sizes += relay.call("begin")
        turns: dict[bool, list[Turn]] = {False: [], True: []}
        copies: list[float] = []
        for number in range(rounds):
            for kind in (True, False) if number % 2 else (False, True):
                turns[kind] += relay.call("turn", kind)
            copies += relay.call("copied")
        found: list[Recovery] = [relay.call("kill")[0] for _ in range(kills)]
        relay.end()
        wall, cpu = ([[turn[k] for turn in turns[kind]] for kind in (True, False)] for k in range(2))
        pictured[schedule] = ratios(*wall)
        costs.append(
            [
                schedule,
                *(f"{1000 * median(own):.0f}" for own in (wall[1], wall[0])),
                *spread(ratios(*wall)),
                *spread(ratios(*cpu)),
                *spread(copies, 1, 1000),
            ]
        )
        step = median(wall[1])
        recoveries.append(
            [
                schedule,
                *spread([each.noticed for each in found], 0, 1000),
                *spread([each.restored for each in found], 0, 1000),
                *spread([sum(each) - step for each in found], 0, 1000),
            ]
        )
    section = Section(
        "Snapshots",
        f"The model of the first section, AdamW, {MICROBATCHES} micro-batches, two processes of one thread each, "
        f"without Lightning: steps with a snapshot and without in turns, {rounds} rounds, the order reversed in every "
        "other one. A step ends when all processes have done all of it, with their copies. Medians, and quartiles; "
        "ratios are those of the two steps of a round. Then the worker is killed at the beginning of a step, "
        f"{kills} times.",
        tables=[
            Table(
                [
                    *("", "without, ms", "with, ms", "ratio", "quartiles"),
                    *("ratio of CPU time", "quartiles", "driver's copy, ms", "quartiles"),
                ],
                costs,
            ),
            Table(
                [
                    *("a killed worker", "until the error, ms", "quartiles", "recover, ms", "quartiles"),
                    *("until the repeated step's end, less a step, ms", "quartiles"),
                ],
                recoveries,
            ),
        ],
        notes=[
            f"Two snapshots take {max(sizes) / 2**20:.0f} MiB on both processes together: twice parameters, buffers "
            "and optimizer states."
        ],
    )
    plot(section, effort, "snapshots.png", lambda figure: boxes(figure.subplots(), pictured, x="ratio"), size=(8, 2))
    return section
