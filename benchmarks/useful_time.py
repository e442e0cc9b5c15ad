"""Useful time: the speed of a fit whose worker is killed repeatedly, compared with a fit without repairs and kills.

The benchmark uses the model, the batch and the optimizer of ``pipeline_step`` under Lightning, on two processes with
one thread each. It alternates fits of both kinds.
"""

import logging
import threading
import warnings
from statistics import median
from time import perf_counter
from typing import Any

import pytorch_lightning
from pytorch_lightning import Callback, LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.contestants import Shape, endless, loss_of, make_optimizer
from benchmarks.processes import ContestantProcesses
from benchmarks.report import Effort, Section, Table, spread
from strategies import Recovery, RPCSequentialStrategy

PERIODS, ROUNDS, MICROBATCHES, UNDISTURBED_SECONDS, WARM_UP = (15.0, 60.0), 2, 8, 20.0, 2
LEAST_SECONDS = 45.0
"""With shorter periods, a fit loses several workers."""
MOST_KILLS = 1000
TINY = Shape(num_blocks=2, width=32, rows=8, length=8)


class Model(LightningModule):
    """The layers of the benchmark and their loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.sequential_module: nn.Sequential = shape.layers()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return loss_of(self.sequential_module(batch[0]), batch[1])

    def configure_optimizers(self) -> Optimizer:
        return make_optimizer(self)


class Clock(Callback):
    """Ends a fit after some seconds, and kills the worker in the middle of each period.

    Args:
        seconds: The duration of the fit, from the end of the warm-up batches.
        period: Seconds between two kills; ``None`` for no kills.
    """

    def __init__(self, seconds: float, period: float | None) -> None:
        self.seconds, self.period = seconds, period
        self.began, self.ended, self.num_steps, self.num_kills = 0.0, 0.0, 0, 0
        self.is_over = threading.Event()

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = perf_counter()
        if batch_idx + 1 == WARM_UP:
            self.began = now
            threading.Thread(target=self.kill, args=(trainer.strategy,), daemon=True).start()
        elif batch_idx >= WARM_UP:
            self.ended, self.num_steps = now, self.num_steps + 1
            trainer.should_stop = now - self.began >= self.seconds

    def kill(self, strategy: Any) -> None:
        """Kill the worker once in each period, at any point of its work."""
        if self.period is None:
            return
        wait = self.period / 2
        while not self.is_over.wait(wait) and perf_counter() - self.began < self.seconds:
            strategy.pipeline.workers.kill(0)
            self.num_kills += 1
            wait = self.period


class Fits:
    """A process of the benchmark that runs fits on command."""

    def __init__(self, number: int, shape: Shape) -> None:
        warnings.filterwarnings("ignore")
        logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
        self.shape = shape

    def fit(self, seconds: float, period: float | None) -> tuple[float, int]:
        """Return steps per second, and the number of kills."""
        clock = Clock(seconds, period)
        strategy = RPCSequentialStrategy(
            "even",
            microbatches=MICROBATCHES,
            schedule="1f1b",
            recovery=None if period is None else Recovery(MOST_KILLS),
        )
        trainer = pytorch_lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_epochs=1,
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Model(self.shape), endless(self.shape))
        clock.is_over.set()
        return clock.num_steps / (clock.ended - clock.began), clock.num_kills

    def close(self) -> None:
        pass


def main(effort: Effort) -> Section:
    rounds, fits = effort.rounds_or(ROUNDS), ContestantProcesses(Fits, TINY if effort.tiny else Shape())
    scale = 0.02 if effort.tiny else 1.0
    useful: dict[float, list[float]] = {period: [] for period in PERIODS}
    kills = dict.fromkeys(PERIODS, 0)
    steps: list[float] = []
    for _ in range(rounds):
        for period in PERIODS:
            seconds = max(period, LEAST_SECONDS) * scale
            ((before, _),) = fits.call("fit", UNDISTURBED_SECONDS * scale, None)
            ((disturbed, num_kills),) = fits.call("fit", seconds, period * scale)
            ((after, _),) = fits.call("fit", UNDISTURBED_SECONDS * scale, None)
            undisturbed = (before + after) / 2
            useful[period].append(disturbed / undisturbed)
            kills[period] += num_kills
            steps.append(1000 / undisturbed)
    fits.end()
    rows = [
        [f"{period:.0f} s", str(kills[period]), *spread([100 * share for share in useful[period]], 1)]
        for period in PERIODS
    ]
    return Section(
        "Useful time",
        f"The model of the first section, AdamW, {MICROBATCHES} micro-batches, 1f1b, two processes of one thread each, "
        "under Lightning: steps per second with `max_restarts`, a snapshot after each step, and a worker that is "
        "killed in every period, as a share of those of fits without both, one before and one after. "
        f"{rounds} rounds. A step without kills takes {median(steps):.0f} ms.",
        tables=[Table(["a kill every", "kills", "useful time, %", "quartiles"], rows)],
    )
