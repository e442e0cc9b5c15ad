"""Processes around the Trainer: workers of a loader end with fit, and names cost no import of Lightning."""

import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from pytorch_lightning.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from trainer import Trainer


def test_names_cost_no_import_of_lightning() -> None:
    code = "import sys, strategies, strategies.common.names; sys.exit(any('lightning' in name for name in sys.modules))"
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
