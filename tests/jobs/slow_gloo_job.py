"""A user's script for two ranks of torchrun that ends right after a collective operation, on a busy machine.

The threads that execute gloo's operations get the processor only when nothing else wants it.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from late_rank_0_job import Net
from torch.utils.data import DataLoader

from trainer import Trainer


def make_gloo_wait_for_the_rest() -> None:
    """Keep each rank on one processor, where its other threads come before those of gloo."""
    rank = int(os.environ["RANK"])
    processor = {sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]}
    os.sched_setaffinity(0, processor)
    for thread in Path("/proc/self/task").iterdir():
        if (thread / "comm").read_text().startswith("pt_gloo"):
            os.sched_setaffinity(int(thread.name), processor)
            os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))


if __name__ == "__main__":
    trainer = Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(torch.ones(8, 4), batch_size=2))
    make_gloo_wait_for_the_rest()
    dist.all_reduce(torch.ones(4))
