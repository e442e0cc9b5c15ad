"""A user's script for two ranks of torchrun: rank 0 leaves its run while Python ends in the process of rank 1.

Run as ``late_rank_0_job.py STRATEGY``; the ranks meet in files of the working directory.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule
from torch import Tensor, nn

from trainer import Trainer

ENDING, LEFT = Path("rank-1-is-ending"), Path("rank-0-has-left")


def wait_for(path: Path, seconds: float = 60.0, *, pause: Any = time.sleep) -> None:
    for _ in range(int(seconds / 0.02)):
        if path.exists():
            return
        pause(0.02)
    raise TimeoutError(f"{path} did not appear")


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, rows: Tensor, batch_idx: int) -> Tensor:
        return self.layer(rows).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Late(Callback):
    """Keeps rank 0 in its run until Python ends in the process of rank 1."""

    def on_train_end(self, trainer: Any, model: Any) -> None:
        if trainer.is_global_zero:
            wait_for(ENDING)


class EndsLast:
    """Python deletes it when it clears this module, from where on no other thread may run Python code."""

    def __del__(self, meet: Any = (ENDING, LEFT, wait_for, time.sleep)) -> None:
        ending, left, wait, pause = meet
        ending.touch()
        wait(left, pause=pause)
        pause(0.5)  # for threads that have waited for what rank 0 has just done


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        last = EndsLast()
    trainer = Trainer(
        strategy=sys.argv[1],
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        callbacks=[Late()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2))
    if trainer.is_global_zero:
        LEFT.touch()
