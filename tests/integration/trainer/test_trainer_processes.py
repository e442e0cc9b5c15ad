"""Processes around the Trainer: what ends with fit, and what names do not import."""

import gc
import multiprocessing
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import run
from pytorch_lightning.demos.boring_classes import BoringModel, RandomDataset
from torch import nn
from torch.utils.data import DataLoader

from strategies import RPCSequentialStrategy
from trainer import Trainer


def test_names_cost_no_import_of_lightning() -> None:
    code = """
import sys, strategies, strategies.common.names
sys.exit(any(name.partition(".")[0] in ("lightning", "lightning_fabric", "pytorch_lightning") for name in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


class OwnWorkers(DataLoader):
    """A loader with workers that goes through its batches in a generator of its own."""

    def __init__(self) -> None:
        super().__init__(RandomDataset(32, 8), num_workers=2)

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


@pytest.mark.filterwarnings("ignore")
def test_the_workers_of_a_loader_end_with_fit() -> None:
    before = set(multiprocessing.active_children())
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(accelerator="cpu", max_epochs=2, limit_train_batches=3, limit_val_batches=0, **quiet)
    trainer.fit(BoringModel(), OwnWorkers())
    assert not set(multiprocessing.active_children()) - before
    assert isinstance(trainer.train_dataloader, OwnWorkers)


class Layers(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer: nn.Module | None = None
        self.sequential_module = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.sequential_module(x)
        return output


def kept_after_fit(schedules: list[str]) -> list[tuple[str, str]]:
    """What is still there of pipelines that have been trained and forgotten."""
    references = {}
    for schedule in schedules:
        strategy, model = RPCSequentialStrategy([1, 1], microbatches=2, schedule=schedule), Layers()
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, limit_train_batches=2, logger=False
        )
        trainer.fit(model)
        kept = {"trainer": trainer, "strategy": strategy, "model": model, "layer": model.sequential_module[1]}
        references |= {(schedule, name): weakref.ref(value) for name, value in kept.items()}
        del strategy, model, trainer, kept
    gc.collect()
    return [name for name, reference in references.items() if reference() is not None]


def test_a_pipeline_that_is_forgotten_after_fit_is_freed() -> None:
    assert run(kept_after_fit, ["gpipe", "1f1b"]) == []
