"""Lightning's finders of a learning rate and of a batch size find over stages what they find in one process."""

import os
from functools import partial
from typing import Any

import pytest
import torch
from harness import run
from parity import WIDTH, Small, alike, small_layers
from parity_layers import Limited
from parity_trainers import Make, everywhere, state_of
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import BatchSizeFinder, LearningRateFinder
from pytorch_lightning.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NO_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."
"""By which Lightning knows that memory ran out."""


class Tuned(Small):
    """Has what finders change, and a layer that runs out of memory where there is a limit of rows."""

    def __init__(self, limit: int | None = None, layer: int = 1) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.batch_size, self.lr = 2, 0.01
        if limit is not None:
            layers = small_layers()
            layers[layer] = Limited(limit, NO_MEMORY)
            self.sequential_module = nn.Sequential(*layers)
        self.double()  # at once, so that what was before can be compared with what comes after

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        columns = [torch.randn(96, width, generator=generator) for width in (WIDTH, 2)]
        return DataLoader(TensorDataset(*columns), batch_size=self.batch_size)

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class AtStart(Callback):
    """Keeps what the training begins with, after a finder has run."""

    def on_train_start(self, trainer: Any, model: Any) -> None:
        self.state = state_of(model), trainer.strategy.optimizer_state(trainer.optimizers[0]), trainer.global_step


def learning_rate(make: Make) -> dict[str, Any]:
    model = Tuned()
    before = state_of(model)
    trainer = make(max_epochs=1, limit_train_batches=32, limit_val_batches=1)
    finder: Any = Tuner(trainer).lr_find(model, min_lr=1e-4, max_lr=2.0, num_training=30, early_stop_threshold=None)
    found = {"results": finder.results, "suggestion": finder.suggestion(), "lr": model.lr, "after": state_of(model)}
    alike(found["after"], before, 0.0)
    model, seen, finder = Tuned(), AtStart(), LearningRateFinder(1e-4, 1.0, 30, mode="linear", early_stop_threshold=8.0)
    again = make(max_epochs=1, limit_train_batches=32, limit_val_batches=1, callbacks=[finder, seen])
    again.fit(model)
    by_callback = {
        "results": finder.optimal_lr.results,
        "suggestion": finder.optimal_lr.suggestion(),
        "start": seen.state,
        "losses": model.losses,
        "state": state_of(model),
        "optimizers": [optimizer.state_dict() for optimizer in again.optimizers],
    }
    alike(seen.state[0], before, 0.0)
    assert not os.listdir()  # both had saved a checkpoint, to go back to
    return {**found, "by callback": by_callback}


def learning_rates() -> list[dict[str, Any]]:
    return everywhere(learning_rate, stages=[3])


def batch_size(make: Make, mode: str, limit: int | None, layer: int = 1, method: str = "fit") -> dict[str, Any]:
    model = Tuned(limit, layer)
    before = state_of(model)
    trainer = make(max_epochs=1)
    size = Tuner(trainer).scale_batch_size(
        model, mode=mode, method=method, steps_per_trial=2, init_val=4, max_trials=3 if limit is None else 9
    )
    alike(state_of(model), before, 0.0)
    return {"size": size, "model": model.batch_size, "losses": model.losses, "step": trainer.global_step}


def batch_sizes() -> list[list[dict[str, Any]]]:
    return [
        everywhere(partial(batch_size, mode="power", limit=None), stages=[2]),
        everywhere(partial(batch_size, mode="binsearch", limit=None, method="validate"), stages=[2]),
    ]


def by_callback(make: Make, layer: int) -> dict[str, Any]:
    """Doubles the size until memory runs out, and trains with what it found."""
    model, finder = Tuned(limit=20, layer=layer), BatchSizeFinder("power", steps_per_trial=2, init_val=4)
    trainer = make(max_epochs=1, callbacks=[finder], limit_train_batches=3, limit_val_batches=1)
    error = None
    try:
        trainer.fit(model)
    except RuntimeError as raised:
        error = str(raised)
    return {"size": finder.optimal_batch_size, "losses": model.losses, "state": state_of(model), "error": error}


def within_memory() -> list[list[dict[str, Any]]]:
    options = {"stages": [2], "microbatches": 1}
    trained = everywhere(partial(by_callback, layer=1), **options)
    return [trained, everywhere(partial(batch_size, mode="binsearch", limit=20, layer=4), **options)]


def everything() -> list[Any]:
    return [learning_rates(), batch_sizes(), within_memory()]


@pytest.fixture(scope="module")
def found() -> Any:
    return run(everything, timeout_seconds=170)


@pytest.mark.slow
def test_learning_rate(found: Any) -> None:
    """By the tuner, and by a callback that has the training go on with what it found."""
    single, pipeline = found[0]
    alike(pipeline, single)
    assert len(single["results"]["loss"]) == 30
    assert single["lr"] == single["suggestion"] != 0.01
    assert single["by callback"]["start"][2] == 0
    assert len(single["by callback"]["results"]["loss"]) == 21  # it stopped, as the loss had grown too much
    assert single["by callback"]["suggestion"] > 0.1


@pytest.mark.slow
def test_batch_size(found: Any) -> None:
    (power, doubled), (search, searched) = found[1]
    alike(doubled, power)
    alike(searched, search)
    assert power["size"] == power["model"] == 16
    assert len(power["losses"]) == 3 * 2
    assert search["size"] == search["model"] == 15


@pytest.mark.slow
def test_batch_size_where_memory_runs_out_on_a_worker(found: Any) -> None:
    (single, pipeline), _ = found[2]
    alike(pipeline, single)
    assert single["size"] == 16 and len(single["losses"]) == 2 * 3 + 3 and single["error"] is None


@pytest.mark.slow
def test_batch_size_where_memory_runs_out_on_the_driver(found: Any) -> None:
    _, (single, pipeline) = found[2]
    alike(pipeline, single)
    assert single["size"] == 19 and len(single["losses"]) == 2 * 4
