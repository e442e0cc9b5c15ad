"""A user's script whose ranks on two hosts lose the link between the hosts: ``hosts_job.py STRATEGY TIMEOUT FOLDER``.

With the strategy ``alone``, one host trains a few steps. The first rank notes in the folder when training is under way.
The run lasts until the link fails, or for SECONDS.
"""

import sys
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from strategies import DDPStrategy, RPCSequentialStrategy, ZeROStrategy
from trainer import Trainer

WIDTH, ROWS, STEPS, STEP_SECONDS = 8, 32, 200, 0.05
SECONDS = STEPS * STEP_SECONDS


class Net(pl.LightningModule):
    def __init__(self, folder: Path, steps: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sequential_module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.folder = folder

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 5:
            (self.folder / f"trains-{self.global_rank}").touch()
        time.sleep(STEP_SECONDS)
        loss: Tensor = (self.sequential_module(batch) - 1).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(name: str, timeout: float, folder: Path) -> None:
    strategies: dict[str, Any] = {
        "pipeline": lambda: RPCSequentialStrategy(microbatches=2, rpc_timeout_sec=timeout),
        "replicas": lambda: RPCSequentialStrategy(microbatches=2, data_parallel_size=2, rpc_timeout_sec=timeout),
        "alone": lambda: RPCSequentialStrategy(microbatches=2, rpc_timeout_sec=timeout),
        "ddp": lambda: DDPStrategy(rpc_timeout_sec=timeout),
        "spawned": lambda: DDPStrategy(start_method="spawn", rpc_timeout_sec=timeout),
        "zero": lambda: ZeROStrategy(stage=1, rpc_timeout_sec=timeout),
    }
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        num_nodes=1 if name == "alone" else 2,
        strategy=strategies[name](),
        max_epochs=1,
        limit_train_batches=7 if name == "alone" else STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.randn(ROWS * STEPS * 4, WIDTH, generator=torch.Generator().manual_seed(0))
    trainer.fit(Net(folder, STEPS), DataLoader(rows, batch_size=ROWS // 4))
    print("a script has ended", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
