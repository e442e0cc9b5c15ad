"""One training that can be taken up again under any strategy: a script for DDP, and what the tests call themselves.

Run as ``python checkpoint_job.py RESULTS FOLDER EPOCH KIND...`` it trains one epoch for each kind, numbered from EPOCH
on, and writes what they came to: on two processes (``ddp``, ``zero``), or as two pipelines of two stages that save in
parts (``2x2``). Each goes on from the checkpoint in FOLDER that has the number of the epoch before, and saves its own.
Lightning starts the second process by running it once more.
"""

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from parity import WIDTH, Small
from pytorch_lightning import Callback, seed_everything
from pytorch_lightning.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from strategies import DDPStrategy, RPCSequentialStrategy, ZeROStrategy
from strategies.checkpoint.pipeline_checkpoint import plan_shard, write_shard
from trainer import Trainer

ROWS, GLOBAL_BATCH = 24, 8
BALANCES = {1: [6], 2: [4, 2], 3: [1, 3, 2]}


class Resumed(Small):
    """Has what a checkpoint should keep: two groups, schedulers by step and by epoch, a layer outside, a buffer."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.behind = nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.sequential_module(x)) * self.scale

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = torch.nn.functional.mse_loss(self(batch[0]), batch[1])
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")))
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", torch.nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def train_dataloader(self) -> DataLoader:
        """This rank's share of the same global batches."""
        generator, ranks = torch.Generator().manual_seed(1), self.trainer.world_size
        made = [torch.randn(ROWS, width, generator=generator, dtype=torch.float64) for width in (WIDTH, 2)]
        rows = TensorDataset(*made)
        share = DistributedSampler(rows, num_replicas=ranks, rank=self.trainer.global_rank, shuffle=False)
        return DataLoader(rows, batch_size=GLOBAL_BATCH // ranks, sampler=share)

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.1, "lr": 0.02}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9), "interval": "step"},
            {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0), "monitor": "val_loss"},
        ]


def pipeline(stages: int, balance: Any = None, **options: Any) -> dict[str, Any]:
    """Arguments of the Trainer."""
    return {
        "strategy": RPCSequentialStrategy(balance or BALANCES[stages], microbatches=3, **options),
        "devices": stages,
    }


def single() -> dict[str, Any]:
    return {"strategy": "single_device", "devices": 1}


def fit(
    setting: dict[str, Any], until: int, into: Path | None = None, *, make: Any = Resumed, **arguments: Any
) -> dict[str, Any]:
    """Trains up to an epoch, saves a checkpoint, and tells what it came to.

    Args:
        setting: What distinguishes this training.
        until: The number of epochs in all.
        into: Where to save; nowhere by default.
        make: Makes the model.
        arguments: Of the Trainer, and ``ckpt_path``.
    """
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    seed_everything(0, verbose=False)
    model, ckpt_path = make(), arguments.pop("ckpt_path", None)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    settings = {"accelerator": "cpu", "precision": "64-true", **dict.fromkeys(quiet, False), **setting, **arguments}
    stop = EarlyStopping("val_loss", patience=100)
    trainer = Trainer(max_epochs=until, callbacks=[stop, *settings.pop("callbacks", [])], **settings)
    trainer.fit(model, ckpt_path=ckpt_path)
    if into is not None:
        trainer.save_checkpoint(into)
    return {
        "losses": model.losses,
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": trainer.strategy.optimizer_state(trainer.optimizers[0]),
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "stop": stop.state_dict(),
        "progress": (trainer.current_epoch, trainer.global_step),
    }


class Saves(Callback):
    """Saves while every stage is in its place."""

    def __init__(self, path: Any) -> None:
        self.path = path

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        trainer.save_checkpoint(self.path)


def write_shards(shards: Path, parts: list[dict[str, Tensor]], planned: list[dict[str, Tensor]] | None = None) -> None:
    """Writes, in this process, what several would: as the driver of a pipeline and its workers do.

    Args:
        shards: The directory.
        parts: The tensors of each process.
        planned: What the plan is made of, such as the same tensors without values.
    """
    writer = dcp.FileSystemWriter(shards)
    plans, metadata = dcp.DefaultSavePlanner().create_global_plan([plan_shard(part) for part in planned or parts])
    final = writer.prepare_global_plan(plans)
    writer.finish(metadata, [write_shard(shards, plan, part) for plan, part in zip(final, parts, strict=True)])


if __name__ == "__main__":
    results, folder, first, *kinds = sys.argv[1:]
    two_by_two = RPCSequentialStrategy(BALANCES[2], 3, data_parallel_size=2, state_dict_type="sharded", async_save=True)
    settings: dict[str, Any] = {
        "ddp": {"strategy": DDPStrategy(async_save=True), "devices": 2},
        "zero": {"strategy": ZeROStrategy(stage=2, overlap_with_ddp=True, async_save=True), "devices": 2},
        "2x2": {"strategy": two_by_two, "devices": 4},
    }
    seen = []
    for epoch, kind in enumerate(kinds, int(first)):
        start, saves = Path(folder, f"{epoch - 1}.ckpt"), Saves(Path(folder, f"{epoch}.ckpt"))
        seen.append(fit(settings[kind], epoch + 1, callbacks=[saves], ckpt_path=start))
    if torch.distributed.get_rank() == 0:
        torch.save(seen, results)
    torch.distributed.destroy_process_group()
