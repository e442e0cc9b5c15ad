"""The same training in one process and as pipelines of two and of three stages, and what must then be equal.

For use within a child of the harness. A row of the parity table is a model (often :class:`Small` with something
overridden) and some settings, given to :func:`check`.
"""

import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness_child import ACCELERATOR, DATA_PLANE, VALUES, data_planes
from pytorch_lightning import LightningModule, seed_everything
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from strategies import RPCSequentialStrategy
from trainer import Trainer
from trainer.verification.certificate import wrong_ones
from trainer.verification.compare import Rounding, findings
from trainer.verification.observed_run import ObservedRun, ObservedStep, leaves

WIDTH = 6
NUM_LAYERS = 6


def small_layers() -> list[nn.Module]:
    """Six layers without randomness, ``[rows, WIDTH]`` to ``[rows, 2]``; every stage of two or three has parameters."""
    linear = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    return [linear[0], nn.Tanh(), nn.LayerNorm(WIDTH), linear[1], nn.GELU(), nn.Linear(WIDTH, 2)]


class Small(LightningModule):
    """A small model that keeps the loss of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(*small_layers())
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.sequential_module(x)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Computes the loss of ``(inputs [rows, WIDTH], targets [rows, 2])`` and keeps it."""
        loss = mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        return self.loss(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", mse_loss(self(batch[0]), batch[1]), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def batches(sizes: Sequence[int] = (8, 8, 8, 5), *, seed: int = 0) -> DataLoader:
    """A loader of batches of the given numbers of rows."""
    generator = torch.Generator().manual_seed(seed)
    made = [[torch.randn(n, width, generator=generator) for width in (WIDTH, 2)] for n in sizes]
    return DataLoader(made, batch_size=None)


@dataclass
class Outcome:
    """What a training came to."""

    losses: list[float]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimizers: list[dict[str, Any]]
    metrics: dict[str, float]
    model: Any
    trainer: Trainer


def fit(
    make: Callable[[], LightningModule],
    strategy: Any,
    devices: int,
    *,
    train: Callable[[], Any] = batches,
    val: Callable[[], Any] | None = None,
    ckpt_path: str | None = None,
    **arguments: Any,
) -> Outcome:
    """Builds the model with the same seed each time and trains it, by default for two epochs in float64."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    seed_everything(0, verbose=False)
    model = make()
    settings = {
        "precision": "64-true",
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **arguments,
    }
    trainer = Trainer(strategy=strategy, **placed(strategy, devices, **settings))
    before = data_planes().copy()
    trainer.fit(model, train(), None if val is None else val(), ckpt_path=ckpt_path)
    if os.environ.get(DATA_PLANE) and isinstance(strategy, RPCSequentialStrategy) and devices > 1:
        _check_data_plane(before)
    return Outcome(
        losses=list(getattr(model, "losses", [])),
        parameters={name: p.detach().clone() for name, p in model.named_parameters()},
        buffers={name: b.detach().clone() for name, b in model.named_buffers()},
        optimizers=[optimizer.state_dict() for optimizer in trainer.optimizers],
        metrics={name: value.item() for name, value in trainer.callback_metrics.items()},
        model=model,
        trainer=trainer,
    )


def placed(strategy: Any, devices: int, **settings: Any) -> dict[str, Any]:
    """Returns arguments of a Trainer, with accelerator and devices; processes share the GPU if there are fewer GPUs."""
    settings = {"accelerator": accelerator(), **settings}
    shares_gpu = settings["accelerator"] == "gpu" and 0 < torch.cuda.device_count() < devices
    if shares_gpu:
        strategy.parallel_devices = [torch.device("cuda:0")] * devices
    return {**settings, "devices": "auto" if shares_gpu else devices}


def accelerator() -> str:
    """What tests run on that leave it open; see pytest's option ``--accelerator``."""
    return os.environ.get(ACCELERATOR, "cpu")


def one_device() -> SingleDeviceStrategy:
    """The strategy of the one process that pipelines are compared to."""
    return SingleDeviceStrategy("cpu" if accelerator() == "cpu" else "cuda:0")


on_cpus = pytest.mark.skipif(accelerator() == "gpu", reason="its expectations hold on CPUs only")


def _check_data_plane(before: Counter[str]) -> None:
    """Asserts that a pipeline has exchanged values over the plane of ``--data-plane``, unless it was told not to."""
    new = data_planes() - before
    assert new.keys() - {VALUES}, "no pipeline was started"
    assert new["gloo"] or new[VALUES], f"no value went from device to device: {new}"


def check(
    make: Callable[[], LightningModule],
    *,
    stages: Sequence[int] = (2, 3),
    strategy: Mapping[str, Any] | None = None,
    tolerance: float = 1e-9,
    **arguments: Any,
) -> list[Outcome]:
    """Trains in one process and as pipelines, and compares losses, parameters, buffers, optimizer states and metrics.

    Args:
        make: Builds the model, whose layers are divided evenly unless ``strategy`` holds a ``balance``.
        stages: The numbers of stages.
        strategy: Arguments of ``RPCSequentialStrategy``; 3 micro-batches unless it says otherwise.
        tolerance: Relative and absolute, for everything.
        arguments: As for :func:`fit`; values that are ``Fresh`` are called for each run.

    Returns:
        The outcome of the one process, then those of the pipelines.
    """

    def fresh() -> dict[str, Any]:
        return {name: value() if isinstance(value, Fresh) else value for name, value in arguments.items()}

    single = fit(make, one_device(), 1, **fresh())
    outcomes = [single]
    for number in stages:
        options = {"microbatches": 3, "balance": _even(make, number), **(strategy or {})}
        outcome = fit(make, RPCSequentialStrategy(**options), number, **fresh())
        compare(outcome, single, tolerance)
        outcomes.append(outcome)
    return outcomes


@dataclass(frozen=True)
class Fresh:
    """An argument that each run needs anew, such as a list of callbacks."""

    make: Callable[[], Any]

    def __call__(self) -> Any:
        return self.make()


def compare(actual: Outcome, expected: Outcome, tolerance: float = 1e-9) -> None:
    """Asserts that two trainings came to the same."""
    assert_equal(_observed(actual), _observed(expected), tolerance)


def alike(actual: Any, expected: Any, tolerance: float = 1e-9, where: str = "") -> None:
    """Asserts that nested values are the same: tensors and floats within a tolerance, all else exactly."""
    ours, theirs = (ObservedRun("use", validation=leaves(value, where)) for value in (actual, expected))
    assert_equal(ours, theirs, tolerance)


def assert_equal(actual: ObservedRun, expected: ObservedRun, tolerance: float) -> None:
    """Asserts that two runs are equal to rounding, by the comparison of ``trainer.verify``."""
    wrong = wrong_ones(findings(actual, expected, Rounding(tolerance, tolerance, f"{tolerance}", absolute=tolerance)))
    told = (
        f"{each.part} {each.name}: {each.actual}, but {each.expected} is expected, {each.size}" for each in wrong[:5]
    )
    assert not wrong, "\n".join(told)


def _observed(outcome: Outcome) -> ObservedRun:
    """An outcome as a run with one step, at its end."""
    step = ObservedStep(
        len(outcome.losses),
        values={**outcome.parameters, **outcome.buffers},
        states=leaves([optimizer.get("state", {}) for optimizer in outcome.optimizers]),
        hyperparameters=leaves([optimizer.get("param_groups", []) for optimizer in outcome.optimizers]),
    )
    logged = [leaves(outcome.metrics)]
    return ObservedRun("fit", list(outcome.losses), steps=[step], logged_of_epoch=logged, buffers=list(outcome.buffers))


def _even(make: Callable[[], LightningModule], stages: int) -> list[int]:
    sequential = getattr(make(), "sequential_module", range(NUM_LAYERS))
    layers, rest = divmod(len(sequential), stages)
    return [layers + (i < rest) for i in range(stages)]
