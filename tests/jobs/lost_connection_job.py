"""A user's script whose ranks lose a connection between them, or of which one raises, catch the error and train again.

``python lost_connection_job.py FOLDER RANKS FAULT``, or the same under torchrun; each rank writes into the folder what
became of its calls of ``fit``. Faults of rank 1: ``all`` connections but those to the store, the one ``to rank 2``, or
``raises``.
"""

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from strategies import DDPStrategy
from tests.faults.simulator.traps import connections
from trainer import Trainer

WIDTH, ROWS, RANK = 8, 32, int(os.environ.get("LOCAL_RANK", "0"))


class Net(pl.LightningModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.folder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)), folder

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if RANK == 1 and batch_idx == 1 and not (self.folder / "struck").exists():
            (self.folder / "struck").write_text(str(time.time()))
            strike(sys.argv[3])
        loss: Tensor = (self.layers(batch) - 1).square().mean()
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def strike(fault: str) -> None:
    if fault == "raises":
        raise KeyError("of one rank")
    of_rank_2 = ports_of_rank_2() if fault == "to rank 2" else set()
    for connection in connections():
        port = connection.getpeername()[1]
        if port in of_rank_2 if of_rank_2 else port != int(os.environ["MASTER_PORT"]):
            connection.shutdown(socket.SHUT_RDWR)


def ports_of_rank_2() -> set[int]:
    siblings = psutil.Process(os.getppid()).children()
    (rank_2,) = (sibling for sibling in siblings if sibling.environ().get("LOCAL_RANK") == "2")
    return {connection.laddr.port for connection in rank_2.net_connections() if connection.laddr}


def train(folder: Path) -> float:
    """Trains for a few steps; returns the mean loss of all ranks."""
    trainer = Trainer(
        accelerator="cpu",
        devices=int(sys.argv[2]),
        strategy=DDPStrategy(),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    trainer.fit(Net(folder), DataLoader(rows, batch_size=ROWS // 8))
    return float(trainer.callback_metrics["loss"])


def main(folder: Path) -> None:
    came: list[Any] = []
    for _ in range(2):
        try:
            came.append(train(folder))
            break
        except (RuntimeError, KeyError) as error:
            came.append((str(error), time.time()))
        torch.save(came, folder / f"rank-{RANK}.pt")
    torch.save(came, folder / f"rank-{RANK}.pt")
    print("a script has ended", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
