"""The CheckpointIO, callbacks that save, and loading, without a run."""

import os
import stat
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins import AsyncCheckpointIO, TorchCheckpointIO
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import nn

from strategies import DDPStrategy, RPCSequentialStrategy, ZeROStrategy
from strategies.checkpoint.background import BackgroundWriter
from strategies.lightning.checkpoints import AtomicCheckpointIO, check_links, wait_before_naming


def test_the_default_and_the_users_own() -> None:
    own = TorchCheckpointIO()
    for make in (DDPStrategy, RPCSequentialStrategy):
        assert type(make().checkpoint_io) is AtomicCheckpointIO
        assert make(checkpoint_io=own).checkpoint_io is own
        wrapper: Any = make(checkpoint_io=AsyncCheckpointIO()).checkpoint_io
        assert type(wrapper.checkpoint_io) is AtomicCheckpointIO
        wrapper = make(checkpoint_io=AsyncCheckpointIO(own)).checkpoint_io
        assert wrapper.checkpoint_io is own


def test_a_file_like_any_other(tmp_path: Path) -> None:
    path, io = tmp_path / "a" / "b.ckpt", AtomicCheckpointIO()
    before = os.umask(0o027)
    try:
        for value in (1, 2):
            io.save_checkpoint({"value": torch.tensor(value)}, str(path) if value == 1 else f"file://{path}")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert io.load_checkpoint(path, weights_only=True) == {"value": 2}
    assert os.listdir(path.parent) == ["b.ckpt"]
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint({}, path, storage_options={"a": 1})
    io.remove_checkpoint(path)
    assert not path.exists()


def test_other_filesystems_are_lightnings() -> None:
    io = AtomicCheckpointIO()
    io.save_checkpoint({"value": torch.ones(1)}, "memory://folder/a.ckpt")
    assert fsspec.filesystem("memory").exists("folder/a.ckpt")
    assert io.load_checkpoint("memory://folder/a.ckpt")["value"] == 1


def test_settings() -> None:
    with pytest.raises(MisconfigurationException, match="Unknown state_dict_type 'shared'; did you mean 'sharded'"):
        RPCSequentialStrategy(state_dict_type="shared")
    with pytest.raises(MisconfigurationException, match=r'"sharded" does not write through a CheckpointIO; leave out'):
        RPCSequentialStrategy(state_dict_type="sharded", checkpoint_io=TorchCheckpointIO())


def fail() -> None:
    raise OSError("the disk is full")


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


@pytest.mark.parametrize("make", [ZeROStrategy, RPCSequentialStrategy])
def test_where_a_sharded_checkpoint_cannot_be_written(make: Any, tmp_path: Path) -> None:
    strategy = make(state_dict_type="sharded")
    with pytest.raises(TypeError, match="takes no storage_options"):
        strategy.save_checkpoint({}, tmp_path / "a.ckpt", storage_options={"mode": "x"})
    with pytest.raises(ValueError, match=r"directories of this machine only, got memory://a\.ckpt"):
        strategy.save_checkpoint({}, "memory://a.ckpt")
    assert not [*tmp_path.iterdir()]


class Older(pl.LightningModule):
    """Reads what it saved under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({name.replace("old", "layer"): t for name, t in state.items()}, strict, assign)


@pytest.mark.parametrize("make", [DDPStrategy, ZeROStrategy, RPCSequentialStrategy])
def test_a_load_state_dict_of_its_own(make: Any) -> None:
    strategy, model = make(), Older()
    strategy._lightning_module = model
    strategy.load_model_state_dict({"state_dict": {"old.weight": torch.full((1, 2), 7.0), "old.bias": torch.ones(1)}})
    assert model.layer.weight.tolist() == [[7, 7]]
    with pytest.raises(RuntimeError, match="Missing key"):
        strategy.load_model_state_dict({"state_dict": {}})
