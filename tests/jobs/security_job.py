"""A user's script that notes who listens where while it trains: ``python security_job.py RESULTS STRATEGY``."""

import json
import os
import stat
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import procfs
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies.launchers import _SubprocessScriptLauncher
from torch import Tensor, nn
from torch.utils.data import DataLoader

from strategies import DDPStrategy, RPCSequentialStrategy, ZeROStrategy
from trainer import Trainer


class OwnLauncher(_SubprocessScriptLauncher):
    """A user's."""


class LaunchedOtherwise(DDPStrategy):
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self._launcher = OwnLauncher(self.cluster_environment, self.num_processes, self.num_nodes)


# Class, arguments, number of processes: each driver of a pipeline has a worker, a fork server and its successor.
STRATEGIES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "pipeline": (RPCSequentialStrategy, {"balance": [1, 1], "microbatches": 2, "state_dict_type": "sharded"}, 4),
    "replicas": (RPCSequentialStrategy, {"balance": [1, 1], "microbatches": 2, "data_parallel_size": 2}, 8),
    "ddp": (DDPStrategy, {}, 2),
    "own launcher": (LaunchedOtherwise, {}, 2),
    "zero": (ZeROStrategy, {"stage": 2, "state_dict_type": "sharded"}, 2),
}


def modes(folder: Path) -> dict[str, int]:
    """The permissions of every file and directory in there."""
    return {str(file): stat.S_IMODE(file.stat().st_mode) for file in folder.rglob("*")}


class Net(pl.LightningModule):
    def __init__(self, results: Path) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sequential_module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
        self.results = results

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.trainer.global_rank == 0:
            pids = procfs.family(os.getsid(0), self.results)
            found = {
                "processes": len(pids),
                "listeners": sorted(procfs.listeners(pids)),
                "files in between": modes(Path(tempfile.gettempdir())),
            }
            self.results.write_text(json.dumps(found))
        self.trainer.strategy.barrier()  # nobody leaves before
        return (self.sequential_module(batch) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def main(results: Path, name: str) -> None:
    warnings.filterwarnings("ignore")
    kind, arguments, _ = STRATEGIES[name]
    variables = dict(os.environ)
    trainer = Trainer(
        accelerator="cpu",
        devices=4 if name == "replicas" else 2,
        strategy=kind(**arguments),
        max_steps=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=results.parent / "run",
    )
    trainer.fit(Net(results), DataLoader(torch.randn(24, 3), batch_size=2))
    left = {key for key in dict(os.environ).items() ^ variables.items()}
    lightnings = {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"}
    assert {key for key, _ in left} <= lightnings | {"KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK"}, left
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
