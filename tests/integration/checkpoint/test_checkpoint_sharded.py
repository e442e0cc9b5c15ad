"""``state_dict_type="sharded"``: every stage writes and reads its own part, for any number of stages."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import procfs
import pytest
import torch
from checkpoint_job import Resumed, Saves, fit, pipeline, single
from harness import run
from parity import alike
from paths import PYTHONPATH
from pytorch_lightning.callbacks import ModelCheckpoint

from strategies import DDPStrategy
from strategies.checkpoint import save_and_load
from strategies.checkpoint.consolidate import consolidate
from strategies.lightning.checkpoints import AtomicCheckpointIO
from trainer import Trainer

SHARDED: dict[str, Any] = {"state_dict_type": "sharded"}


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
    command = [sys.executable, "-m", "strategies.checkpoint.consolidate", str(second), str(third)]
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
        save_and_load.is_sharded(Path("kept/last.ckpt")),
    )

    fit(pipeline(2, **SHARDED), 1, make=Drops, callbacks=[Saves("dropped")])
    seen["dropped"] = sorted(save_and_load.load_sharded(Path("dropped"))[0]["state_dict"])
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


def consolidated() -> tuple[float, bool]:
    """What consolidating 128 MiB takes on top, in MiB, and whether the file is right."""
    for path, numel in (Path("small"), 4), (Path("large"), 2**21):
        tensors = {str(k): torch.full((numel,), float(k), dtype=torch.float64) for k in range(8)}
        save_and_load.save_sharded({"state_dict": tensors}, path)
        del tensors
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
        before = procfs.own_memory_bytes("VmRSS")
        consolidate(path, Path(f"{path}.ckpt"))
        grown = (procfs.own_memory_bytes("VmHWM") - before) / procfs.MEBI
    read = torch.load("large.ckpt", weights_only=True, mmap=True)["state_dict"]
    return grown, all(bool((tensor == float(name)).all()) for name, tensor in read.items())


@pytest.mark.slow
def test_consolidating_takes_little_memory() -> None:
    grown, is_right = run(consolidated)
    assert is_right and grown < 64


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
