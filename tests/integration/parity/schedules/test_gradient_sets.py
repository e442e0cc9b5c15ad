"""Schedules that run ``training_step`` per micro-batch hold one set of gradients, or two where that could be seen."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from harness import run
from parity import Outcome, Small, batches, compare, fit, on_cpus, one_device
from parity_layers import NotesMemory
from parity_parts import assert_same_gradients, gradients
from procfs import MEBI
from pytorch_lightning.callbacks import LambdaCallback
from torch import Tensor, nn

from strategies import RPCSequentialStrategy
from strategies.lightning.features.per_microbatch import num_gradient_sets
from strategies.pipeline.partition.memory import Sizes

WIDE = 2944
"""A weight has 33 MiB: blocks of more than 32 MiB go back to the kernel at once."""


class Wide(Small):
    def __init__(self) -> None:
        super().__init__()
        narrow = nn.Linear(6, WIDE, bias=False)
        inner = [nn.Linear(WIDE, WIDE, bias=False) for _ in range(2)]
        self.sequential_module = nn.Sequential(narrow, NotesMemory(), *inner, nn.Linear(WIDE, 2))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-9)


def gradient_memory(schedule: str, **arguments: Any) -> tuple[int, int]:
    """Return what the worker held in its last backward pass, and the bytes of gradients that are counted for it."""
    strategy = RPCSequentialStrategy([4, 1], microbatches=2, checkpoint="never", schedule=schedule)
    train = partial(batches, (4,) * 4)
    outcome = fit(Wide, strategy, 2, train=train, precision="32-true", max_epochs=1, **arguments)
    trainer, model = outcome.trainer, outcome.model
    number = num_gradient_sets(trainer, model, trainer.optimizers) if schedule != "gpipe" else 1
    need = Sizes(trainer.optimizers, gradient_sets=number).need(model.sequential_module[:4].modules())
    return int(model.sequential_module[1].noted), need.gradients


def before_zero_grad(*_: Any) -> None:
    """Look at gradients, perhaps."""


def gradient_memory_by_schedule() -> list[tuple[int, int]]:
    callbacks = [LambdaCallback(on_before_zero_grad=before_zero_grad)]
    return [
        gradient_memory("gpipe"),
        gradient_memory("1f1b"),
        gradient_memory("1f1b", accumulate_grad_batches=2),
        gradient_memory("1f1b", callbacks=callbacks),
    ]


@on_cpus
def test_counted_sets_of_gradients_are_the_memory_of_gradients() -> None:
    (at_once, one), *others = run(gradient_memory_by_schedule, timeout_seconds=120)
    print([(f"{bytes_ / MEBI:.1f} MiB", f"{counted / MEBI:.1f} MiB") for bytes_, counted in [(at_once, one), *others]])
    assert [counted / one for _, counted in others] == [1, 2, 2]
    for bytes_, counted in others:
        assert bytes_ - at_once == pytest.approx(counted - one, abs=one / 8)


# What hooks see


class NotesGradients(Small):
    """Keeps gradients where users can look at them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Tensor | None]] = []

    def see(self, *_: Any) -> None:
        self.seen.append(gradients(self))

    on_train_batch_start = on_before_backward = on_after_backward = on_train_batch_end = on_train_end = see

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 2 else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters()][1:], lr=0.05)  # the first one's gradient is never cleared


class NotesGradientsBeforeZero(NotesGradients):
    on_before_zero_grad = NotesGradients.see


def assert_same(pipeline: Outcome, single: Outcome) -> None:
    compare(replace(pipeline, losses=single.losses), single)
    assert_same_gradients(pipeline.model.seen, single.model.seen)


def compare_noted_gradients() -> None:
    for model, settings in (
        (NotesGradients, {}),
        (NotesGradientsBeforeZero, {}),
        (NotesGradients, {"accumulate_grad_batches": 2}),
    ):
        single = fit(model, one_device(), 1, **settings)
        strategy = RPCSequentialStrategy([3, 3], microbatches=3, schedule="1f1b")
        assert_same(fit(model, strategy, 2, **settings), single)


def test_hooks_see_the_gradients_of_one_process() -> None:
    run(compare_noted_gradients, timeout_seconds=120)
