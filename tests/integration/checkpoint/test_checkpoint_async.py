"""``async_save``: training goes on while a snapshot is written; one at a time; errors surface; the end waits."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_job import fit, pipeline
from harness import run
from parity_trainers import alike
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from strategies import DDPStrategy
from strategies.checkpoint import store
from strategies.checkpoint.writer import BackgroundWriter, Writer, snapshot
from strategies.lightning.checkpoints import AtomicCheckpointIO, check_links, wait_before_naming


def test_a_snapshot_is_a_copy_that_shares_what_was_shared() -> None:
    weight, received = torch.ones(3), torch.ones(2)
    loss = (weight.clone().requires_grad_() * 2).sum()
    taken = snapshot({"a": weight, "b": [weight.view(3)], "c": received, "loss": loss, "n": {"m": [1]}}, [received])
    weight.add_(1)
    received.add_(1)
    assert taken["a"].tolist() == taken["b"][0].tolist() == [1, 1, 1] and taken["loss"] == 6
    assert taken["a"].data_ptr() == taken["b"][0].data_ptr()
    assert taken["c"] is received


def fail() -> None:
    raise OSError("the disk is full")


def test_one_at_a_time_and_errors_surface() -> None:
    background, go, done = BackgroundWriter(), threading.Event(), []
    background.save(lambda: (go.wait(10), done.append("first"))[0])
    background.after_saving(lambda: done.append("removed"))
    assert done == []
    threading.Timer(0.1, go.set).start()
    background.save(lambda: done.append("second"))
    assert done[:2] == ["first", "removed"]
    background.save(fail)
    background.after_saving(lambda: done.append("removed although the new one is not there"))
    with pytest.raises(OSError, match="the disk is full"):
        background.save(lambda: done.append("never"))
    background.save(fail)
    with pytest.raises(OSError, match="the disk is full"):
        background.end()
    assert done == ["first", "removed", "second"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("relay-save")]


def test_in_the_foreground() -> None:
    writer, done = Writer(), []
    assert not writer.in_background
    writer.save(lambda: done.append("saved"))
    writer.after_saving(lambda: done.append("removed"))
    with pytest.raises(OSError, match="the disk is full"):
        writer.save(fail)
    writer.settle(), writer.wait(), writer.end()
    assert done == ["saved", "removed"]


def saving(path: Path) -> BackgroundWriter:
    background = BackgroundWriter()
    background.save(lambda: (time.sleep(0.2), path.touch())[1])
    return background


def test_a_name_is_taken_once_it_is_being_written(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path)
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[callback])
    callback.setup(trainer, LightningModule(), "fit")
    trainer.state.fn = TrainerFn.FITTING
    background = saving(tmp_path / "a.ckpt")
    undo = wait_before_naming(trainer, background)
    assert callback.file_exists(tmp_path / "a.ckpt", trainer)
    background.end()
    for function in undo:
        function()
    assert "file_exists" not in vars(callback)


def test_no_links_to_what_is_not_there_yet() -> None:
    strategy, model = DDPStrategy(async_save=True), LightningModule()
    strategy._lightning_module = model
    kept = ModelCheckpoint(save_last="link")
    model.trainer = trainer = Trainer(accelerator="cpu", logger=False, callbacks=[kept])
    trainer.state.fn = TrainerFn.FITTING
    with pytest.raises(
        MisconfigurationException, match=r'save_last="link"\) links to a checkpoint .* Use save_last=True'
    ):
        strategy.setup_environment()
    trainer.state.fn = TrainerFn.TESTING
    check_links(trainer)


def test_every_process_reads_what_the_first_has_written(tmp_path: Path) -> None:
    there = []

    class Ranks(DDPStrategy):
        def barrier(self, name: str | None = None) -> None:
            there.append(path.exists())

    path, strategy = tmp_path / "a.ckpt", Ranks(async_save=True)
    torch.save({"a": 1}, tmp_path / "b")
    strategy._writer = background = BackgroundWriter()
    background.save(lambda: (time.sleep(0.2), (tmp_path / "b").rename(path))[0])
    assert strategy.load_checkpoint(path) == {"a": 1}
    assert there == [True]
    background.save(fail)
    with pytest.raises(OSError, match="the disk is full"):
        strategy.load_checkpoint(path)
    assert there == [True, True]
    background.end()


class SlowIO(AtomicCheckpointIO):
    """Writes when training has gone on for two batches, or fails."""

    def __init__(self, fails: bool = False) -> None:
        self.batches, self.fails = threading.Semaphore(0), fails
        self.went_on: list[bool] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.went_on.append(all(self.batches.acquire(timeout=5) for _ in range(2)))
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
            store.load_sharded(path)[0] if store.is_sharded(path) else torch.load(path, weights_only=True)
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
    for kind in ("pipeline", "ddp"):
        io = SlowIO()
        own: dict[str, Any] = {"strategy": DDPStrategy(async_save=True, checkpoint_io=io), "devices": 1}
        setting = own if kind == "ddp" else pipeline(2, async_save=True, checkpoint_io=io)
        fit(setting, 2, callbacks=[Steps(io, save_at=(2,))])
        seen[f"{kind} went on"] = io.went_on, Path("step 2.ckpt").exists()
        Path("step 2.ckpt").unlink()
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
    assert seen["pipeline went on"] == seen["ddp went on"] == ([True], True)
    assert seen["one name"] == ["best-v1.ckpt", "best-v2.ckpt", "best.ckpt"]
    assert seen["failed at the next"] == 5 and seen["failed at the end"] == 6
