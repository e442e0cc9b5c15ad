"""``state_dict_type="sharded"``: every stage writes and reads its own part, for any number of stages."""

import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_job import Resumed, Saves, fit, pipeline, single, write_shards
from harness import run
from parity_trainers import alike
from paths import PYTHONPATH
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins import TorchCheckpointIO
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from strategies import DDPStrategy, RPCSequentialStrategy
from strategies.checkpoint import store
from strategies.consolidate import main
from strategies.lightning.checkpoints import AtomicCheckpointIO
from trainer import Trainer

SHARDED: dict[str, Any] = {"state_dict_type": "sharded"}


def test_settings() -> None:
    with pytest.raises(MisconfigurationException, match="Unknown state_dict_type 'shared'; did you mean 'sharded'"):
        RPCSequentialStrategy(state_dict_type="shared")
    with pytest.raises(MisconfigurationException, match=r'"sharded" does not write through a CheckpointIO; leave out'):
        RPCSequentialStrategy(state_dict_type="sharded", checkpoint_io=TorchCheckpointIO())


def write(path: Path) -> dict[str, Any]:
    """A checkpoint of two processes, in this one."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    optimizer.state[model[0].bias]["note"] = ["plain", None]
    state: Any = model.state_dict()
    state["empty"] = torch.zeros(0, 3)
    checkpoint = {"state_dict": state, "optimizer_states": [optimizer.state_dict()], "epoch": 3, "other": torch.ones(2)}
    tensors = list(store.sharded_tensors(checkpoint).items())
    parts = [dict(tensors[::2]), dict(tensors[1::2])]
    bare = [{name: torch.empty_like(tensor, device="meta") for name, tensor in part.items()} for part in parts]
    with store.writing_shards(checkpoint, path) as shards:
        write_shards(shards, parts, bare)
    return checkpoint


def test_the_file_of_one_process_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "a.ckpt", tmp_path / "whole.ckpt"
    path.write_bytes(b"a file that was there before")
    for _ in range(2):  # the second one in place of the first
        written = write(path)
    assert len(list(path.iterdir())) == 2 and os.listdir(tmp_path) == ["a.ckpt"]
    main([str(path), str(out)])
    read = torch.load(out, weights_only=True)
    alike(read, written, tolerance=0.0)
    assert type(read["state_dict"]) is OrderedDict and read["state_dict"]._metadata == written["state_dict"]._metadata
    bare = torch.load(path / "meta.pt", weights_only=True)
    assert bare["state_dict"]["0.weight"].is_meta and not bare["other"].is_meta
    with pytest.raises(SystemExit):
        main([str(tmp_path), str(out)])
    assert capsys.readouterr().err == f"error: {tmp_path} is not a sharded checkpoint: it has no meta.pt\n"


def test_a_file_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    written = write(path)
    main([str(path), str(path)])
    alike(torch.load(path, weights_only=True), written, tolerance=0.0)
    write(path)
    AtomicCheckpointIO().save_checkpoint({"a": 1}, path)
    assert torch.load(path) == {"a": 1} and os.listdir(tmp_path) == ["a.ckpt"]
    (tmp_path / "other").mkdir()
    with pytest.raises(IsADirectoryError):
        AtomicCheckpointIO().save_checkpoint({"a": 1}, tmp_path / "other")
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "other"]


def test_what_is_not_whole_is_not_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(path := tmp_path / "a.ckpt")
    (file,) = path.rglob("__1_0.distcp")
    content = file.read_bytes()
    for broken in (b"", content[:-1]):
        file.write_bytes(broken)
        with pytest.raises(RuntimeError, match=r"too short: __1_0.distcp, written by process 1\).*state_dict.0.b"):
            store.load_sharded(path)
    file.unlink()
    with pytest.raises(SystemExit):
        main([str(path), str(tmp_path / "out.ckpt")])
    assert "is incomplete (absent or too short: __1_0.distcp" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["a.ckpt"]
    file.write_bytes(content)
    bare = torch.load(path / "meta.pt", weights_only=True)
    bare["state_dict"]["more"] = bare["state_dict"].pop("0.weight")
    torch.save(bare, path / "meta.pt")
    with pytest.raises(RuntimeError, match=r"missing \['state_dict.more'\], unexpected \['state_dict.0.weight'\]"):
        store.load_sharded(path)


class Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_nothing_in_it_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(path := tmp_path / "a.ckpt")
    (metadata,) = path.rglob(".metadata")
    for content, told in (
        (Runs(), "names posix.mkdir, which torch does not write"),
        ({}, "holds a dict, not metadata"),
    ):
        metadata.write_bytes(pickle.dumps(content))
        with pytest.raises(SystemExit):
            main([str(path), "out.ckpt", "--trust"])
        assert told in capsys.readouterr().err
    with pytest.raises(CheckpointException, match=r"holds a dict, not metadata"):
        store.read_tensors(metadata.parent, {"state_dict.empty": torch.empty(0, 3, device="meta")})
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.parametrize("name", ["shards-/../../b.ckpt", "/tmp/shards-1", "elsewhere"])
def test_its_tensors_are_in_it(tmp_path: Path, name: str) -> None:
    write(path := tmp_path / "a.ckpt")
    bare = torch.load(path / "meta.pt", weights_only=True)
    bare["relay"]["shards"] = name
    torch.save(bare, path / "meta.pt")
    with pytest.raises(
        RuntimeError, match=f"names '{name}' as the directory of its tensors, which is not a subdirectory"
    ):
        store.load_sharded(path)


class Drops(Resumed):
    """Leaves something out of its checkpoint, as one may."""

    strict_loading = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["sequential_module.0.bias"]


def in_parts() -> dict[str, Any]:
    """Two stages, then three, then one process; each goes on from what the one before saved in parts."""
    seen: dict[str, Any] = {}
    first, second, third = (Path(f"{k}.ckpt") for k in range(3))
    trained = [fit(pipeline(2, **SHARDED, async_save=True), 1, callbacks=[Saves(first)])]
    assert sorted(path.name for path in first.rglob("__*")) == ["__0_0.distcp", "__1_0.distcp"]
    trained.append(fit(pipeline(3, **SHARDED), 2, ckpt_path=first, callbacks=[Saves(second)]))
    assert len(list(second.rglob("__*"))) == 3
    command = [sys.executable, "-m", "strategies.consolidate", str(second), str(third)]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    subprocess.run(command, check=True, timeout=60, env=environment)
    trained.append(fit(single(), 3, ckpt_path=third))
    losses = [loss for each in trained for loss in each["losses"]]
    seen["chain"] = {**trained[-1], "losses": losses}, fit(single(), 3)

    # DDP and Lightning's own strategies read all of it, a pipeline that saves into one file its part; all go on alike.
    seen["single"] = fit(single(), 3, ckpt_path=second)
    seen["ddp"] = fit({"strategy": DDPStrategy(), "devices": 1}, 3, ckpt_path=second)
    torch.distributed.destroy_process_group()
    seen["full"] = fit(pipeline(2), 3, ckpt_path=second)

    # Checkpoints of a callback: the older ones are removed, `last` changes from a file to a directory.
    Path("kept").mkdir()
    AtomicCheckpointIO().save_checkpoint({}, "kept/last.ckpt")
    kept = ModelCheckpoint("kept", "{step}", every_n_train_steps=1, save_last=True, save_top_k=1)
    kept.last_model_path = str(Path("kept/last.ckpt").absolute())
    fit(pipeline(2, **SHARDED), 1, callbacks=[kept], enable_checkpointing=True)
    seen["kept"] = (
        sorted(os.listdir("kept")),
        Path(kept.last_model_path).name,
        store.is_sharded(Path("kept/last.ckpt")),
    )

    fit(pipeline(2, **SHARDED), 1, make=Drops, callbacks=[Saves("dropped")])
    seen["dropped"] = sorted(store.load_sharded(Path("dropped"))[0]["state_dict"])
    with pytest.raises(ValueError, match=r"directories of this machine only, got memory://a"):
        fit(pipeline(2, **SHARDED), 1, callbacks=[Saves("memory://a")])

    next(second.rglob("__1_0.distcp")).unlink()
    with pytest.raises(RuntimeError, match=r"__1_0.distcp, written by process 1\), and nothing of it has been loaded"):
        fit(pipeline(3), 3, ckpt_path=second)
    return seen


@pytest.mark.slow
def test_in_parts() -> None:
    seen = run(in_parts, allow=["process_group", "env"])
    chain, whole = seen["chain"]
    alike(chain, whole)
    for name in ("single", "ddp", "full"):
        alike(seen[name], {**whole, "losses": whole["losses"][6:]})
    assert seen["kept"] == (["last.ckpt", "step=3.ckpt"], "last.ckpt", True)
    assert "sequential_module.0.weight" in seen["dropped"] and "sequential_module.0.bias" not in seen["dropped"]


def found_rates() -> list[float]:
    """The finder saves a checkpoint and goes back to it, in the middle of a run."""
    from pytorch_lightning.tuner import Tuner

    rates = []
    for options in ({}, SHARDED, {**SHARDED, "async_save": True}):
        torch.manual_seed(0)
        setting = pipeline(3, **options)
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = Trainer(accelerator="cpu", precision="64-true", max_epochs=1, **setting, **quiet)
        model = Resumed()
        model.configure_optimizers = lambda model=model: torch.optim.AdamW(model.parameters(), lr=0.01)
        before = {name: value.double() for name, value in model.state_dict().items()}
        found = Tuner(trainer).lr_find(model, num_training=6, update_attr=False)
        alike(model.state_dict(), before)
        rates.append(found.suggestion(skip_begin=0, skip_end=0))
        assert not os.listdir()
    return rates


@pytest.mark.slow
def test_the_rate_finder_goes_back_to_parts() -> None:
    rates = run(found_rates)
    assert rates[0] == rates[1] == rates[2]
