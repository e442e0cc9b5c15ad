"""Trains a small model as a pipeline of two stages under Ray Train: ``python -m examples.train_ray``.

It needs ``pip install -e '.[ray]'``. See ``docs/ray.md``.
"""

import os
from typing import Any

import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from strategies.lightning.compat import pl  # lightning.pytorch if it is installed, as in ray.train.lightning
from strategies.ray import RayRPCSequentialStrategy


class Regression(pl.LightningModule):
    """Learns the sine of the sum of eight numbers."""

    def __init__(self, width: int = 64, num_blocks: int = 6) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_blocks)]
        self.sequential_module = nn.Sequential(nn.Linear(8, width), *blocks, nn.Linear(width, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.sequential_module(inputs), targets)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(config: dict[str, Any]) -> None:
    """Runs in each of Ray's workers."""
    pl.seed_everything(1)
    inputs = torch.rand(4096, 8)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), batch_size=64, shuffle=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices="auto",
        strategy=RayRPCSequentialStrategy(microbatches=4, balance="even"),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        max_epochs=config["epochs"],
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer = prepare_trainer(trainer)
    if checkpoint := ray.train.get_checkpoint():  # Ray has started this function again after a failure
        with checkpoint.as_directory() as directory:
            trainer.fit(Regression(), data, ckpt_path=os.path.join(directory, "checkpoint.ckpt"))
    else:
        trainer.fit(Regression(), data)


if __name__ == "__main__":
    result = TorchTrainer(
        train,
        train_loop_config={"epochs": 5},
        scaling_config=ScalingConfig(num_workers=2),  # the stages of all replicas
        run_config=RunConfig(failure_config=FailureConfig(max_failures=1)),
    ).fit()
    print(result.metrics)
