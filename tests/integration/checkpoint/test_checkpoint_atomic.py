"""A checkpoint is there whole or not at all, whenever the process is killed."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_job import write_shards
from harness import run
from paths import PYTHONPATH
from undisturbed import until_undisturbed

from strategies.checkpoint import save_and_load
from strategies.lightning.checkpoints import AtomicCheckpointIO

TENSORS = 24


def saved(version: int) -> dict[str, Any]:
    values = {f"layer.{n}": torch.full((300, 300), float(version)) for n in range(TENSORS)}
    return {"state_dict": values, "version": version, "relay": {}}


def save_in_parts(path: Path, checkpoint: dict[str, Any]) -> None:
    tensors = list(save_and_load.sharded_tensors(checkpoint).items())
    with save_and_load.writing_shards(checkpoint, path) as shards:
        write_shards(shards, [dict(tensors[: TENSORS // 2]), dict(tensors[TENSORS // 2 :])])


def with_these_modules() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([PYTHONPATH, str(Path(__file__).parent)])}


def save_until_killed(path: Path, in_parts: bool, start: int, begun: int) -> None:
    """Runs in a forked child; tells when it has saved once."""
    for version in range(start, 10**6):
        if in_parts:
            save_in_parts(path, saved(version))
        else:
            AtomicCheckpointIO().save_checkpoint(saved(version), path)
        os.write(begun, b".")


FORKS = """
import os, signal, sys, time
from pathlib import Path
from test_checkpoint_atomic import save_until_killed

for line in sys.stdin:
    start, moment = line.split()
    saved, begun = os.pipe()
    child = os.fork()
    if not child:
        save_until_killed(Path("a.ckpt"), sys.argv[1] == "True", int(start), begun)
    os.read(saved, 1)
    time.sleep(float(moment))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(saved), os.close(begun)
    print("killed", flush=True)
"""
"""A process that only imports and forks, so it has no threads, which a fork would lose."""


def killed_at_random(in_parts: bool) -> list[int]:
    """Kills a process that saves all the time, 25 times; the checkpoint is always one of those that it wrote."""
    path, versions, moments = Path("a.ckpt"), [0], random.Random(1)
    command, pipe = [sys.executable, "-W", "ignore", "-c", FORKS, str(in_parts)], subprocess.PIPE
    forks = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=with_these_modules(), text=True)
    assert forks.stdin is not None and forks.stdout is not None
    for _ in range(25):
        print(versions[-1] + 1, moments.uniform(0.0, 0.3), file=forks.stdin, flush=True)
        assert forks.stdout.readline() == "killed\n"
        checkpoint = save_and_load.load_sharded(path)[0] if in_parts else torch.load(path, weights_only=True)
        versions.append(checkpoint["version"])
        assert len(checkpoint["state_dict"]) == TENSORS
        assert all(torch.equal(v, torch.full_like(v, versions[-1])) for v in checkpoint["state_dict"].values())
    forks.communicate()
    for leftover in Path().rglob(".*.part"):  # of meta.pt, too
        os.utime(leftover, (0, 0))
    save_in_parts(Path("b.ckpt"), saved(1)) if in_parts else AtomicCheckpointIO().save_checkpoint(saved(1), "b.ckpt")
    assert sorted(os.listdir()) == ["a.ckpt", "b.ckpt"]
    if in_parts:
        save_in_parts(path := Path("a.ckpt"), saved(1))
        assert len(os.listdir(path)) == 2
    return versions


@pytest.mark.slow
@pytest.mark.parametrize("in_parts", [False, True])
def test_killed_at_any_moment(in_parts: bool) -> None:
    versions = run(killed_at_random, in_parts)
    assert versions == sorted(set(versions)) and len(versions) == 26


KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
import torch
from pytorch_lightning import Callback
from checkpoint_job import Resumed, fit, pipeline
from strategies import DDPStrategy

kind, moment = sys.argv[1], float(sys.argv[2])

def kill_within_a_save():
    while not list(Path().glob(".*.part")) and len(list(Path("last.ckpt").glob("shards-*"))) < 2:
        time.sleep(0.0005)
    time.sleep(moment)
    os.kill(os.getpid(), signal.SIGKILL)

class Saves(Callback):
    def on_train_batch_end(self, trainer, *args):
        trainer.save_checkpoint("last.ckpt")
        if trainer.global_step == 2:
            Path("saved").touch()
            trainer.save_checkpoint("good.ckpt")
            threading.Thread(target=kill_within_a_save, daemon=True).start()

class Large(Resumed):
    def __init__(self):
        super().__init__()
        self.large = torch.nn.Parameter(torch.ones(3_000_000))
        self.sequential_module[1].register_buffer("large", torch.ones(3_000_000))

settings = {"full": {}, "sharded": {"state_dict_type": "sharded"}, "async": {"async_save": True}}
fit(pipeline(2, **settings[kind]), 1000, make=Large, callbacks=[Saves()])
"""


def killed_within_a_save(kind: str, moment: float) -> tuple[bool, dict[str, Any]]:
    """Whether it was within a save, and the step of each checkpoint."""
    command = [sys.executable, "-W", "ignore", "-c", KILLED, kind, str(moment)]
    killed = subprocess.run(command, env=with_these_modules(), timeout=100)
    assert killed.returncode == -signal.SIGKILL and Path("saved").exists()
    is_within = bool(list(Path().glob(".*.part"))) or len(list(Path("last.ckpt").glob("shards-*"))) == 2
    checkpoints = {}
    for name in ("last.ckpt", "good.ckpt")[: 1 if kind == "async" else 2]:  # the other one may just be being written
        sharded = save_and_load.is_sharded(Path(name))
        assert sharded == (kind == "sharded")
        checkpoint = save_and_load.load_sharded(Path(name))[0] if sharded else torch.load(name, weights_only=True)
        assert checkpoint["state_dict"]["large"].numel() == 3_000_000 and len(
            checkpoint["optimizer_states"][0]["state"]
        )
        checkpoints[name] = checkpoint["global_step"]
    return is_within, checkpoints


def is_within_a_save(found: tuple[bool, Any]) -> None:
    assert found[0]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "moment"), [("full", 0.0), ("sharded", 0.01), ("async", 0.0)])
def test_a_run_that_is_killed_within_a_save(kind: str, moment: float) -> None:
    """The harness fails where a worker is left."""
    _, steps = until_undisturbed(lambda: run(killed_within_a_save, kind, moment), is_within_a_save, times=5)
    assert steps.get("good.ckpt", 2) == 2 and steps["last.ckpt"] >= (1 if kind == "async" else 2)
