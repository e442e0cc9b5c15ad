"""A user's script for ranks that torchrun or SLURM starts: several Trainers one after another.

Run as ``launched_job.py RESULTS LAYOUT NUM_NODES``; what comes after the first ``fit`` is done by drivers only.
"""

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from replicas_job import Net, fit
from torch import Tensor, nn

from strategies import Recovery, RPCSequentialStrategy

TIMEOUT_SECONDS = 200.0
"""Of runs that fail; far above what four interpreters may take to start on a slow machine."""

BALANCE = [1, 2, 3]
"""Of runs that lose a process or raise an error."""

LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "four stages": {"gpipe": {"balance": [1, 2, 1, 2]}},
    "two replicas": {"gpipe": {"balance": [3, 3]}, "1f1b": {"balance": [2, 4], "schedule": "1f1b"}},
}
REPLICAS = {"four stages": 1, "two replicas": 2}


def num_ranks(layout: str) -> int:
    return 4 if layout in LAYOUTS else len(BALANCE)


class Fails(nn.Linear):
    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            raise ArithmeticError("a layer of the user's")
        return super().forward(rows)


class FailingNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.sequential_module[0] = Fails(6, 6)


class KilledNet(Net):
    """Kills a process of its run in mid-fit."""

    victim = "worker"

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        if batch_idx == 2:
            workers = self.trainer.strategy.pipeline.workers._processes
            os.kill(workers[1][1] if self.victim == "worker" else os.getpid(), signal.SIGKILL)


class KilledDriverNet(KilledNet):
    victim = "driver"


class OnceKilledNet(KilledNet):
    """Until torchrun has started all ranks anew."""

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        if self.trainer.current_epoch == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            super().on_train_batch_start(batch, batch_idx)


class ReplacedNet(KilledNet):
    """Twice: the worker of rank 2, and the one that has taken its place."""

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        if self.trainer.current_epoch == 1 and batch_idx in (2, 3):
            super().on_train_batch_start(batch, 2)


ENDS = {
    "failing": FailingNet,
    "killed worker": KilledNet,
    "killed driver": KilledDriverNet,
}


def job(layout: str, num_nodes: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name, options in LAYOUTS[layout].items():
        strategy = RPCSequentialStrategy(microbatches=3, data_parallel_size=REPLICAS[layout], **options)
        model, trainer = fit(Net, strategy, num_ranks(layout) // num_nodes, num_nodes=num_nodes)
        assert trainer.world_size == REPLICAS[layout]
        weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        seen[name] = {"losses": model.losses, "weights": weights, "validated": trainer.validate(model, verbose=False)}
    seen["is_global_zero"] = trainer.is_global_zero
    return seen


def goes_on(num_nodes: int) -> dict[str, Any]:
    """From the last checkpoint, of which there is none yet in the first run."""
    strategy = RPCSequentialStrategy(BALANCE, microbatches=3)
    saves = ModelCheckpoint("kept", save_last=True, every_n_train_steps=3)
    given = {"enable_checkpointing": True, "callbacks": [saves], "ckpt_path": "last", "num_nodes": num_nodes}
    model, trainer = fit(OnceKilledNet, strategy, len(BALANCE) // num_nodes, **given)
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    return {"losses": model.losses, "weights": weights, "is_global_zero": trainer.is_global_zero}


def replaced() -> dict[str, Any]:
    """A fit whose workers are replaced, and a second one on the same ranks."""
    strategy = RPCSequentialStrategy(BALANCE, microbatches=3, recovery=Recovery(2))
    model, trainer = fit(ReplacedNet, strategy, len(BALANCE))
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    again, _ = fit(Net, RPCSequentialStrategy(BALANCE, microbatches=3, recovery=Recovery(1)), len(BALANCE))
    return {"losses": model.losses, "weights": weights, "again": again.losses, "is_global_zero": trainer.is_global_zero}


def main(results: Path, layout: str, num_nodes: int) -> None:
    if layout in ENDS:
        strategy = RPCSequentialStrategy(BALANCE, microbatches=3, rpc_timeout_sec=TIMEOUT_SECONDS)
        fit(ENDS[layout], strategy, len(BALANCE) // num_nodes, num_nodes=num_nodes)
    others = {"killed once": partial(goes_on, num_nodes), "replaced": replaced}
    seen = others.get(layout, partial(job, layout, num_nodes))()
    if seen.pop("is_global_zero"):
        torch.save(seen, results)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    print("a script has ended")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
