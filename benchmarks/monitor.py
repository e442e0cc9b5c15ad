"""Cost of ``PipelineMonitor``: alternates steps without it, steps that it does not record, and steps that it records.

The model computes almost nothing, so that a step is short.
"""

import io
import logging
import statistics
import tempfile
import warnings
from contextlib import redirect_stderr, redirect_stdout
from random import Random
from time import perf_counter, thread_time
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.report import Effort, Section, Table, spread
from strategies import RPCSequentialStrategy
from trainer import PipelineMonitor, Trainer

CYCLES, RECORDED_CYCLES, WARM_UP, WIDTH, ROWS, MICROBATCHES = 2000, 200, 20, 8, 4, 2
NEVER = 10**9
WITHOUT, IDLE, RECORDED, REPORTS, SETTLES = "without", "not recorded", "recorded", "reports the step before", ""
NEVER_RECORDS = (WITHOUT, IDLE)
RECORDS = (WITHOUT, IDLE, RECORDED, REPORTS, SETTLES, SETTLES)
"""After a recorded step, commands go over RPC until four consecutive commands have no result. These steps do not
count."""


class Tiny(LightningModule):
    """Layers without work."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return mse_loss(self.sequential_module(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Turns(Callback):
    """Calls the hooks of a monitor in some steps of a cycle only, and measures the time of each step."""

    def __init__(self, cycle: tuple[str, ...]) -> None:
        self.idle, self.recording = PipelineMonitor(NEVER), PipelineMonitor(1)
        self.times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in cycle}
        self.hooks: dict[str, list[float]] = {WITHOUT: [], IDLE: []}
        """The time of the hooks in steps that are not recorded, and the time that a measurement takes."""
        self._cycle, self._seconds = cycle, 0.0
        self._before: tuple[str, float, float] | None = None

    def kind(self, number: int) -> str:
        cycle, place = divmod(number, len(self._cycle))
        swapped = place < 2 and Random(cycle).random() < 0.5
        return self._cycle[1 - place if swapped else place]

    def setup(self, *args: Any, **kwargs: Any) -> None:
        self.recording.setup(*args, **kwargs)

    def on_train_start(self, *args: Any) -> None:
        self.idle.on_train_start(*args)
        self.recording.on_train_start(*args)

    def on_train_batch_start(self, *args: Any) -> None:
        now, cpu, kind = perf_counter(), thread_time(), self.kind(args[-1])
        if self._before is not None and args[-1] > WARM_UP:
            of, began, cpu_began = self._before
            self.times[of].append((now - began, cpu - cpu_began))
        self._before = kind, now, cpu
        begin = thread_time()  # in every kind of step, because a measurement takes longer than the hooks
        if kind in (IDLE, RECORDED):
            (self.idle if kind == IDLE else self.recording).on_train_batch_start(*args)
        self._seconds = thread_time() - begin

    def on_train_batch_end(self, *args: Any) -> None:
        kind = self.kind(args[-1])
        begin = thread_time()
        if kind in (IDLE, RECORDED, REPORTS):
            (self.idle if kind == IDLE else self.recording).on_train_batch_end(*args)
        if kind in (WITHOUT, IDLE):
            self.hooks[kind].append(self._seconds + thread_time() - begin)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        self.idle.teardown(*args, **kwargs)
        self.recording.teardown(*args, **kwargs)


def measured(schedule: str, cycle: tuple[str, ...], cycles: int) -> Turns:
    """Run cycles of steps of several kinds."""
    rows, turns = torch.randn(ROWS * (WARM_UP + cycles * len(cycle)), WIDTH), Turns(cycle)
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy=RPCSequentialStrategy(balance=[2, 2], microbatches=MICROBATCHES, schedule=schedule),
            max_epochs=1,
            logger=CSVLogger(folder),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[turns],
        )
        trainer.fit(Tiny(), DataLoader(TensorDataset(rows, rows), batch_size=ROWS))
    return turns


def added(own: list[tuple[float, float]], without: list[tuple[float, float]]) -> list[str]:
    """Return the medians of the differences within cycles in microseconds, for time and for processor time.

    Each median comes with the range that contains the medians of 95 % of 400 bootstrap samples.
    """
    cells, random = [], Random(0)
    for which in (0, 1):
        more = [1e6 * (one[which] - other[which]) for one, other in zip(own, without, strict=False)]
        medians = sorted(statistics.median(random.choices(more, k=len(more))) for _ in range(400))
        cells.append(f"{statistics.median(more):+,.0f} ({medians[10]:+,.0f} to {medians[389]:+,.0f})")
    return cells


def main(effort: Effort) -> Section:
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    table = []
    for schedule in ("gpipe",) if effort.tiny else ("gpipe", "1f1b"):
        for cycle, cycles in ((NEVER_RECORDS, CYCLES), (RECORDS, RECORDED_CYCLES)):
            turns = measured(schedule, cycle, 4 if effort.tiny else cycles)
            for kind in (WITHOUT, IDLE) if cycle is NEVER_RECORDS else (RECORDED, REPORTS):
                more = ["", ""] if kind == WITHOUT else added(turns.times[kind], turns.times[WITHOUT])
                table.append([schedule, kind, *spread([1e6 * wall for wall, _ in turns.times[kind]], 0), *more])
            if cycle is NEVER_RECORDS:
                for kind, name in ((WITHOUT, "taking the time of no hooks"), (IDLE, "hooks where not recorded")):
                    table.append([schedule, name, *spread([1e6 * seconds for seconds in turns.hooks[kind]], 0), "", ""])
    columns = ["schedule", "step", "µs", "quartiles", "added to a step without", "added processor time, driver"]
    return Section(
        "Cost of PipelineMonitor",
        f"Two stages, {MICROBATCHES} micro-batches of 2 rows, four linear layers of width {WIDTH}. {CYCLES} pairs of a "
        "step without the monitor's hooks and one with hooks that do not record, in random order. Then recorded steps, "
        f"and the steps after these, which log, draw and write CSV ({RECORDED_CYCLES} of each, between such pairs). "
        "Medians; what is added is the median of differences to steps without hooks, with its 95 % range.",
        tables=[Table(columns, table)],
    )
