"""What jobs on a cluster train, from the command line: a model, its batches, and a callback that writes down losses."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, ROWS, GLOBAL_BATCH = 6, 96, 8


class SlowTanh(nn.Tanh):
    """Takes a time in training, unless SLURM has started the job again.

    Args:
        seconds: The time of each call.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, rows: Tensor) -> Tensor:
        if self.training and os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
            time.sleep(self.seconds)
        return super().forward(rows)


class ClusterNet(pl.LightningModule):
    """Eight layers, of which the second is slow, with something before and behind them.

    Args:
        seconds: How long the slow layer takes.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH), SlowTanh(seconds), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]
        more = [nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
        self.sequential_module = nn.Sequential(*layers, *more)
        self.before, self.behind = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = mse_loss(self.behind(self.sequential_module(self.before(batch[0]))), batch[1])
        self.log("train", loss, on_epoch=True, on_step=True, sync_dist=True)
        return loss

    def tensor_parallel_plan(self) -> dict[str, str]:
        """The styles of the layers with tensor_parallel_size=2."""
        return {
            "before": "colwise_gather_output",
            "sequential_module.0": "colwise_gather_output",
            "sequential_module.5": "rowwise_split_input",
            "sequential_module.7": "colwise_gather_output",
        }

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class ClusterData(pl.LightningDataModule):
    """Rows whose order is the same for any number of replicas, or shuffled for a single one.

    Args:
        shuffle: Whether each epoch has its own order.
    """

    def __init__(self, shuffle: bool = False) -> None:
        super().__init__()
        self.shuffle = shuffle

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        generator, replicas = torch.Generator().manual_seed(1), self.trainer.world_size
        rows = TensorDataset(*(torch.randn(ROWS, width, generator=generator) for width in (WIDTH, 2)))
        if self.shuffle:
            return DataLoader(rows, batch_size=GLOBAL_BATCH, shuffle=True)
        share = DistributedSampler(rows, num_replicas=replicas, rank=self.trainer.global_rank, shuffle=False)
        return DataLoader(rows, batch_size=GLOBAL_BATCH // replicas, sampler=share)


class Notes(pl.Callback):
    """Writes down the loss of each batch.

    Args:
        folder: For the file ``losses``, with one line for each batch: epoch, number, loss.
    """

    def __init__(self, folder: str) -> None:
        self.file = Path(folder) / "losses"

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = trainer.callback_metrics["train_step"].item()
        if trainer.is_global_zero:
            with self.file.open("a") as file:
                file.write(json.dumps([trainer.current_epoch, batch_idx, loss]) + "\n")
