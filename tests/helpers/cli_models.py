"""What the tests of the command line name in their configurations."""

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, TensorDataset

CONFIG = """
seed_everything: 7
model:
  class_path: cli_models.Net
  init_args:
    width: 16
data:
  class_path: cli_models.Data
  init_args:
    rows: 32
    width: ${model.init_args.width}
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 1
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  default_root_dir: run
  strategy:
    class_path: strategies.DDPStrategy
    init_args:
      comm_hook: none
"""
"""An experiment with the classes below."""


class Net(pl.LightningModule):
    """A linear model; ``trouble`` names the moment at which it raises."""

    def __init__(self, width: int = 8, lr: float = 0.1, trouble: str = "") -> None:
        super().__init__()
        if width % 2:
            raise ValueError(f"width must be even,\n got {width}")
        if trouble == "constructor":
            raise TypeError("a bug in the constructor")
        self.save_hyperparameters()
        self.net = torch.nn.Linear(width, 1)

    def setup(self, stage: str) -> None:
        if self.hparams.trouble == "setup":
            raise MisconfigurationException("the model refuses\nits set-up")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.hparams.trouble == "training":
            raise MisconfigurationException("broken in training")
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).square().mean(), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.hparams.lr)


class Deep(Net):
    """Four layers that can be divided into stages."""

    def __init__(self, width: int = 8, lr: float = 0.1, trouble: str = "") -> None:
        super().__init__(width, lr, trouble)
        self.sequential_module = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(self.sequential_module(batch[0])).square().mean()


class Data(pl.LightningDataModule):
    """Random rows [rows, width]."""

    def __init__(self, rows: int = 32, width: int = 8) -> None:
        super().__init__()
        self.rows, self.width = rows, width

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.randn(self.rows, self.width)), batch_size=8)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Demanding(Net):
    """Has an argument without a default."""

    def __init__(self, depth: int) -> None:
        super().__init__(width=2 * depth)
