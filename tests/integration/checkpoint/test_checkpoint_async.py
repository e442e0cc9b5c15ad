"""``async_save``: training goes on while a snapshot is written; one at a time; errors surface; the end waits."""

import os
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_job import Resumed, fit, pipeline
from harness import run
from parity import alike, batches
from parity_layers import Limited
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor

from strategies import DDPStrategy
from strategies.checkpoint import save_and_load
from strategies.lightning.checkpoints import AtomicCheckpointIO


class SlowIO(AtomicCheckpointIO):
    """Writes the first checkpoint, of batch 1 or 2, when batch 4 has ended, or fails then."""

    def __init__(self, fails: bool = False) -> None:
        self.batches, self.fails = threading.Semaphore(0), fails
        self.went_on: list[bool] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.went_on.append(all(self.batches.acquire(timeout=60) for _ in range(4)))
        if self.fails:
            raise OSError("the disk is full")
        super().save_checkpoint(checkpoint, path, storage_options)


class LateIO(AtomicCheckpointIO):
    def save_checkpoint(self, *args: Any) -> None:
        time.sleep(0.5)
        super().save_checkpoint(*args)


class Steps(Callback):
    def __init__(self, io: Any = None, save_at: tuple[int, ...] = ()) -> None:
        self.io, self.save_at, self.last = io, save_at, 0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.last = trainer.global_step
        if self.io is not None:
            self.io.batches.release()
        if trainer.global_step in self.save_at:
            trainer.save_checkpoint(f"step {trainer.global_step}.ckpt")


def contents(folder: Path) -> dict[str, Any]:
    found = {}
    for path in folder.glob("*.ckpt"):
        found[path.name] = (
            save_and_load.load_sharded(path)[0]
            if save_and_load.is_sharded(path)
            else torch.load(path, weights_only=True)
        )
        found[path.name].pop("callbacks")  # has the paths
    return found


def background_saves() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    home = Path.cwd()
    kinds = {
        "in between": {},
        "full": {"async_save": True},
        "sharded": {"async_save": True, "state_dict_type": "sharded"},
    }
    for kind, options in kinds.items():
        folder = home / kind
        folder.mkdir()
        os.chdir(folder)
        newest = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=1)
        fit(pipeline(3, **options), 3, callbacks=[newest, Steps(save_at=(1, 4))], enable_checkpointing=True)
        seen[kind] = contents(folder)
        os.chdir(home)
    best = ModelCheckpoint("best", "best", monitor="val_loss", save_top_k=3)
    late: dict[str, Any] = {"strategy": DDPStrategy(async_save=True, checkpoint_io=LateIO()), "devices": 1}
    fit(late, 3, callbacks=[best], enable_checkpointing=True)
    seen["one name"] = sorted(os.listdir("best"))
    io = SlowIO()
    fit(pipeline(2, async_save=True, checkpoint_io=io), 2, callbacks=[Steps(io, save_at=(2,))])
    seen["went on"] = io.went_on, Path("step 2.ckpt").exists()
    torch.distributed.destroy_process_group()
    for when, save_at in {"next": (1, 5), "end": (1,)}.items():
        io, steps = SlowIO(fails=True), Steps(save_at=save_at)
        steps.io = io
        with pytest.raises(OSError, match="the disk is full"):
            fit(pipeline(2, async_save=True, checkpoint_io=io), 2, callbacks=[steps])
        seen[f"failed at the {when}"] = steps.last
    Path("taken").write_text("a file where a directory should be")
    with pytest.raises(OSError, match="taken"):
        fit(pipeline(2, async_save=True, state_dict_type="sharded"), 1, callbacks=[SavesInto("taken/a.ckpt")])
    return seen


def ddp_going_on() -> tuple[list[bool], bool]:
    io = SlowIO()
    one: dict[str, Any] = {"strategy": DDPStrategy(async_save=True, checkpoint_io=io), "devices": 1}
    fit(one, 2, callbacks=[Steps(io, save_at=(2,))])
    torch.distributed.destroy_process_group()
    return io.went_on, Path("step 2.ckpt").exists()


def test_training_goes_on_while_a_checkpoint_is_written() -> None:
    assert run(ddp_going_on, allow=["process_group", "env"]) == ([True], True)


class SavesInto(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint(self.path)


@pytest.mark.slow
def test_saving_in_the_background() -> None:
    seen = run(background_saves, timeout_seconds=300, allow=["process_group", "env"])
    expected = seen["in between"]
    assert set(expected) == {"step=8.ckpt", "step 1.ckpt", "step 4.ckpt"}
    for kind in ("full", "sharded"):
        alike(seen[kind], expected, tolerance=0.0)
    assert seen["went on"] == ([True], True)
    assert seen["one name"] == ["best-v1.ckpt", "best-v2.ckpt", "best.ckpt"]
    assert seen["failed at the next"] == 5 and seen["failed at the end"] == 6


class Slow:
    """Is pickled a while after an event."""

    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def __deepcopy__(self, memo: Any) -> "Slow":
        return self

    def __reduce__(self) -> Any:
        assert self.event.wait(60)
        time.sleep(3)  # meanwhile, the next step begins, which needs new workers
        return OrderedDict, ()


class Skips(Resumed):
    """Leaves out a batch that is too large for a layer of stage 0, and writes the checkpoint before it until then."""

    caught = threading.Event()

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module.insert(0, Limited(3))

    def train_dataloader(self) -> Any:
        return batches((8, 12, 7, 8))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        try:
            return super().training_step(batch, batch_idx)
        except RuntimeError as error:
            assert str(error) == "too many rows"
            self.caught.set()
            return None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (0, 3):
            self.trainer.save_checkpoint(f"batch {batch_idx}.ckpt")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if not self.caught.is_set():
            checkpoint["slow"] = Slow(self.caught)


def caught_while_a_checkpoint_is_written() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    seen = []
    for async_save in (True, False):
        result = fit(pipeline(2, [4, 3], async_save=async_save), 1, make=Skips)
        seen.append((result, contents(Path.cwd())))
    return seen


@pytest.mark.slow
def test_an_error_is_caught_while_a_checkpoint_is_written() -> None:
    (result, saved), (expected, expected_saved) = run(caught_while_a_checkpoint_is_written, timeout_seconds=170)
    assert len(result["losses"]) == 3 and saved["batch 0.ckpt"].pop("slow") == {}
    alike((result, saved), (expected, expected_saved), tolerance=0.0)
