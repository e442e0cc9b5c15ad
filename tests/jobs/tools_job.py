"""Trains a pipeline of two stages and prints which modules of the tools that predict or report its driver imported.

Usage: ``tools_job.py SCHEDULE [--save PATH | --resume PATH]``. The worker's layer raises an error if its process has
imported such a module.
"""

import json
import os
import sys
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from strategies import RPCSequentialStrategy
from trainer import Trainer

TOOLS = ("strategies.planning", "trainer.monitor", "trainer.plan_report", "trainer.report", "trainer.verification")


def imported_tools() -> list[str]:
    return sorted(name for name in sys.modules if name in TOOLS or name.startswith(tuple(f"{each}." for each in TOOLS)))


class WithoutTools(nn.Linear):
    """A layer that refuses to run on a worker with a tool."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.driver_pid = os.getpid()

    def forward(self, x: Tensor) -> Tensor:
        if os.getpid() != self.driver_pid and imported_tools():
            raise AssertionError(f"the worker has imported {imported_tools()}")
        return super().forward(x)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(WithoutTools(4, 4), nn.Linear(4, 1))
        self.example_input_array = torch.zeros(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.sequential_module(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def main(schedule: str, task: str = "", path: str = "") -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=RPCSequentialStrategy(schedule=schedule, microbatches=2),
        max_epochs=2 if task == "--resume" else 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), 8)
    trainer.fit(Net(), data, ckpt_path=path if task == "--resume" else None)
    if task == "--save":
        trainer.save_checkpoint(path)
    print(json.dumps({"steps": trainer.global_step, "tools": imported_tools()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
