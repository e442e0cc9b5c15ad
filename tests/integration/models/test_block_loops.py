"""Models in the manner of torchvision, timm and diffusion models: trained as pipelines as in one process."""

from functools import partial
from typing import Any

import block_loops
import pytest
import torch
from harness import run
from parity import compare, fit
from pytorch_lightning import LightningModule
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from strategies import RPCSequentialStrategy

LOOPS: list[tuple[str, str | None, str]] = [
    ("TorchvisionViT", None, "gpipe"),
    ("TorchvisionResNet", "model.stages", "1f1b"),
    ("TimmViT", None, "gpipe"),
    ("DiT", None, "1f1b"),
    ("DiT", None, "gpipe"),
    ("UNet", "model.down", "1f1b"),
    ("UNet", "model.up", "gpipe"),
]
"""Class, path if it has to be named, and schedule."""


class Trained(LightningModule):
    """Trains one of the models."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = getattr(block_loops, kind)()
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return cross_entropy(self.model(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader() -> Any:
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(n, 3, 8, 8, generator=generator), torch.arange(n) % 4) for n in (5, 4)]
    return DataLoader(batches, batch_size=None)


def trained(kind: str, strategy: Any, devices: int) -> Any:
    return fit(partial(Trained, kind), strategy, devices, train=loader, max_epochs=1)


def equal_one_process() -> list[str]:
    """Returns what differs, or is refused."""
    wrong = []
    for kind, path, schedule in LOOPS:
        single = trained(kind, SingleDeviceStrategy("cpu"), 1)
        strategy = RPCSequentialStrategy(schedule=schedule, microbatches=3, balance="even", module=path)
        try:
            compare(trained(kind, strategy, 2), single)
        except Exception as error:
            wrong.append(f"{kind}, {path}, {schedule}: {type(error).__name__}: {error}")
    return wrong


@pytest.mark.slow
def test_training_is_that_of_one_process() -> None:
    assert run(equal_one_process) == []
