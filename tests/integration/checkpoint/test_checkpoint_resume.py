"""Save under any strategy, go on under any other: what one process would have come to without interruption."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import checkpoint_job
import pytest
import torch
from checkpoint_job import fit, pipeline, single
from harness import run
from parity import alike
from parity_scaler import Exact
from pytorch_lightning import Callback
from scripts import Script

from strategies.checkpoint import save_and_load

LOADS_WITHOUT_RELAY = """
import sys
sys.modules["strategies"] = sys.modules["trainer"] = None  # importing them is an error
import torch
from pytorch_lightning import LightningModule
class Plain(LightningModule):
    def __init__(self, width):
        super().__init__()
        linear = [torch.nn.Linear(width, width) for _ in range(2)]
        self.sequential_module = torch.nn.Sequential(
            linear[0], torch.nn.Tanh(), torch.nn.LayerNorm(width), linear[1], torch.nn.GELU(), torch.nn.Linear(width, 2)
        )
        self.behind = torch.nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(()))
for path in sys.argv[1:]:
    model = Plain.load_from_checkpoint(path, weights_only=True)
    saved = torch.load(path, weights_only=True)["state_dict"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved[name].to(value.dtype)), name
"""


def job(kinds: Sequence[str], folder: Path, epoch: int) -> list[dict[str, Any]]:
    """Trains one epoch for each kind, in processes that stay."""
    results = folder / "results.pt"
    assert Script(checkpoint_job.__file__, str(results), str(folder), str(epoch), *kinds).wait(timeout=150) == 0
    seen: list[dict[str, Any]] = torch.load(results)
    return seen


def train(make: Callable[[], Any], folder: Path, epoch: int) -> list[dict[str, Any]]:
    """Trains one epoch."""
    path = folder / f"{epoch - 1}.ckpt" if epoch else None
    return [fit(make(), epoch + 1, folder / f"{epoch}.ckpt", ckpt_path=path)]


def chain(steps: Sequence[Callable[[Path, int], list[dict[str, Any]]]], folder: Path) -> list[dict[str, Any]]:
    """Trains one epoch after another, each in another way."""
    seen: list[dict[str, Any]] = []
    for step in steps:
        k = len(seen)
        seen += step(folder, k)
    losses: list[float] = []
    for each in seen:
        losses += each["losses"]
        each["losses"] = losses[:]
    return seen


def uninterrupted(num_epochs: int, folder: Path) -> dict[str, Any]:
    return fit(single(), num_epochs, folder / "whole.ckpt")


def signature(value: Any) -> Any:
    """Keys, shapes and types, in order."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape)
    if isinstance(value, dict):
        return [(key, signature(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [signature(each) for each in value]
    return type(value).__name__


def check_checkpoints(folder: Path) -> None:
    paths = sorted(folder.glob("*.ckpt"))
    checkpoints = {
        path.stem: save_and_load.load_sharded(path)[0] if path.is_dir() else torch.load(path, weights_only=True)
        for path in paths
    }
    whole = checkpoints.pop("whole")
    for name, checkpoint in checkpoints.items():
        assert set(checkpoint) == set(whole), name
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "callbacks", "hyper_parameters"):
            for ours, theirs in zip(signature(checkpoint[part]), signature(whole[part]), strict=True):
                assert ours == theirs, (name, part, ours, theirs)
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        LOADS_WITHOUT_RELAY,
        *(str(path) for path in paths if path.is_file()),
    ]
    assert subprocess.run(command, timeout=60).returncode == 0


def over_stages(number_of_stages: tuple[int, ...]) -> list[dict[str, Any]]:
    folder = Path.cwd()
    seen = chain([partial(train, partial(pipeline, stages)) for stages in number_of_stages], folder)
    seen.append(uninterrupted(len(seen), folder))
    check_checkpoints(folder)
    return seen


def over_strategies(folder: Path) -> list[dict[str, Any]]:
    """Each in a process of its own: one that has trained cannot be forked."""

    def alone(function: Any, what: Any, folder: Path, epoch: int) -> list[dict[str, Any]]:
        seen: list[dict[str, Any]] = run(function, what, folder, epoch, timeout_seconds=160)
        return seen

    steps = [
        partial(alone, train, partial(pipeline, 2)),
        partial(alone, job, ["zero", "ddp"]),
        partial(alone, train, single),
        partial(alone, job, ["2x2"]),
        partial(alone, train, partial(pipeline, 3, checkpoint="always")),
    ]
    seen = chain(steps, folder)
    seen.append(run(uninterrupted, len(seen), folder))
    check_checkpoints(folder)
    return seen


@pytest.mark.slow
def test_one_two_three_one() -> None:
    *_, last, whole = run(over_stages, (1, 2, 3, 1))
    alike(last, whole)
    assert len(whole["losses"]) == 12


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_pipeline_zero_ddp_single_replicas_pipeline(tmp_path: Path) -> None:
    *_, last, whole = over_strategies(tmp_path)
    alike(last, whole)


class KeepScale(Callback):
    def on_train_end(self, trainer: Any, *args: Any) -> None:
        self.scale = trainer.precision_plugin.scaler.state_dict()


def with_a_scaler() -> None:
    kept = []

    def scaled(setting: dict[str, Any]) -> dict[str, Any]:
        kept.append(KeepScale())
        return {**setting, "precision": None, "plugins": [Exact()], "callbacks": kept[-1:]}

    fit(scaled(pipeline(2)), 1, Path("first.ckpt"))
    resumed = fit(scaled(pipeline(3)), 2, ckpt_path="first.ckpt")
    whole = fit(scaled(single()), 2)
    first, second, uninterrupted = [one.scale for one in kept]
    assert first["_growth_tracker"] == 1 and second == uninterrupted != first
    assert resumed["losses"] == pytest.approx(whole["losses"][3:], rel=1e-5)  # the plug-in of the test rounds weights


@pytest.mark.slow
def test_a_gradient_scaler() -> None:
    run(with_a_scaler)
