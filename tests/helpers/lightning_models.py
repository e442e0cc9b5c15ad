"""A model and its data as scripts with ``import lightning as L`` have them; imported in processes of their own only."""

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler


class Net(L.LightningModule):
    """Two pipelined layers with parameters, in float64."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        first, last = nn.Linear(4, width, dtype=torch.float64), nn.Linear(width, 1, dtype=torch.float64)
        self.sequential_module = nn.Sequential(first, nn.Tanh(), last)
        self.example_input_array = torch.zeros(4, 4, dtype=torch.float64)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.sequential_module(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Data(L.LightningDataModule):
    """Sixteen rows in order, which ranks take in turn."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        rows = torch.linspace(-1, 1, 64, dtype=torch.float64).view(16, 4)
        # Given, because Lightning's own sampler of ranks shuffles.
        sampler = DistributedSampler(rows, shuffle=False) if self.trainer.world_size > 1 else None
        return DataLoader(rows, batch_size=self.batch_size, sampler=sampler)


class Count(Callback):
    """Counts the steps of a fit."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_batch_end(self, *args: object) -> None:
        self.steps += 1
