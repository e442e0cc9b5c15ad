"""Saving sees the whole model: ``rpc_save_model``, tied weights, late buffers; and takes little memory."""

import copy
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_job import Resumed, fit, pipeline, single
from harness import run
from parity import alike, on_cpus
from pytorch_lightning import Callback
from torch import Tensor, nn

from strategies.checkpoint import save_and_load
from trainer import Trainer

KIND = {"full": {}, "sharded": {"state_dict_type": "sharded"}}


class Counts(nn.Module):
    """The identity; makes a buffer in its first forward pass, and counts in a plain attribute and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("late", None)
        self.register_buffer("unsaved", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.late is None:
            self.late = torch.full((3,), 7.0, dtype=x.dtype)
        self.calls += self.training
        return x

    def get_extra_state(self) -> Tensor:
        return torch.tensor(float(self.late is not None))

    def set_extra_state(self, state: Tensor) -> None:
        assert state in (0.0, 1.0)


class Odd(Resumed):
    """One weight on the first stage and the second, one on the first and the driver; a layer of its own kind."""

    def __init__(self) -> None:
        super().__init__()
        layers = self.sequential_module
        layers[1] = Counts()
        layers[3].weight = layers[0].weight
        layers.insert(4, nn.Linear(6, 6))
        layers[4].bias = layers[0].bias


class Saves(Callback):
    """Saves in every way in the middle of the second epoch."""

    def __init__(self, in_old_way: bool) -> None:
        self.in_old_way = in_old_way

    def on_train_batch_end(self, trainer: Any, model: Any, *args: Any) -> None:
        if trainer.global_step != 5:
            return
        trainer.save_checkpoint("now.ckpt")
        if not self.in_old_way:
            torch.save([model.sequential_module, model(torch.ones(2, 6, dtype=torch.float64))], "module.pt")
            return
        pipelined = model.sequential_module
        for save, path in ((save_by_hand, "module.pt"), (lambda t, p: t.save_checkpoint(p), "in old way.ckpt")):
            trainer.strategy.rpc_save_model(trainer, save, path)
        assert model.sequential_module is pipelined


def save_by_hand(trainer: Any, path: str) -> None:
    model = trainer.lightning_module
    whole = model.sequential_module
    assert type(whole) is nn.Sequential and whole[0].weight is whole[3].weight and whole[0].bias is whole[4].bias
    assert not any(p.is_meta for p in model.parameters()) and not any(b.is_meta for b in model.buffers())
    torch.save([copy.deepcopy(whole), model(torch.ones(2, 6, dtype=torch.float64))], path)


def load(path: Path) -> Any:
    return (
        save_and_load.load_sharded(path)[0] if save_and_load.is_sharded(path) else torch.load(path, weights_only=False)
    )


def odd_models() -> dict[str, Any]:
    seen = {}
    ways = {
        "single": (single(), 1),
        "three": (pipeline(3, [2, 2, 3], checkpoint="never"), 3),
        "in parts": (pipeline(3, [2, 2, 3], checkpoint="never", **KIND["sharded"]), 3),
    }
    home = Path.cwd()
    for name, (setting, stages) in ways.items():
        (home / name).mkdir()
        os.chdir(home / name)
        end = fit(setting, 2, make=Odd, callbacks=[Saves(in_old_way=stages > 1)])
        found = {"end": end, "now": load(Path("now.ckpt"))}
        if stages > 1:
            old = load(Path("in old way.ckpt"))
            alike(old["state_dict"], found["now"]["state_dict"], tolerance=0.0)
            alike(old["optimizer_states"], found["now"]["optimizer_states"], tolerance=0.0)
        module, output = torch.load("module.pt", weights_only=False)
        found |= {"output": output, "calls": module[1].calls, "state": dict(module.state_dict())}
        found["now"] = {part: found["now"][part] for part in ("state_dict", "optimizer_states")}
        seen[name] = found
    os.chdir(home)
    return seen


@pytest.mark.slow
def test_the_whole_model_in_the_middle_of_training() -> None:
    seen = run(odd_models)
    single = seen.pop("single")
    assert single.pop("calls") == 5 + 1  # 5 steps, and the look at the output
    for name, found in seen.items():
        assert found.pop("calls") == 5 * 3, name  # micro-batches
        for part, value in single.items():
            alike(found[part], value)
        assert list(found["now"]["state_dict"]) == list(single["now"]["state_dict"])
    assert "sequential_module.1.late" in single["now"]["state_dict"]


NUM_DOUBLES = 3 * 2**20
"""A stage has 24 MiB of parameters and 48 of optimizer states."""


class SavesInValidation(Callback):
    def on_validation_end(self, trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint("within.ckpt")


def saved_in_a_validation_after_fit() -> list[tuple[Any, Any]]:
    seen = []
    for kind in KIND.values():
        settings: dict[str, Any] = {**pipeline(2, **kind), "accelerator": "cpu", "precision": "64-true"}
        trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, **settings)
        model = Resumed()
        trainer.fit(model)
        trainer.save_checkpoint("after fit.ckpt")
        trainer.callbacks.append(SavesInValidation())
        trainer.validate(model, verbose=False)
        seen.append((load(Path("after fit.ckpt")), load(Path("within.ckpt"))))
    return seen


@pytest.mark.slow
def test_a_checkpoint_of_a_validation_after_fit_is_that_after_fit() -> None:
    for after_fit, within in run(saved_in_a_validation_after_fit):
        assert len(after_fit["optimizer_states"][0]["state"]) == 10
        for part in ("state_dict", "optimizer_states"):
            alike(within[part], after_fit[part], tolerance=0.0)


class Heavy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUM_DOUBLES))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum()


class HeavyModel(Resumed):
    def __init__(self) -> None:
        super().__init__()
        for k in (0, 2, 5):
            self.sequential_module[k] = Heavy()
        self.behind = nn.Linear(6, 2)


class Peaks(Callback):
    """How much memory each process takes on top while saving, in MiB: stages 0 and 1, then the driver."""

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        workers = trainer.strategy.pipeline.workers._processes
        pids = [*(process.pid for process in workers), os.getpid()]
        trainer.strategy.pipeline.wait()
        before = []
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is what there is now
            before.append(memory(pid, "VmRSS"))
        trainer.save_checkpoint("heavy.ckpt")
        self.grown = [memory(pid, "VmHWM") - rss for pid, rss in zip(pids, before, strict=True)]


def memory(pid: int, kind: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"{kind}:\s+(\d+) kB", status)
    assert found
    return int(found[1]) / 1024


def heavy_saves() -> dict[str, Any]:
    seen = {}
    for kind, options in KIND.items():
        peaks = Peaks()
        fit(pipeline(3, **options), 1, make=HeavyModel, callbacks=[peaks], limit_train_batches=1, limit_val_batches=1)
        seen[kind] = peaks.grown
    return seen


@on_cpus
@pytest.mark.slow
def test_memory_that_saving_takes() -> None:
    """The other two stages have 144 MiB, in tensors of 24."""
    seen = run(heavy_saves)
    print(seen)
    *workers, driver = seen["full"]
    assert driver < 24 + 48
    assert max(workers) < 24
    assert max(seen["sharded"]) < 64  # imports, and what torch.distributed.checkpoint holds while it writes
