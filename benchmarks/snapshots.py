"""The cost of repairable steps, and the time of a repair when a worker is killed.

The benchmark uses the model, the batch and the optimizer of ``pipeline_step``, on two processes with one thread each.
It alternates steps of two pipelines: one takes a snapshot after each step and keeps a log of what it sends, the other
does neither.
"""

import os
import re
import signal
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.contestants import PROCESSES, Relay, Shape, make_optimizer
from benchmarks.plots import boxes, plot
from benchmarks.processes import ContestantProcesses
from benchmarks.report import Effort, Section, Table, ratios, spread
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.recovery.repairs import Recovery

SCHEDULES, MICROBATCHES, ROUNDS, KILLS = ("gpipe", "1f1b"), 8, 15, 7
TINY = Shape(num_blocks=2, width=32, rows=8, length=8)


class Turn(NamedTuple):
    """A step, until all processes have finished it.

    Attributes:
        seconds: The time of the step.
        cpu_seconds: The processor time of both processes.
    """

    seconds: float
    cpu_seconds: float


class Killed(NamedTuple):
    """A step in which the worker is killed, in seconds.

    Attributes:
        step: The time of the step.
        repair: The time of the repair within the step, until the driver goes on.
        restart: The part of it until the new worker has started from the snapshot.
    """

    step: float
    repair: float
    restart: float


def cpu_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


class Repairable(Relay):
    """Relay, with a worker that can be killed.

    Args:
        number: The number of the member.
        shape: The model.
        schedule: The schedule.
        recovery: How lost workers are replaced; ``None`` if they are not.
    """

    def __init__(self, number: int, shape: Shape, schedule: str, recovery: Recovery | None) -> None:
        super().__init__(number, shape, schedule)
        self.recovery = recovery

    def start(self, model: nn.Sequential, balance: list[int]) -> None:
        self.model, self.optimizer = model, make_optimizer(model)
        devices = [torch.device("cpu")] * PROCESSES
        self.pipeline = Pipeline(
            model, balance, devices, self.settings, optimizers=[self.optimizer], recovery=self.recovery
        )
        self.pipeline.start()

    def begin(self) -> None:
        """Start the pipeline and warm up, so that the kernel has provided the memory of both snapshots."""
        self.prepare(MICROBATCHES)
        for _ in range(3):
            self.turn()

    def turn(self) -> Turn:
        assert self.pipeline is not None
        pids = os.getpid(), self.worker()
        before, began = sum(map(cpu_seconds, pids)), perf_counter()
        self.whole_step()
        return Turn(perf_counter() - began, sum(map(cpu_seconds, pids)) - before)

    def whole_step(self) -> None:
        assert self.pipeline is not None
        self.passes()
        self.pipeline.optimizers.step_remotes(self.optimizer, {})  # workers step while this process does
        self.optimizer.step()
        self.pipeline.optimizers.after_step(self.optimizer)
        self.pipeline.wait()

    def kill(self) -> Killed:
        """Kill the worker at the beginning of a step."""
        assert self.pipeline is not None
        os.kill(self.worker(), signal.SIGKILL)
        began = perf_counter()
        self.whole_step()
        seconds, repair = perf_counter() - began, self.pipeline.repairs[-1]
        return Killed(seconds, repair.seconds, repair.restart_seconds)

    def worker(self) -> int:
        """Return the process id of the worker."""
        assert self.pipeline is not None
        found = re.search(r"process (\d+)", self.pipeline.remotes[0].process.description)
        assert found is not None
        return int(found[1])


def main(effort: Effort) -> Section:
    rounds, kills = effort.rounds_or(ROUNDS), 1 if effort.tiny else KILLS
    shape, settings = TINY if effort.tiny else Shape(), Recovery(max_restarts=kills)
    costs, repairs, pictured = [], [], {}
    for schedule in SCHEDULES:
        relays = {kind: ContestantProcesses(Repairable, shape, schedule, kind) for kind in (settings, None)}
        for relay in relays.values():
            relay.call("begin")
        turns: dict[Recovery | None, list[Turn]] = {settings: [], None: []}
        for number in range(rounds):
            for kind in (settings, None) if number % 2 else (None, settings):
                turns[kind] += relays[kind].call("turn")
        found: list[Killed] = [relays[settings].call("kill")[0] for _ in range(kills)]
        for relay in relays.values():
            relay.end()
        wall, cpu = ([[turn[k] for turn in turns[kind]] for kind in (settings, None)] for k in range(2))
        pictured[schedule] = ratios(*wall)
        costs.append(
            [
                schedule,
                *(f"{1000 * median(own):.0f}" for own in (wall[1], wall[0])),
                *spread(ratios(*wall)),
                *spread(ratios(*cpu)),
            ]
        )
        step = median(wall[0])
        repairs.append(
            [
                schedule,
                *spread([each.restart for each in found], 0, 1000),
                *spread([each.repair for each in found], 0, 1000),
                *spread([each.step - step for each in found], 0, 1000),
            ]
        )
    section = Section(
        "Snapshots",
        f"The model of the first section, AdamW, {MICROBATCHES} micro-batches, two processes of one thread each, "
        "without Lightning: steps of a pipeline that repairs lost workers, with a snapshot after each step, and of one "
        f"that does not, in turns, {rounds} rounds, the order reversed in every other one. A step ends when all "
        "processes have done all of it, with their copies. Medians, and quartiles; ratios are those of the two steps "
        f"of a round. Then the worker is killed at the beginning of a step, {kills} times. This is the worst moment: "
        "no snapshot has followed the last step, so all of that step is computed again.",
        tables=[
            Table(
                ["", "without, ms", "with, ms", "ratio", "quartiles", "ratio of CPU time", "quartiles"],
                costs,
            ),
            Table(
                [
                    "a killed worker",
                    "a new one has started, ms",
                    "quartiles",
                    "the driver goes on, ms",
                    "quartiles",
                    "the step, less a step without a kill, ms",
                    "quartiles",
                ],
                repairs,
            ),
        ],
    )
    plot(section, effort, "snapshots.png", lambda figure: boxes(figure.subplots(), pictured, x="ratio"), size=(8, 2))
    return section
