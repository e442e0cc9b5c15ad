"""A user's script whose second stage of three comes to grief: ``python faults_job.py HOW PHASE RPC_TIMEOUT_SEC``.

``HOW`` is what the process of that stage does when it comes to ``PHASE``: to itself, or to the driver.
"""

import logging
import os
import signal
import sys
import time
import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from strategies import RPCSequentialStrategy
from trainer import Trainer

MICROBATCHES = 3
PHASES = {
    "unpack": "in unpacking its layers",
    "forward": "in F1, layer 1",
    "backward": "in B1",
    "step": "in optimizer step",
    "save": "in save, handing over weights",
    "validation": "in F0, layer 1",
    "teardown": "in teardown, handing over extra states",
}
"""What each is called in an error."""


def come_to_grief(how: str, driver: int) -> None:
    """Does it, unless this is the driver, whose part of the model is the same class."""
    if os.getpid() == driver:
        return
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(2)  # another thread may be the one that gets the signal
    elif how == "compute":  # and sleep now and then, like an import
        end = time.monotonic() + 7
        while time.monotonic() < end:
            time.sleep(0.01 if int(time.monotonic() * 100) % 10 == 0 else 0)
    elif how == "hang":
        time.sleep(1000)
    else:
        os.kill(driver, signal.Signals[how])


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: str, driver: int) -> Tensor:
        ctx.grief = how, driver
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        come_to_grief(*ctx.grief)
        return grad, None, None


class Fuse(nn.Linear):
    def __init__(self, how: str, phase: str) -> None:
        super().__init__(4, 4)
        self.how, self.phase, self.driver, self.calls = how, phase, os.getpid(), 0

    def _now(self, phase: str) -> None:
        if phase == self.phase:
            come_to_grief(self.how, self.driver)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._now("unpack")

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not self.training:
            self._now("validation")
            return y
        self.calls += 1
        if self.calls == 2 * MICROBATCHES + 2:  # the third step's second micro-batch
            self._now("forward")
            return _InBackward.apply(y, self.how, self.driver) if self.phase == "backward" else y
        return y

    def get_extra_state(self) -> Tensor:
        self._now("save")
        self._now("teardown")
        return torch.zeros(1)

    def set_extra_state(self, state: Any) -> None:
        pass


class DoomedSGD(torch.optim.SGD):
    """Its second step does it, in the process that has the second stage."""

    def __init__(self, fuse: Fuse, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.grief, self.number, self.doomed = (fuse.how, fuse.driver), 0, fuse.phase == "step"

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.number += 1
        if self.doomed and self.number == 2 and any(p.shape == (4, 4) for p in self.param_groups[0]["params"]):
            come_to_grief(*self.grief)
        return loss


class Net(pl.LightningModule):
    def __init__(self, how: str, phase: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sequential_module = nn.Sequential(nn.Linear(3, 4), Fuse(how, phase), nn.Linear(4, 3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.sequential_module(batch) - 1).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", (self.sequential_module(batch) - 1).square().mean())

    def configure_optimizers(self) -> Any:
        return DoomedSGD(self.sequential_module[1], self.parameters())


def train(how: str, phase: str, rpc_timeout_sec: float = 60.0) -> float:
    """Trains for four steps; returns the last validation loss."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    model = Net(how, phase)
    saving = [ModelCheckpoint("saved", every_n_train_steps=2, save_top_k=-1)] if phase == "save" else []
    strategy = RPCSequentialStrategy(
        [1, 1, 1],
        microbatches=MICROBATCHES,
        checkpoint="never",
        rpc_timeout_sec=rpc_timeout_sec,
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=3,
        strategy=strategy,
        max_steps=4,
        callbacks=saving,
        logger=False,
        enable_checkpointing=bool(saving),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    rows = torch.randn(4 * 6, 3, generator=torch.Generator().manual_seed(0))
    trainer.fit(model, DataLoader(rows, batch_size=6), DataLoader(rows, batch_size=6))
    return trainer.callback_metrics["val_loss"].item()


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], float(sys.argv[3]))
