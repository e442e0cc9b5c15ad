"""A training step that catches an error of a layer goes on as in one process, wherever the layer lives."""

from functools import partial
from typing import Any

import pytest
import schedulefree
import torch
from harness import run
from parity import WIDTH, Small, batches, check, small_layers
from parity_layers import Limited
from torch import Tensor, nn


class Skips(Small):
    """Leaves out the batches that are too large for one of its layers."""

    def __init__(self, place: int) -> None:
        super().__init__()
        layers = small_layers()
        layers.insert(place, Limited(8))
        self.sequential_module = nn.Sequential(*layers)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        try:
            return super().training_step(batch, batch_idx)
        except RuntimeError as error:
            assert str(error) == "too many rows"
            self.losses.append(-1.0)
            return None


class Averaged(Skips):
    """Validates with averaged weights, directly after an error."""

    def configure_optimizers(self) -> Any:
        return schedulefree.AdamWScheduleFree(self.parameters(), lr=0.05)

    def on_train_epoch_start(self) -> None:
        self.optimizers().train()

    def on_validation_epoch_start(self) -> None:
        with pytest.raises(RuntimeError, match="too many rows"):
            self(torch.zeros(9, WIDTH))
        self.optimizers().eval()


def caught() -> list[list[float]]:
    arguments: dict[str, Any] = {"train": partial(batches, (8, 9, 7)), "strategy": {"microbatches": 1}, "max_epochs": 1}
    first = check(partial(Skips, 0), **arguments)  # stage 0 fails, on a worker
    last = check(partial(Skips, 5), stages=(2,), **arguments)  # the driver's stage fails
    return [outcome.losses for outcome in (*first, *last)]


def caught_within_an_accumulation() -> list[list[float]]:
    """The step after the error has the gradients of the batch before it, on all stages."""
    arguments: dict[str, Any] = {"train": partial(batches, (8, 9, 7, 8)), "strategy": {"microbatches": 1}}
    outcomes = check(partial(Skips, 0), **arguments, max_epochs=1, accumulate_grad_batches=2)
    return [outcome.losses for outcome in outcomes]


def test_an_error_that_is_caught_within_an_accumulation() -> None:
    for losses in run(caught_within_an_accumulation, timeout_seconds=120):
        assert [loss == -1.0 for loss in losses] == [False, True, False, False]


def caught_before_a_method() -> None:
    check(partial(Averaged, 0), stages=(2,), val=batches, strategy={"microbatches": 1}, num_sanity_val_steps=0)


def test_an_error_that_is_caught_before_a_method_of_the_optimizer() -> None:
    """Every stage computes the validation loss with averaged weights."""
    run(caught_before_a_method, timeout_seconds=120)


@pytest.mark.slow
def test_errors_that_are_caught() -> None:
    for losses in run(caught, timeout_seconds=170):
        assert [loss == -1.0 for loss in losses] == [False, True, False]
