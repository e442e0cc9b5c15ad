"""A user's script whose rank 1 comes to grief: ``python ranks_faults_job.py RESULTS STRATEGY RANKS MOMENT...``.

Rank 0 trains once for each moment, all in one process, and says what it got. Lightning's launcher starts the others by
running this script once more; they learn from a variable at which moment.
"""

import gc
import logging
import os
import signal
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import procfs
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from scripts import waiting_copies
from torch import Tensor, nn
from torch.utils.data import DataLoader

from strategies import DDPStrategy, RPCSequentialStrategy, ZeROStrategy
from trainer import Trainer

MOMENTS = {
    "start": "while it started",
    "meeting": "in set-up",
    "setup": "in set-up",
    "forward": "in training step",
    "backward": "in backward pass",
    "step": "in optimizer step",
    "save": "in saving a checkpoint",
    "validation": "in validation step",
    "teardown": "in teardown",
    "after": "after call 1 of the Trainer",
    "asleep": "in training step",
}
"""When rank 1 is killed, and what that is called in the error; ``asleep``: while rank 0 is busy with itself."""

OTHERS = ("raises", "rank 0 raises", "same Trainer", "deaf", "orphan")
"""Rank 1 raises an error; rank 0 does; the Trainer is the same afterwards, in the last case; rank 0 listens to nothing
when rank 1 is killed; rank 0 is killed before they meet."""

WIDTH, ROWS, RANK = 8, 32, int(os.environ.get("LOCAL_RANK", "0"))
STRATEGIES = {
    "ddp": DDPStrategy,
    "zero": ZeROStrategy,
    "replicas": lambda: RPCSequentialStrategy([2, 1], microbatches=2, data_parallel_size=2),
}


def doomed(moment: str) -> bool:
    return RANK == 1 and os.environ.get("MOMENT") == moment


def come_to_grief(moment: str) -> None:
    if doomed(moment):
        Path(os.environ["KILLED_AT"]).write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


class DoomedAdam(torch.optim.Adam):
    armed = False  # ZeRO makes a step of a copy first

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if self.armed:
            come_to_grief("step")
        return loss


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sequential_module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def configure_callbacks(self) -> list[Any]:  # before the ranks meet
        if RANK == 0 and os.environ["MOMENT"] == "orphan":
            while not (built := Path(os.environ["KILLED_AT"]).with_name("built")).exists():
                time.sleep(0.1)
            built.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return []

    def setup(self, stage: str) -> None:
        come_to_grief("setup")
        come_to_grief("same Trainer")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self._misfortune()
        loss = (self.sequential_module(batch) - 1).square().mean()
        if batch_idx == 1 and doomed("backward"):
            loss.register_hook(lambda _: come_to_grief("backward"))
        return loss

    def _misfortune(self) -> None:
        moment, self.trainer.optimizers[0].armed = os.environ["MOMENT"], True
        if RANK == 0 and moment == "rank 0 raises":
            raise ValueError("rank 0's own")
        if RANK == 0 and moment == "asleep":
            time.sleep(1000)
        if RANK == 0 and moment == "deaf":
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGURG])
            time.sleep(1000)
        if doomed("raises"):
            raise ValueError("rank 1's own")
        for kill in ("forward", "asleep", "deaf"):
            come_to_grief(kill)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        come_to_grief("save")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        come_to_grief("validation")
        self.log("val_loss", (self.sequential_module(batch) - 1).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return DoomedAdam(self.parameters(), lr=0.1)


class DoomedAtTheEnd(Callback):
    def teardown(self, *_: Any, **__: Any) -> None:
        come_to_grief("teardown")


def train(strategy: str, ranks: int, folder: Path) -> float:
    """Trains for four steps; returns the last validation loss."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=STRATEGIES[strategy](),
        max_epochs=1,
        callbacks=[ModelCheckpoint(folder / "saved", every_n_train_steps=2), DoomedAtTheEnd()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    if RANK == 1:
        (folder / "built").touch()
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    loaders = [DataLoader(rows, batch_size=ROWS // 8), DataLoader(rows, batch_size=ROWS)]
    if RANK == 0 and os.environ["MOMENT"] == "same Trainer":
        with suppress(RuntimeError):
            trainer.fit(Net(), *loaders)
        os.environ["MOMENT"] = ""
    trainer.fit(Net(), *loaders)
    return trainer.callback_metrics["val_loss"].item()


def surroundings() -> dict[str, Any]:
    """What a failure must leave as it was."""
    gc.collect()
    children = {*"".join(file.read_text() for file in Path("/proc/self/task").glob("*/children")).split()}
    return {
        "children": sorted(children - {str(pid) for pid in waiting_copies()}),
        "threads": {thread.name for thread in threading.enumerate()},
        "ports": procfs.listening_ports(),
        "environment": dict(os.environ),
        "group": torch.distributed.is_initialized(),
    }


def ending(strategy: str, ranks: int, moment: str, folder: Path) -> dict[str, Any]:
    """What a training came to on rank 0, and what it left."""
    os.environ.update(MOMENT=moment, KILLED_AT=str(folder / "killed"))
    (folder / "killed").write_text("nan")
    before, seen = surroundings(), {}
    try:
        seen["loss"] = train(strategy, ranks, folder)
        if moment == "after":
            time.sleep(1.0)
            train(strategy, ranks, folder)
    except (RuntimeError, ValueError) as error:
        seen |= {"kind": type(error).__name__, "message": str(error), "ended": time.time()}
    seen["seconds"] = seen.get("ended", 0.0) - float((folder / "killed").read_text())
    after = surroundings()
    seen["left"] = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    return seen


def main(results: Path, strategy: str, ranks: int, moments: list[str]) -> None:
    if RANK > 0:
        if doomed("meeting"):
            torch.distributed.init_process_group = lambda *_, **__: come_to_grief("meeting")
        come_to_grief("start")
        train(strategy, ranks, results.parent)
        time.sleep(0.5)
        come_to_grief("after")
        time.sleep(600 if os.environ["MOMENT"] != "" else 0)
    else:
        torch.save({moment: ending(strategy, ranks, moment, results.parent) for moment in moments}, results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
