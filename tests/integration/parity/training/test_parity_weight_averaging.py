"""Averages of weights are those of one process: in training, validation, checkpoints, resumed runs and after them."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import weight_averaging_job
from harness import run
from parity import Small, alike, batches
from parity_trainers import Make, everywhere, state_of
from pytorch_lightning.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from scripts import Script
from torch import Tensor, nn

from strategies.checkpoint import save_and_load


class Averaged(Small):
    """In float64 before an average is made of it; has buffers, and a parameter that two layers share."""

    def __init__(self, norm: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)
        if norm:
            self.sequential_module[2] = nn.BatchNorm1d(6)
        if tied:
            self.sequential_module[3].weight = self.sequential_module[0].weight
        self.sequential_module[1].register_buffer("offset", torch.arange(6.0))
        self.steps: list[float] = []
        self.validated: list[float] = []
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.sequential_module(x))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append(outputs["loss"].item())

    def on_validation_epoch_end(self) -> None:
        self.validated.append(self.trainer.callback_metrics["val_loss"].item())


class Late(WeightAveraging):
    """Updates after some steps and epochs."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx == 0 or (step_idx is not None and step_idx >= 3)


class Warming:
    """A decay that grows from call to call, and that looks at all parameters of its group at once."""

    def __init__(self) -> None:
        self.counts: list[float] = []

    @torch.no_grad()
    def __call__(self, averages: list[Tensor], parameters: list[Tensor], count: Tensor) -> None:
        self.counts.append(float(count))
        torch._foreach_mul_(averages, float(count) / (count + 1))
        torch._foreach_add_(averages, parameters, alpha=1 / (float(count) + 1))


def contents(folder: Path) -> dict[str, Any]:
    """Every checkpoint, without what a pipeline adds and paths."""
    files = {path.name: torch.load(path, weights_only=True) for path in folder.glob("*.ckpt")}
    for content in files.values():
        content.pop("relay", None)
        content["order"] = [list(content), *(list(content[name]) for name in content if name.endswith("state_dict"))]
        for name in [name for name in content["callbacks"] if name.startswith("ModelCheckpoint")]:
            del content["callbacks"][name]
    return files


def fitted(
    make: Make, callback: Any, folder: Path, epochs: int = 3, start: Path | None = None, **model: Any
) -> dict[str, Any]:
    """Trains with a checkpoint in the middle of the second epoch, from another one if there is a ``start``."""
    own = Averaged(**model)
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=6, save_top_k=-1)
    trainer = make(max_epochs=epochs, callbacks=[callback, saving], enable_checkpointing=True)
    trainer.fit(own, batches(), batches((5, 6), seed=1), ckpt_path=start)
    trainer.save_checkpoint(folder / "end.ckpt")
    return {
        "steps": own.steps,
        "validated": own.validated,
        "state": state_of(own),
        "average": state_of(callback._average_model),
        "count": callback.state_dict(),
        "checkpoints": contents(folder),
        "momenta": [getattr(module, "momentum", 0.0) for module in own.modules()],
        "model and trainer": [own, trainer],
    }


def mean(make: Make) -> list[Any]:
    """With a run that goes on from one process's checkpoint, and a validation after it, which swaps once more."""
    folder = Path.cwd() / f"mean-{len(os.listdir())}"
    start = min(Path.cwd().glob("mean-*"), default=folder) / "step=6.ckpt"
    first = fitted(make, WeightAveraging(), folder, tied=True)
    resumed = fitted(make, WeightAveraging(), folder / "resumed", epochs=4, start=start, tied=True)
    own, trainer = resumed.pop("model and trainer")
    validated = trainer.validate(own, batches((5, 6), seed=1), verbose=False)
    return [without(first), resumed, validated, state_of(own)]


def swa(make: Make) -> list[Any]:
    """With BatchNorm, whose statistics are found anew in one more epoch, and a run that goes on from a checkpoint."""
    folder = Path.cwd() / f"swa-{len(os.listdir())}"
    settings: dict[str, Any] = {"swa_lrs": 0.05, "swa_epoch_start": 1, "annealing_epochs": 2}
    first = fitted(make, StochasticWeightAveraging(**settings), folder, norm=True)
    start = folder / "step=6.ckpt"
    resumed = fitted(make, StochasticWeightAveraging(**settings), folder / "resumed", 4, start, norm=True)
    return [without(first), without(resumed)]


def others(make: Make) -> list[Any]:
    """One fit of each."""
    callbacks = {
        "late": Late(use_buffers=False),
        "ema": EMAWeightAveraging(decay=0.7, update_every_n_steps=2),
        "own": WeightAveraging(multi_avg_fn=Warming(), use_buffers=False),
        "swa": StochasticWeightAveraging(0.05, swa_epoch_start=0.5, avg_fn=lambda a, p, n: 0.6 * a + 0.4 * p),
    }
    folder = Path.cwd() / f"others-{len(os.listdir())}"
    return [without(fitted(make, own, folder / name, tied=True)) for name, own in callbacks.items()]


def without(found: dict[str, Any]) -> dict[str, Any]:
    del found["model and trainer"]
    return found


def everything() -> list[list[Any]]:
    return [
        everywhere(mean, stages=[2]),
        everywhere(swa, stages=[3], microbatches=1),
        everywhere(others, stages=[2], schedule="1f1b"),
    ]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_averages_over_stages() -> None:
    for single, pipeline in run(everything, timeout_seconds=380):
        alike(pipeline, single)
        for outcome in [each for each in single if isinstance(each, dict) and "checkpoints" in each]:
            saved = outcome["checkpoints"]["end.ckpt"]
            kept = [state.get("average_model_state") for state in saved["callbacks"].values()]
            assert "current_model_state" in saved or kept[0]


def contents_of(path: Path) -> dict[str, Any]:
    """A checkpoint, without what differs between strategies and what names folders."""
    content = save_and_load.load_sharded(path)[0] if path.is_dir() else torch.load(path, weights_only=True)
    callbacks = {name: state for name, state in content["callbacks"].items() if "ModelCheckpoint" not in name}
    left_out = {name: content.pop(name, None) for name in ("relay", "loops")}
    return {**content, "callbacks": callbacks, "keys": sorted({*content, *left_out})}


def over_ranks(folder: Path) -> None:
    for names in (("single", "sharded"), ("ddp", "zero 2"), ("replicas", "parts")):  # that need no new processes
        assert Script(weight_averaging_job.__file__, str(folder), *names).wait(timeout=200) == 0, names


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_averages_over_ranks_and_replicas(tmp_path: Path) -> None:
    run(over_ranks, tmp_path, timeout_seconds=480)
    single = torch.load(tmp_path / "single.pt", weights_only=False)
    for name in weight_averaging_job.STRATEGIES.keys() - {"single"}:
        found = torch.load(tmp_path / f"{name}.pt", weights_only=False)
        alike(found, single)
        for path in ("mean/step=4.ckpt", "resumed/step=8.ckpt", "ema/step=8.ckpt", "swa/step=8.ckpt"):
            alike(contents_of(tmp_path / name / path), contents_of(tmp_path / "single" / path))
