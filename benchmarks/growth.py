"""Predictions of the simulator for large pipelines, and measurements that check them for small ones.

The measured pipelines consist of real processes whose layers sleep, so that two cores can run many stages.
"""

import time
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.plots import lines, plot
from benchmarks.report import Effort, Section, Table, quartiles
from benchmarks.stage_memory import step
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.schedule.tables import SCHEDULES
from strategies.planning.simulator import ActionCosts, simulate

FORWARD_SECONDS, BACKWARD_SECONDS = 0.02, 0.04
STAGES, MICROBATCHES = (2, 8, 32, 128, 1024), (8, 64, 512, 4096)
SIMULATED_ACTIONS = 300_000
"""Limit of the simulation, which takes minutes and gigabytes beyond it. The formula, checked up to the limit, replaces
it there."""

MEASURED = ((2, 4), (2, 16), (4, 8), (8, 16))
REPEATS = 3


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "Sleeps") -> Tensor:
        ctx.layer = layer
        layer.alive += 1
        layer.most_alive = max(layer.most_alive, layer.alive)
        time.sleep(FORWARD_SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(BACKWARD_SECONDS)
        ctx.layer.alive -= 1
        return grads[0], None


class Sleeps(nn.Module):
    """The only layer of a stage; its extra state is the maximum number of micro-batches before their backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.alive = self.most_alive = 0

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x * self.weight, self)

    def get_extra_state(self) -> int:
        return self.most_alive

    def set_extra_state(self, state: int) -> None:
        self.most_alive = state


def measured(schedule: str, stages: int, microbatches: int, repeats: int) -> tuple[list[float], list[int]]:
    """Return the seconds of several steps, and the maximum number of micro-batches in flight on each stage."""
    model = nn.Sequential(*[Sleeps() for _ in range(stages)])
    settings = Settings(microbatches=microbatches, checkpoint="never", schedule=schedule)
    pipeline = Pipeline(model, [1] * stages, [torch.device("cpu")] * stages, settings)
    pipeline.start()
    seconds = []
    try:
        for _ in range(repeats + 1):
            began = perf_counter()
            step(pipeline, model, torch.ones(microbatches, 1), schedule, microbatches)
            seconds.append(perf_counter() - began)
    finally:
        pipeline.close()
    return seconds[1:], [layer.most_alive for layer in model]


def predicted(schedule: str, stages: int, microbatches: int) -> tuple[float, list[int]]:
    """Return the simulated seconds of a step and the maximum number of micro-batches in flight on each stage."""
    costs = ActionCosts(forward=FORWARD_SECONDS, backward=BACKWARD_SECONDS)
    simulation = simulate(SCHEDULES[schedule].table(stages, microbatches, 1), costs)
    return simulation.total_time, simulation.peak_activations


def formula(schedule: str, stages: int, microbatches: int) -> tuple[float, list[int]]:
    """Return what :func:`predicted` must return if all stages have the same cost."""
    p, m = stages, microbatches
    kept = [m] * p if schedule == "gpipe" else [min(p - i, m) for i in range(p)]
    return (m + p - 1) * (FORWARD_SECONDS + BACKWARD_SECONDS), kept


def growth_table(stages: tuple[int, ...], numbers: tuple[int, ...]) -> Table:
    """Return the steps of both schedules, in units of the passes of a micro-batch on one stage."""
    rows, unit = [], FORWARD_SECONDS + BACKWARD_SECONDS
    for p in stages:
        for m in numbers:
            seconds, _ = formula("gpipe", p, m)
            how, spent = "formula", ""
            if 2 * p * m <= SIMULATED_ACTIONS:
                began = perf_counter()
                for schedule in ("gpipe", "1f1b"):
                    simulated, kept = predicted(schedule, p, m)
                    other_seconds, other_kept = formula(schedule, p, m)
                    if abs(simulated - other_seconds) > 1e-6 * other_seconds or kept != other_kept:
                        raise AssertionError(f"{schedule}, {p} stages, {m} micro-batches: {simulated}, {other_seconds}")
                how, spent = "simulated, = formula", f"{perf_counter() - began:.2f}"
            kept_by = [max(formula(schedule, p, m)[1]) for schedule in ("gpipe", "1f1b")]
            speed = p * m / (seconds / unit)
            rows.append([f"{p} stages, {m} micro-batches", f"{seconds / unit:.0f}", f"{speed:.1f}", f"{speed / p:.1%}"])
            rows[-1] += [*(str(k) for k in kept_by), how, spent]
    columns = ["", "step, units", "times one process", "busy", "kept, gpipe", "kept, 1f1b", "by", "simulator, s"]
    return Table(columns, rows, "Predicted; a unit is a micro-batch's forward and backward pass on one stage")


def measured_table(pairs: tuple[tuple[int, int], ...], repeats: int) -> Table:
    """Compare measured processes, whose layers sleep, with the prediction."""
    rows = []
    for p, m in pairs:
        for schedule in ("gpipe", "1f1b"):
            seconds, kept = measured(schedule, p, m, repeats)
            ideal, kept_ideal = predicted(schedule, p, m)
            middle = quartiles(seconds)[1]
            row = [
                f"{schedule}, {p} stages, {m} micro-batches",
                f"{ideal:.3f}",
                f"{middle:.3f}",
                f"{middle / ideal:.3f}",
            ]
            rows.append([*row, " ".join(map(str, kept_ideal)), " ".join(map(str, kept))])
    columns = ["", "predicted, s", "measured, s", "ratio", "kept by stage, predicted", "measured"]
    return Table(columns, rows, "Measured")


def draw(numbers: tuple[int, ...], stages: tuple[int, ...], figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    unit = FORWARD_SECONDS + BACKWARD_SECONDS
    speeds = {f"{p} stages": [p * m / (formula("gpipe", p, m)[0] / unit) for m in numbers] for p in stages}
    lines(left, numbers, speeds, x="micro-batches", y="times one process", log="xy")
    kept = {f"{p} stages, 1f1b": [max(formula("1f1b", p, m)[1]) for m in numbers] for p in stages}
    kept["gpipe, any"] = list(numbers)
    lines(right, numbers, kept, x="micro-batches", y="micro-batches kept on stage 0", log="xy")


def main(effort: Effort) -> Section:
    torch.set_num_threads(1)
    stages, numbers = ((2, 8), (8, 64)) if effort.tiny else (STAGES, MICROBATCHES)
    pairs, repeats = (((2, 4),), 1) if effort.tiny else (MEASURED, effort.rounds_or(REPEATS))
    section = Section(
        "Growth: the simulator's prediction",
        "All stages equal, transfers free. Measured: real processes whose only layer sleeps "
        f"{FORWARD_SECONDS * 1000:.0f} ms forward and {BACKWARD_SECONDS * 1000:.0f} ms backward, medians of "
        f"{repeats} steps after one step of warm-up.",
        tables=[measured_table(pairs, repeats), growth_table(stages, numbers)],
        notes=["The sections above check the prediction for two stages that compute; two cores do not allow more."],
    )
    plot(section, effort, "growth.png", partial(draw, numbers, stages), size=(9, 3.5))
    return section
