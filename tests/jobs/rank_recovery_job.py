"""A user's script for three ranks, whose workers are killed; ``rank_recovery_job.py RESULTS HOW``."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import repair_job
import torch
from pytorch_lightning import Callback
from repair_job import Kills

from strategies import Recovery

MANY: Kills = {
    0: ["forward-0"],
    3: ["backward-1"],
    6: ["step-0"],
    8: ["snapshot-1"],
    10: ["on_train_batch_end-0"],
    12: ["forward-0", "forward-1"],
    13: ["at-end-1"],
}
ON_HOSTS: Kills = {0: ["forward-0"], 8: ["snapshot-1"], 12: ["forward-0", "forward-1"]}
FEW: Kills = {4: ["backward-0"]}
EVERY_BATCH: dict[str, Any] = {"accumulate_grad_batches": 1}
"""An optimizer step after every batch."""


class KillsRank(Callback):
    """Kills the process that supervises a worker, in the second epoch."""

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx == 3:
            _, supervisor = trainer.strategy.pipeline.workers._supervisors()[2]
            os.kill(supervisor, signal.SIGKILL)


def main(results: Path, how: str) -> None:
    if how == "three hosts":
        every_host = {"num_nodes": repair_job.STAGES, "devices": 1, **EVERY_BATCH}
        found = {"fit": repair_job.fit(ON_HOSTS, 1, **every_host)}
        options: dict[str, Any] = {"recovery": Recovery(1, verify_every_n_steps=3), "rpc_timeout_sec": 5}
        found["verified"] = repair_job.fit({4: ["hang-0"]}, 0, options=options, **every_host)
    elif how == "many":
        found = {"fit": repair_job.fit(MANY, 1, **EVERY_BATCH)}
        found["evaluations"] = repair_job.evaluate(is_disturbed=True)
    else:
        found = {"fit": repair_job.fit(FEW, 2, **EVERY_BATCH)}
    torch.save(found, results)
    if how == "the rank too":
        repair_job.fit({}, 1, callbacks=lambda: [KillsRank()], **EVERY_BATCH)
    print("a script has ended")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
