"""Overhead of the driver: a model without relevant work on 1 to 4 stages; calls and bytes of the control plane.

The benchmark counts the bytes of the pickled commands. It does not count the data plane, which carries the activations.
"""

import pickle
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.plots import lines, plot
from benchmarks.report import Effort, Section, Table, quartiles, spread
from benchmarks.stage_memory import step as passes_of
from strategies.commands.host import progress
from strategies.pipeline.control import client
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.executor.settings import Settings

WIDTH, LAYERS, ROWS = 8, 12, 64
STAGES, MICROBATCHES, STEPS, WARM_UP = (1, 2, 3, 4), (1, 8, 64), 20, 3


class Calls:
    """Counts the RPC calls of this process for the steps, without the periodic progress checks of the watch."""

    def __init__(self) -> None:
        self.number = self.bytes = 0
        self._plain = client.rpc.rpc_async

    def __enter__(self) -> "Calls":
        def counted(to: str, function: Any, args: tuple[Any, ...] = (), **named: Any) -> Any:
            if function is not progress:
                self.number += 1
                self.bytes += len(pickle.dumps(args[1:]))  # without the RRef, whose pickle counts its copies
            return self._plain(to, function, args=args, **named)

        client.rpc.rpc_async = counted
        return self

    def __exit__(self, *error: object) -> None:
        client.rpc.rpc_async = self._plain


def measured(schedule: str, stages: int, microbatches: int, steps: int) -> tuple[list[float], float, float]:
    """Return the seconds of each step, and the RPC calls and bytes per step."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings = Settings(microbatches=microbatches, checkpoint="never", schedule=schedule)
    devices = [torch.device("cpu")] * stages
    pipeline = Pipeline(model, [LAYERS // stages] * stages, devices, settings, optimizers=[optimizer])
    pipeline.start()
    x: Tensor = torch.randn(ROWS, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        pipeline.optimizers.zero_grad_remotes(optimizer, True)
        passes_of(pipeline, model, x, schedule, microbatches)
        pipeline.optimizers.step_remotes(optimizer, {})  # workers step while this process does
        optimizer.step()

    try:
        for _ in range(WARM_UP):
            step()
        pipeline.wait()
        seconds = []
        for _ in range(steps):
            began = perf_counter()
            step()
            seconds.append(perf_counter() - began)
        with Calls() as calls:
            for _ in range(steps):
                step()
    finally:
        pipeline.close()
    return seconds, calls.number / steps, calls.bytes / steps


def draw(numbers: tuple[int, ...], medians: dict[str, list[float]], figure: Any) -> None:
    lines(figure.subplots(), numbers, medians, x="micro-batches", y="ms a step", log="xy")


def main(effort: Effort) -> Section:
    torch.set_num_threads(1)
    stages, numbers = ((1, 2), (1, 4)) if effort.tiny else (STAGES, MICROBATCHES)
    steps = 3 if effort.tiny else STEPS * (effort.rounds or 1)
    rows, medians, calls_of = [], {}, {}
    for schedule in ("gpipe", "1f1b"):
        for p in stages:
            for m in numbers:
                seconds, calls, size = measured(schedule, p, m, steps)
                medians.setdefault(f"{schedule}, stages {p}", []).append(quartiles(seconds)[1] * 1000)
                calls_of.setdefault((schedule, p), set()).add(calls)
                rows.append([f"{schedule}, stages {p}, micro-batches {m}", *spread(seconds, 2, 1000)])
                rows[-1] += [f"{calls:.1f}", f"{size:.0f}"]
    grows = [f"{schedule} on {p} stages" for (schedule, p), counts in calls_of.items() if len(counts) > 1]
    section = Section(
        "Overhead of the driver",
        f"{LAYERS} linear layers of width {WIDTH}, {ROWS} rows, SGD: the time of a step is only overhead. {steps} "
        "steps. On 2 cores, 3 and 4 processes take turns. One call per worker and step waits for the end of the step, "
        "in this benchmark only. In addition, the driver asks each worker for its progress every six seconds.",
        tables=[Table(["", "ms a step", "quartiles", "RPC calls a step", "bytes in them"], rows)],
        notes=[
            f"The number of calls per step GROWS with the number of micro-batches: {', '.join(grows)}."
            if grows
            else "The number of calls per step does not grow with the number of micro-batches."
        ],
    )
    plot(section, effort, "driver_overhead.png", partial(draw, numbers, medians), size=(6, 4))
    return section
