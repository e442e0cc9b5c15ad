"""``rebalance="auto"``: busy processes share the core of a stage from the middle of an epoch on.

Two stages have one thread each, pinned to separate cores. Runs with and without rebalancing alternate.
"""

import io
import itertools
import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from pytorch_lightning import Callback, LightningModule, seed_everything
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.messages import told
from benchmarks.report import Effort, Section, Table, spread
from strategies import RPCSequentialStrategy
from trainer import Trainer

WIDTH, LAYERS, MICROBATCHES, ROWS, BATCHES, EPOCHS, ROUNDS = 256, 12, 8, 64, 24, 4, 3
DISTURBED_EPOCH = 1
BUSY = 2
"""Number of busy processes that share the core. With one process, Linux leaves the stage at least half of the core."""

BALANCE = [6, 6]


class Blocks(LightningModule):
    """Equal layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.sequential_module = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(LAYERS))
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = mse_loss(self.sequential_module(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Disturbance(Callback):
    """Pins each stage to a core; from the middle of an epoch on, busy processes share the core of stage 0.

    Args:
        batches: Number of batches of an epoch.
        number: Number of busy processes.
    """

    def __init__(self, batches: int, number: int = BUSY) -> None:
        self.batches, self.number = batches, number
        self.times: dict[str, list[float]] = {"undisturbed": [], "the rest of that epoch": [], "later epochs": []}
        """Seconds from the start of a batch to the start of the next batch in the same epoch, without the first two."""
        self.balances: list[list[int]] = []
        self._cores = sorted(os.sched_getaffinity(0))[:2]
        self._pinned: Any = None
        self._before: tuple[int, float] | None = None
        self._busy: list[subprocess.Popen[bytes]] = []
        self._since = 0.0, 0.0
        self.waited = 0.0
        """The share of the time since the disturbance began in which other processes used the driver's core."""

    def on_train_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
        now, epoch = perf_counter(), trainer.current_epoch
        if self._before is not None and batch_idx > 2 and self._before[0] == batch_idx - 1:
            is_late = (epoch, batch_idx) > (DISTURBED_EPOCH, self.batches // 2)
            phase = (
                "later epochs" if epoch > DISTURBED_EPOCH else "the rest of that epoch" if is_late else "undisturbed"
            )
            self.times[phase].append(now - self._before[1])
        if (epoch, batch_idx) == (DISTURBED_EPOCH, self.batches // 2):
            self._since = now, run_delay_seconds()
            for _ in range(self.number):
                # In a new session, because Linux may divide a core among sessions, and this session has the driver.
                self._busy.append(subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True))
                os.sched_setaffinity(self._busy[-1].pid, self._cores[:1])
        self._before = batch_idx, now

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.balances.append(list(trainer.strategy.balance))
        pipeline = trainer.strategy.pipeline
        if self._pinned is not pipeline.remotes:
            self._pinned = pipeline.remotes
            found = re.search(r"process (\d+)", pipeline.remotes[0].process.description)
            assert found is not None
            pin(int(found[1]), self._cores[0])
            pin(os.getpid(), self._cores[1])

    def on_train_end(self, *args: Any) -> None:
        began, delay = self._since
        self.waited = (run_delay_seconds() - delay) / (perf_counter() - began)

    def end(self) -> None:
        """End the busy processes, and let this process use all cores."""
        for process in self._busy:
            process.kill()
            process.wait()
        pin(os.getpid(), *self._cores)


def run_delay_seconds() -> float:
    """Return how long this thread has waited for its core so far; 0 if Linux does not report this."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def pin(pid: int, *cores: int) -> None:
    """Let all threads of a process use some cores only."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


@dataclass
class Run:
    """The results of a run."""

    times: dict[str, list[float]]
    balances: list[list[int]]
    losses: list[float]
    parameters: list[Tensor]
    waited: float
    lines: list[str] = field(default_factory=list)


def run(
    schedule: str,
    rebalance: Literal["auto"] | None,
    *,
    width: int,
    batches: int,
    epochs: int = EPOCHS,
    busy: int = BUSY,
) -> Run:
    """Train once, with the given number of busy processes."""
    seed_everything(0, verbose=False)
    disturbance, model = Disturbance(batches, busy), Blocks(width)
    rows = torch.randn(batches * MICROBATCHES * ROWS, width)
    silent = redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, silent[0], silent[1], told("RPCSequentialStrategy: balance") as lines:
        strategy = RPCSequentialStrategy(
            balance=BALANCE,
            microbatches=MICROBATCHES,
            schedule=schedule,
            rebalance=rebalance,
        )
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_epochs=epochs,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[disturbance],
        )
        try:
            trainer.fit(model, DataLoader(TensorDataset(rows, rows), batch_size=MICROBATCHES * ROWS))
        finally:
            disturbance.end()
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    return Run(disturbance.times, disturbance.balances, model.losses, parameters, disturbance.waited, lines)


def gain(runs: Sequence[Run]) -> str:
    """Return the share by which steps of later epochs are faster than steps of the disturbed epoch, from medians."""
    disturbed, later = (
        statistics.median(seconds for each in runs for seconds in each.times[phase])
        for phase in ("the rest of that epoch", "later epochs")
    )
    return f"{1 - later / disturbed:.0%}"


def main(effort: Effort) -> Section:
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    if len(os.sched_getaffinity(0)) < 2:
        return Section("A stage that becomes slow", "Needs two cores.", absent={"all": "this machine has one core"})
    width, batches = (16, 8) if effort.tiny else (WIDTH, BATCHES)
    rows, said, notes = [], [], []
    for schedule in ("1f1b",) if effort.tiny else ("gpipe", "1f1b"):
        runs: dict[Literal["auto"] | None, list[Run]] = {None: [], "auto": []}
        for _, way in itertools.product(range(effort.rounds_or(ROUNDS)), runs):
            runs[way].append(run(schedule, way, width=width, batches=batches))
        known = runs[None][0]
        for way, own in runs.items():
            if any(each.losses != known.losses for each in own):
                notes.append(f"{schedule}, rebalance={way!r}: losses differ from those of the first run without it.")
            cells = []
            for phase in known.times:
                cells += spread([1e3 * seconds for each in own for seconds in each.times[phase]], 0)
            last = sorted({str(each.balances[-1]) for each in own})
            rows.append([schedule, "auto" if way else "none", *cells, gain(own), ", ".join(last)])
            said += [line for each in own for line in each.lines]
    columns = ["schedule", "rebalance"]
    for phase in ("undisturbed", "rest of that epoch", "later epochs"):
        columns += [f"{phase}, ms a step", "quartiles"]
    return Section(
        "A stage that becomes slow",
        f"{LAYERS} equal layers of width {width}, {MICROBATCHES} micro-batches of {ROWS} rows, balance {BALANCE}, "
        f"{EPOCHS} epochs of {batches} batches. Each stage is pinned to a core; from the middle of epoch "
        f"{DISTURBED_EPOCH} on, {BUSY} busy processes, each in a session of its own, are pinned to that of stage 0. "
        "Medians over all rounds. Gain: what the steps of later epochs take less than those of the rest of that epoch. "
        "Losses are compared with those of the first run.",
        tables=[Table([*columns, "gain", "last balance"], rows)],
        notes=[*notes, *said],
    )
