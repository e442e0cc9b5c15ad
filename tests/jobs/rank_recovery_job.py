"""A user's script for three ranks of one host whose workers are killed; ``rank_recovery_job.py RESULTS HOW``."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import psutil
import recovery_job
import torch
from pytorch_lightning import Callback
from recovery_job import Kills

SNAPSHOTS: Kills = {
    0: ["forward-0"],
    3: ["backward-1"],
    6: ["step-0"],
    8: ["snapshot-1"],
    10: ["on_train_batch_end-0"],
    12: ["forward-0", "forward-1"],
}
TWICE: Kills = {3: ["forward-0", "forward-1"], 12: ["forward-0", "forward-1"]}
"""The workers that take over are lost within the same batch."""
CHECKPOINT: Kills = {9: ["backward-1"]}
FEW: Kills = {4: ["backward-0"]}
EVERY_BATCH: dict[str, Any] = {"accumulate_grad_batches": 1}
"""An optimizer step after every batch."""


class Observed(recovery_job.Net):
    """Records the process ids of all workers with which a step of the second epoch has begun.

    A worker that takes over may be lost before the batch ends, so a hook of a callback would miss it.
    """

    workers: ClassVar[set[int]] = set()  # what a module has itself goes back with its step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.current_epoch == 1:
            self.workers.update(pid for _, pid in self.trainer.strategy.pipeline.workers._processes.values())
        return super().training_step(batch, batch_idx)


class Spares(Callback):
    """Kills the idle spare of each rank at the beginning of the second epoch.

    Attributes:
        told: Numbers of idle spares before and after, process ids of the later spares, and a command.
    """

    def __init__(self) -> None:
        self.told: dict[str, Any] = {}

    def on_train_epoch_start(self, trainer: Any, model: Any) -> None:
        if trainer.current_epoch == 1:
            idle = idle_spares(trainer)
            self.told["idle"] = list(map(len, idle))
            for pid in (pid for pids in idle for pid in pids):
                os.kill(pid, signal.SIGKILL)
            again = idle_spares(trainer, other_than=[pid for pids in idle for pid in pids])
            self.told["again"], self.told["spares"] = list(map(len, again)), again
            self.told["command"] = " ".join(psutil.Process(again[0][0]).cmdline())


def idle_spares(trainer: Any, other_than: Any = ()) -> list[list[int]]:
    """The spares of each rank that wait, once there are some."""
    workers = trainer.strategy.pipeline.workers
    busy = {workers._processes[stage][1] for stage in range(2)} | set(other_than)
    supervisors = [pid for _, pid in workers._supervisors().values()]

    def waiting(supervisor: int) -> list[int]:
        below = psutil.Process(supervisor).children(recursive=True)
        named = [child.pid for child in below if is_spare(child)]
        return [pid for pid in named if pid not in busy]

    return comes(lambda: all(map(waiting, supervisors)) and list(map(waiting, supervisors)))


def is_spare(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("relay-spare-") and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def comes(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)
    return found


class KillsRank(Callback):
    """Kills the process that supervises a worker, in the second epoch."""

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx == 3:
            _, supervisor = trainer.strategy.pipeline.workers._supervisors()[2]
            os.kill(supervisor, signal.SIGKILL)


def with_spares() -> dict[str, Any]:
    """From snapshots; then, with the same ranks, from a checkpoint."""
    options = {"spare_workers": 1}
    repaired, spares = zip(*(_from_snapshots(kills, options) for kills in (SNAPSHOTS, TWICE)), strict=True)
    restarted = recovery_job.fit(CHECKPOINT, 0, options={"max_restarts": 1, **options}, **EVERY_BATCH)
    return {"repaired": repaired, "spares": spares, "restarted": restarted}


def _from_snapshots(kills: Kills, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a fit comes to, and what is told of spares and workers."""
    callback = Spares()
    Observed.workers.clear()
    found = recovery_job.fit(kills, 1, options=options, callbacks=lambda: [callback], net=Observed, **EVERY_BATCH)
    return found, {**callback.told, "workers": sorted(Observed.workers)}


def without_spares() -> dict[str, Any]:
    return {"repaired": recovery_job.fit(FEW, 2, **EVERY_BATCH)}


def main(results: Path, how: str) -> None:
    ways = {"with spares": with_spares, "without spares": without_spares}
    torch.save(ways[how](), results)
    if how == "without spares":
        recovery_job.fit({}, 1, callbacks=lambda: [KillsRank()], **EVERY_BATCH)
    print("a script has ended")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
