"""How many files of Relay one steady training step runs on the driver: what a reader has to follow."""

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytorch_lightning as pl
import torch
from harness import run
from pytorch_lightning import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import strategies
from strategies import RPCSequentialStrategy

ROOT = Path(strategies.__file__).parents[1]

BOUNDS = {"gpipe": 16, "1f1b": 18}
"""``docs/decisions/121-one-loop.md`` says which they are."""


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.sequential_module(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class FilesOfAStep(Callback):
    """Notes the files whose functions are called, on any thread, in the step with number ``step``."""

    def __init__(self, step: int) -> None:
        self.files: set[str] = set()
        self._step, self._counts = step, False

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if self._counts and event == "call" and path.is_relative_to(ROOT):
            name = path.relative_to(ROOT)
            if name.parts[0] in ("strategies", "trainer"):
                self.files.add(str(name))

    def on_train_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
        self._counts = batch_idx == self._step

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._counts = False


def count_files() -> dict[str, list[str]]:
    rows = DataLoader(TensorDataset(torch.randn(80, 8), torch.randn(80, 1)), 16)
    counted: dict[str, list[str]] = {}
    for schedule in BOUNDS:
        files = FilesOfAStep(step=3)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            max_epochs=1,
            strategy=RPCSequentialStrategy(balance=[2, 3], microbatches=4, schedule=schedule),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[files],
        )
        threading.setprofile(files.profile)
        sys.setprofile(files.profile)
        try:
            trainer.fit(Net(), rows)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        counted[schedule] = sorted(files.files)
    return counted


def test_files_of_a_step() -> None:
    counted = run(count_files)
    for schedule, files in counted.items():
        print(f"{schedule}: {len(files)} files", *files, sep="\n  ")
    assert {schedule for schedule, files in counted.items() if not 0 < len(files) <= BOUNDS[schedule]} == set()
