"""Overhead of a step beyond the model's own work: a bare loop, Lightning's Trainer and Relay's Trainer, alternating.

Every contestant records the start time of each training step. The time of a step is the difference to the next start.
It is CPU time of the thread, so waiting for a core does not count. A separate fit counts the Python functions that a
step calls; their number does not depend on the load. The goal is at most 1.15 times Lightning's cost.
"""

import io
import itertools
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from time import thread_time
from types import FrameType
from typing import Any

import pytorch_lightning
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import trainer
from benchmarks.plots import boxes, plot
from benchmarks.report import Effort, Section, Table, quartiles, spread

ROUNDS, STEPS, WARM_UP, WIDTH, ROWS = 7, 500, 50, 8, 4


class Tiny(LightningModule):
    """One small layer, whose own work is negligible."""

    def __init__(self, *, logs: bool, clock: Callable[[], float]) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        self.logs = logs
        self.clock = clock
        self.began: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.began.append(self.clock())
        loss = mse_loss(self.sequential_module(batch[0]), batch[1])
        if self.logs:
            self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def data(steps: int) -> DataLoader:
    rows = torch.randn(ROWS * steps, WIDTH)
    return DataLoader(TensorDataset(rows, rows), batch_size=ROWS)


def bare(steps: int, *, clock: Callable[[], float] = thread_time) -> list[float]:
    """Run a hand-written training loop."""
    model = Tiny(logs=False, clock=clock)
    optimizer = model.configure_optimizers()
    for number, batch in enumerate(data(steps)):
        loss = model.training_step(batch, number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.began


def fitted(
    make: Callable[..., Any], steps: int, *, logs: bool, bar: bool, clock: Callable[[], float] = thread_time
) -> list[float]:
    """Run a fit by a Trainer with all optional features disabled, except the features in the arguments."""
    model = Tiny(logs=logs, clock=clock)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary"), False)
    screen = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(screen), redirect_stdout(screen):
        made = make(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            enable_progress_bar=bar,
            default_root_dir=folder,
            **off,
        )
        made.fit(model, data(steps))
    return model.began


def calls_of(run: Callable[..., list[float]], steps: int) -> float:
    """Return the number of Python functions that a step calls: the median of the second half of a fit."""
    count = 0

    def follow(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(follow)
    try:
        began = run(steps, clock=lambda: count)
    finally:
        sys.setprofile(None)
    return quartiles([after - before for before, after in itertools.pairwise(began)][steps // 2 :])[1]


TRAINERS = {"pytorch_lightning.Trainer": pytorch_lightning.Trainer, "trainer.Trainer": trainer.Trainer}
KINDS = {"no logging": (False, False), "one self.log": (True, False), "one self.log, progress bar": (True, True)}


def main(effort: Effort) -> Section:
    warnings.filterwarnings("ignore")
    for name in ("pytorch_lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rounds, steps, warm_up = effort.rounds_or(ROUNDS), *((20, 5) if effort.tiny else (STEPS, WARM_UP))
    contestants: dict[str, Callable[..., list[float]]] = {"bare loop": bare}
    for kind, (logs, bar) in KINDS.items():
        for name, make in TRAINERS.items():
            contestants[f"{name}, {kind}"] = partial(fitted, make, logs=logs, bar=bar)
    micros: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            began = run(steps + warm_up)[warm_up - 1 :]
            passed = [after - before for before, after in itertools.pairwise(began)]
            micros[name].append(quartiles(passed)[1] * 1e6)
    calls = {name: calls_of(run, 40) for name, run in contestants.items()}
    overheads = {
        name: [own - loop for own, loop in zip(values, micros["bare loop"], strict=True)]
        for name, values in micros.items()
    }
    rows = []
    for name, values in micros.items():
        theirs = overheads.get(name.replace("trainer.Trainer", "pytorch_lightning.Trainer", 1)) or values
        extra = [own - other for own, other in zip(overheads[name], theirs, strict=True)]
        rows.append([name, f"{calls[name]:.0f}", *spread(values, 0), f"{quartiles(overheads[name])[1]:.0f}"])
        shares = [own / other for own, other in zip(overheads[name], theirs, strict=True) if other]
        is_relays = name.startswith("trainer.")
        rows[-1] += [f"{quartiles(extra)[1]:+.0f}", f"{quartiles(shares)[1]:.2f}"] if is_relays else ["", ""]
    columns = [
        "",
        "calls a step",
        "CPU µs a step",
        "quartiles",
        "over the bare loop",
        "Relay's over Lightning's",
        "share of Lightning's",
    ]
    section = Section(
        "Cost of the Trainer",
        f"A linear layer of width {WIDTH}, {ROWS} rows, SGD, one process: the median of {steps} steps after "
        f"{warm_up}, in each of {rounds} interleaved rounds; the quartiles are over the rounds. The share is "
        "that of the time over the bare loop; the goal is at most 1.15. Calls are those of functions written in "
        "Python. The progress bar writes to memory.",
        tables=[Table(columns, rows)],
    )
    plot(
        section,
        effort,
        "trainer_overhead.png",
        lambda figure: boxes(figure.subplots(), micros, x="CPU µs a step"),
        size=(8, 3),
    )
    return section
