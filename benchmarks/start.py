"""Time from the call of ``fit`` to the first batch: pipelines of two processes, alternating with one process.

Every round starts two new processes of the script. In one of them, the first fit is in one process, and pipelines lose
their worker. In the other, pipelines and fits in one process alternate. Each fit has a new Trainer, strategy and model.
"""

import logging
import os
import signal
import warnings
from time import perf_counter

import psutil
import pytorch_lightning
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.plots import boxes, plot
from benchmarks.processes import ContestantProcesses
from benchmarks.report import Effort, Section, Table, quartiles, spread
from strategies import Recovery, RPCSequentialStrategy

ROUNDS, WIDTH, LAYERS, ROWS, STEPS, LATER = 5, 8, 4, 8, 4, 3
KINDS = ("first fit", "second fit, at once", "later fit", "repair in the first fit", "repair in the second fit")


class Tiny(LightningModule):
    """Layers without work.

    Args:
        lose_worker_at: The number of the step in which the worker is killed; with ``None``, it is not killed.
    """

    def __init__(self, lose_worker_at: int | None = None) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.lose_worker_at, self.lost = lose_worker_at, 0.0
        self.began: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.began.append(perf_counter())
        if len(self.began) == self.lose_worker_at:
            os.kill(worker_of_this_process(), signal.SIGKILL)
            self.lost = perf_counter()
        return mse_loss(self.sequential_module(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def worker_of_this_process() -> int:
    """Return the process id of the only worker, which is found by its command line."""
    found = [
        child.pid
        for child in psutil.Process().children(recursive=True)
        if "strategies.pipeline worker" in " ".join(child.cmdline())
    ]
    assert len(found) == 1, found
    return found[0]


def fitted(*, stages: int, lose_worker_at: int | None = None) -> float:
    """Run a fit; return the milliseconds from its call, or from the loss of its worker, to the next batch."""
    strategy = RPCSequentialStrategy("even", microbatches=2, recovery=Recovery(1)) if stages > 1 else "single_device"
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=stages,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows, model = torch.randn(STEPS * ROWS, WIDTH), Tiny(lose_worker_at)
    began = perf_counter()
    trainer.fit(model, DataLoader(TensorDataset(rows, rows), batch_size=ROWS))
    began = model.lost or began
    return 1000 * (next(at for at in model.began if at > began) - began)


class Script:
    """A process of the benchmark that runs fits on command."""

    def __init__(self, number: int) -> None:
        warnings.filterwarnings("ignore")
        for name in ("pytorch_lightning", "lightning.pytorch"):
            logging.getLogger(name).setLevel(logging.ERROR)

    def one_process(self) -> float:
        return fitted(stages=1)

    def pipeline(self) -> float:
        return fitted(stages=2)

    def repaired(self) -> float:
        return fitted(stages=2, lose_worker_at=STEPS // 2)

    def close(self) -> None:
        pass


def main(effort: Effort) -> Section:
    rounds, later = effort.rounds_or(ROUNDS), 1 if effort.tiny else LATER
    alone: dict[str, list[float]] = {kind: [] for kind in KINDS}
    pipeline: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        one = ContestantProcesses(Script)
        alone["first fit"] += one.call("one_process")
        for kind in ("repair in the first fit", "repair in the second fit"):
            pipeline[kind] += one.call("repaired")
            alone[kind] += one.call("one_process")
        one.end()
        other = ContestantProcesses(Script)
        pipeline["first fit"] += other.call("pipeline")
        pipeline["second fit, at once"] += other.call("pipeline")
        alone["second fit, at once"] += other.call("one_process")
        for _ in range(later):
            pipeline["later fit"] += other.call("pipeline")
            alone["later fit"] += other.call("one_process")
        other.end()
    beyond = {kind: [own - theirs for own, theirs in zip(pipeline[kind], alone[kind], strict=True)] for kind in KINDS}
    rows = [
        [kind, *(f"{quartiles(values[kind])[1]:.0f}" for values in (pipeline, alone)), *spread(beyond[kind], 0)]
        for kind in KINDS
    ]
    section = Section(
        "Start",
        f"{LAYERS} linear layers of width {WIDTH}, Adam, two processes with one thread each: milliseconds from the "
        "call of `fit` to the first batch; for a repair, from the kill of the worker in a step to the next batch. Each "
        f"fit has a new strategy object. {rounds} rounds with new processes, which have imported torch and Lightning; "
        f"{later} later fits a round.",
        tables=[Table(["", "pipeline, ms", "one process, ms", "beyond one process", "quartiles"], rows)],
        notes=["The first fit waits until a fork server has imported torch."],
    )
    plot(section, effort, "start.png", lambda figure: boxes(figure.subplots(), beyond, x="ms"), size=(8, 2.5))
    return section
