"""Callbacks, loggers, progress bars and metrics see over stages what they see in one process."""

import csv
import io
import os
import re
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run
from parity import Small, alike, batches
from parity_trainers import Make, everywhere, state_of
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    TQDMProgressBar,
)
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.nn.functional import mse_loss
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection


class Measured(Small):
    """Logs in many ways, with metrics of ``torchmetrics`` among them, and has a scheduler."""

    def __init__(self, width: int = 3, rate: float = 0.2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.error = MeanSquaredError()
        self.both = MetricCollection({"squared": MeanSquaredError(), "root": MeanSquaredError(squared=False)})
        self.mean = MeanMetric()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        output = self(batch[0])
        loss = mse_loss(output, batch[1])
        self.losses.append(loss.item())
        self.error(output, batch[1])
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.log_dict(self.both(output, batch[1]))
        self.mean.update(output.mean())
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", self.mean.compute(), prog_bar=True)
        self.mean.reset()

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", mse_loss(self(batch[0]), batch[1]), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["rate"])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Bar(Callback):
    """Keeps what a progress bar is given to show."""

    def __init__(self) -> None:
        self.shown: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.shown.append(dict(trainer.progress_bar_metrics))

    on_validation_batch_end = on_train_batch_end


def checkpoints(folder: Path) -> dict[str, Any]:
    """The content of each, without what a pipeline adds; paths as they are within ``folder``."""

    def relative(value: Any) -> Any:
        if isinstance(value, dict):
            return {relative(key): relative(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [relative(each) for each in value]
        return value.replace(str(folder), "") if isinstance(value, str) else value

    files = {str(path.relative_to(folder)): torch.load(path, weights_only=False) for path in folder.rglob("*.ckpt")}
    for content in files.values():
        content.pop("relay", None)
    return relative(files)


def written_numbers(folder: Path) -> dict[str, Any]:
    """What the two loggers wrote; of the statistics of the machine only that they are there."""
    (table,) = folder.rglob("metrics.csv")
    with open(table) as file:
        rows = [
            {key: "there" if "DeviceStats" in key else float(value) for key, value in row.items() if value}
            for row in csv.DictReader(file)
        ]
    (board,) = {str(path.parent) for path in folder.rglob("events.out.tfevents.*")}
    accumulator = EventAccumulator(board)
    accumulator.Reload()
    scalars = {
        tag: [(event.step, "there" if "DeviceStats" in tag else event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }
    return {"csv": rows, "tensorboard": scalars, "others": sorted(p.name for p in folder.rglob("hparams.yaml"))}


def watched(make: Make) -> dict[str, Any]:
    folder = Path.cwd() / f"run-{len(os.listdir())}"
    best = ModelCheckpoint(folder / "best", "{epoch}-{step}-{val_loss:.6f}", "val_loss", save_top_k=2, save_last=True)
    often = ModelCheckpoint(folder / "often", every_n_train_steps=5, save_top_k=-1, save_weights_only=True)
    stop, rates, bar = EarlyStopping("val_loss", patience=2), LearningRateMonitor(log_momentum=True), Bar()
    trainer = make(
        max_epochs=12,
        callbacks=[best, often, stop, rates, DeviceStatsMonitor(), bar, TQDMProgressBar(refresh_rate=2)],
        logger=[CSVLogger(folder, "csv"), TensorBoardLogger(folder, "board")],
        log_every_n_steps=2,
        enable_checkpointing=True,
        enable_progress_bar=True,
    )
    model = Measured()
    with redirect_stderr(io.StringIO()) as printed, redirect_stdout(printed):
        trainer.fit(model, batches((8, 7, 3)), batches((5, 6), seed=1))
    kept = {path.replace(str(folder), ""): score for path, score in best.best_k_models.items()}
    stopped = stop.stopped_epoch, stop.wait_count, stop.best_score, trainer.current_epoch, trainer.global_step
    tested = trainer.test(model, batches((5, 6), seed=2), ckpt_path="best", verbose=False)
    return {
        "best": [best.best_model_path.replace(str(folder), ""), best.best_model_score],
        "kept": kept,
        "stopped": stopped,
        "rates": rates.lrs,
        "bar": bar.shown,
        "bar's text": sorted(set(re.findall(r"(?:loss_step|mean|loss_epoch)=[-\d.]+", printed.getvalue()))),
        "metrics": dict(trainer.callback_metrics),
        "tested": tested,
        "state": state_of(model),
        "checkpoints": checkpoints(folder),
        "written": written_numbers(folder),
    }


def all_watched() -> list[dict[str, Any]]:
    return everywhere(watched, stages=[3])


def with_rich_bar(make: Make) -> list[Any]:
    bar = Bar()
    trainer = make(max_epochs=2, callbacks=[bar, RichProgressBar()], enable_progress_bar=True)
    with redirect_stdout(io.StringIO()) as printed:
        trainer.fit(Measured(), batches((8, 7, 3)), batches((5, 6), seed=1))
    return [bar.shown, re.findall(r"(?:loss_step|mean|loss_epoch): [-\d.]+", printed.getvalue())]


def all_with_rich_bar() -> list[list[Any]]:
    return everywhere(with_rich_bar, stages=[2])


def everything() -> list[Any]:
    return [all_watched(), all_with_rich_bar()]


@pytest.fixture(scope="module")
def found() -> Any:
    return run(everything, env={"COLUMNS": "150"}, timeout_seconds=170)


@pytest.mark.slow
def test_checkpoints_stopping_rates_metrics_and_loggers(found: Any) -> None:
    single, pipeline = found[0]
    alike(pipeline, single)
    assert single["stopped"][0] == 6 and single["stopped"][3] == 7
    assert len(single["kept"]) == 2 and single["best"][0] in single["kept"]
    assert set(single["checkpoints"]) > {"best/last.ckpt", single["best"][0].lstrip("/"), "often/epoch=1-step=5.ckpt"}
    assert len(single["bar's text"]) > 20
    tags = single["written"]["tensorboard"]
    assert {"error_step", "squared", "root", "mean", "loss_epoch", "val_loss", "lr-AdamW", "epoch"} <= set(tags)
    assert sum("DeviceStatsMonitor" in tag for tag in tags) > 10


@pytest.mark.slow
def test_the_rich_progress_bar(found: Any) -> None:
    single, pipeline = found[1]
    alike(pipeline, single)
    assert len(single[1]) > 2
