"""A small training whose checkpoints, written by an earlier version, are kept in ``tests/data``.

``python earlier_version_job.py write KIND FOLDER`` trains one epoch, saves FOLDER/KIND.ckpt and continues for an epoch;
the result goes to FOLDER/KIND.pt. ``... continue KIND FOLDER RESULT`` continues from FOLDER/KIND.ckpt, and writes
RESULT. Run with the folder of an earlier version as PYTHONPATH, ``write`` makes new test data.
"""

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from strategies import RPCSequentialStrategy, ZeROStrategy
from trainer import Trainer

KINDS: dict[str, Any] = {
    "pipeline-full": lambda: (2, RPCSequentialStrategy([2, 2], microbatches=2)),
    "pipeline-sharded": lambda: (2, RPCSequentialStrategy([2, 2], microbatches=2, state_dict_type="sharded")),
    "zero-sharded": lambda: (2, ZeROStrategy(state_dict_type="sharded")),
    "single": lambda: (1, "auto"),
}


class Tiny(pl.LightningModule):
    """Two linear layers and a LayerNorm in float64; AdamW with two groups and a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sequential_module = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.LayerNorm(2), nn.Linear(2, 1)).double()
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self.sequential_module(batch[0]) - batch[1]).square().mean()
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")))
        return loss

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.2}]
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def train_dataloader(self) -> DataLoader:
        generator, ranks = torch.Generator().manual_seed(1), self.trainer.world_size
        rows = TensorDataset(*(torch.randn(8, width, generator=generator, dtype=torch.float64) for width in (2, 1)))
        share = DistributedSampler(rows, num_replicas=ranks, rank=self.trainer.global_rank, shuffle=False)
        return DataLoader(rows, batch_size=4 // ranks, sampler=share)


class Saves(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        trainer.save_checkpoint(self.path)


def fit(kind: str, epochs: int, start: Path | None = None, end: Path | None = None) -> dict[str, Any]:
    """Trains up to an epoch; returns losses and weights.

    The checkpoint that is kept is written under Lightning's Trainer: random states, which Relay's adds, take 40 KiB.
    """
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    devices, strategy = KINDS[kind]()
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    callbacks = [] if end is None else [Saves(end)]
    settings: dict[str, Any] = {"accelerator": "cpu", "devices": devices, "strategy": strategy, "callbacks": callbacks}
    model = Tiny()
    trainer_class = Trainer if end is None else pl.Trainer
    trainer = trainer_class(max_epochs=epochs, precision="64-true", **settings, **dict.fromkeys(quiet, False))
    trainer.fit(model, ckpt_path=start)
    return {"losses": model.losses, "state": dict(model.state_dict())}


if __name__ == "__main__":
    what, kind, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    path = folder / f"{kind}.ckpt"
    if what == "write":
        fit(kind, 1, end=path)
    result = fit(kind, 2, start=path)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        torch.save(result, folder / f"{kind}.pt" if what == "write" else sys.argv[4])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
