"""A user's script that ``mpirun`` starts: two Trainers one after another, and MPI after them."""

import pytorch_lightning as pl
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.utils.data import DataLoader

from strategies import RPCSequentialStrategy
from trainer import Trainer

WIDTH, ROWS = 8, 32


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sequential_module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = (self.sequential_module(batch) - 1).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy=RPCSequentialStrategy(microbatches=2),
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Net(), DataLoader(rows, batch_size=ROWS // 4))
    print(f"rank {MPI.COMM_WORLD.Get_rank()} of {MPI.COMM_WORLD.Get_size()} has trained twice")


if __name__ == "__main__":
    main()
