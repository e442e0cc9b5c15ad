"""How runs of torchrun end: two ranks of DDP or ZeRO, next to two ranks of Lightning's DDP that run at the same time.

In half of the runs, rank 0 leaves training up to 2 s after rank 1, as if it still wrote a file. Rank 0 then ends its
run while Python exits in the process of rank 1. Both runs of a pair have the same pause. The section fails if a run of
Relay ends with a status other than 0.

``python -m torch.distributed.run --standalone --nproc-per-node=2 -m benchmarks.ends ddp 0.5`` is one run.
"""

import os
import random
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import pytorch_lightning
import torch
from pytorch_lightning import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.report import ROOT, Effort, Section, Table

ROUNDS, WIDTH, ROWS, STEPS, LATEST_SECONDS, LIMIT_SECONDS = 100, 8, 4, 4, 2.0, 300.0
RELAY, LIGHTNING = ("ddp", "zero"), "lightning"
NAMES = {"ddp": "Relay, `ddp`", "zero": "Relay, `zero`", LIGHTNING: "Lightning's `ddp`"}


class Net(LightningModule):
    """Two layers, whose loss is averaged over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch[0]).pow(2).mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Pause(Callback):
    """Keeps rank 0 in its run for some seconds after training has ended."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_end(self, trainer: Any, model: Any) -> None:
        if trainer.is_global_zero:
            time.sleep(self.seconds)


def train(kind: str, pause_seconds: float) -> None:
    """Run the training of one rank."""
    make: Any = pytorch_lightning.Trainer
    if kind != LIGHTNING:
        from trainer import Trainer as make
    trainer = make(
        strategy="ddp" if kind == LIGHTNING else kind,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        callbacks=[Pause(pause_seconds)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(2 * STEPS * ROWS, WIDTH)), batch_size=ROWS))


def started(kind: str, pause_seconds: float) -> subprocess.Popen[str]:
    """Start one run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.Popen(
        [*command, "-m", "benchmarks.ends", kind, str(pause_seconds)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ending(run: subprocess.Popen[str]) -> tuple[str, str]:
    """Return a description of how a run has ended, which is empty after status 0, and the output of the run."""
    try:
        said = run.communicate(timeout=LIMIT_SECONDS)[0]
    except subprocess.TimeoutExpired:
        run.kill()  # the section ends its ranks
        return f"still running after {LIMIT_SECONDS:.0f} s", ""
    if run.returncode == 0:
        return "", said
    return "abort" if "terminate called" in said or "SIGABRT" in said else f"status {run.returncode}", said


def main(effort: Effort) -> Section:
    rounds, draw = effort.rounds_or(ROUNDS), random.Random(0)
    ends: dict[str, Counter[str]] = {kind: Counter() for kind in NAMES}
    for _ in range(rounds):
        for kind in RELAY:
            pause_seconds = round(max(0.0, draw.uniform(-LATEST_SECONDS, LATEST_SECONDS)), 3)
            pair = {each: started(each, pause_seconds) for each in (kind, LIGHTNING)}
            for each, run in pair.items():
                how, said = ending(run)
                ends[each][how] += 1
                if how:
                    print(f"-- {each}, rank 0 {pause_seconds} s late: {how}", said, sep="\n", flush=True)
    rows = [
        [
            NAMES[kind],
            f"{how.total()}",
            f"{how['']}",
            ", ".join(f"{number} {what}" for what, number in how.items() if what) or "none",
        ]
        for kind, how in ends.items()
    ]
    failed = sum(ends[kind].total() - ends[kind][""] for kind in RELAY)
    total = sum(ends[kind].total() for kind in RELAY)
    return Section(
        "Ends",
        f"`torchrun --nproc-per-node 2`, {rounds} rounds: a fit of two layers. One of Lightning's runs beside each "
        f"of Relay's; in half of the pairs rank 0 leaves training up to {LATEST_SECONDS:.0f} s after rank 1.",
        tables=[Table(["", "runs", "status 0", "other ends"], rows)],
        absent={"ends": f"{failed} of {total} runs of Relay ended otherwise; their output is above"} if failed else {},
    )


if __name__ == "__main__":
    train(sys.argv[1], float(sys.argv[2]))
