"""Dropout masks depend on step, micro-batch and layer only: not on the stages, on recomputing, or on an interruption.

The reference is a pipeline of one stage, which runs the same operations on the same micro-batches: everything is equal
to the last bit.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run
from parity import WIDTH, Outcome, Small, batches, compare, fit
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.functional import dropout, mse_loss
from torch.utils.checkpoint import checkpoint

from strategies import RPCSequentialStrategy
from strategies.common.random_seeds import Seeds

NUM_LAYERS, MICROBATCHES, EPOCHS = 6, 3, 3
SIZES = (8, 7, 2)
"""Numbers of rows: 3, 3 and 2 micro-batches."""


class Draws(nn.Module):
    """Drops some of its outputs, and tells which: ``[rows, WIDTH + n]`` to ``[rows, WIDTH + n + WIDTH]``.

    The last columns are the mask of this layer, those before them the masks of layers before it.
    """

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        given, masks = x[:, :WIDTH], x[:, WIDTH:]
        y = checkpoint(self.drop, given, use_reentrant=False) if self.checkpointed else self.drop(given)
        return torch.cat([y[:, :WIDTH], masks, y[:, WIDTH:]], 1)

    def drop(self, x: Tensor) -> Tensor:
        mask = dropout(torch.ones_like(x), 0.4, self.training)
        return torch.cat([self.linear(x) * mask, mask], 1)


class Dropped(Small):
    """Dropout in every layer, of which one recomputes itself; notes the masks of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(*[Draws(checkpointed=k == 3) for k in range(NUM_LAYERS)])
        self.masks: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        out = self(batch[0])
        self.masks.append(out[:, WIDTH:].detach())
        loss = mse_loss(out[:, :2], batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        out = self(batch[0])
        assert bool((out[:, WIDTH:] == 1).all())
        self.log("val_loss", mse_loss(out[:, :2], batch[1]), batch_size=len(batch[0]))


def data() -> Any:
    return batches(SIZES)


def train(stages: int, mode: str, epochs: int = EPOCHS, **arguments: Any) -> Outcome:
    """Trains a pipeline in float32, which Lightning loads a checkpoint in."""
    strategy = RPCSequentialStrategy([NUM_LAYERS // stages] * stages, microbatches=MICROBATCHES, checkpoint=mode)
    settings = {"train": data, "val": data, "precision": "32-true", "max_epochs": epochs, **arguments}
    return fit(Dropped, strategy, stages, **settings)


Result = tuple[list[Tensor], list[float], dict[str, Tensor], float]


def result(outcome: Outcome) -> Result:
    return outcome.model.masks, outcome.losses, outcome.parameters, outcome.metrics["val_loss"]


def trainings(folder: str) -> dict[str, Any]:
    """By what is special about it, what a training came to. Validating more often is to change nothing."""
    saving = ModelCheckpoint(folder, filename="{step}", save_on_train_epoch_end=True, save_top_k=-1)
    made = {
        "one stage": train(1, "never"),
        "one stage, recomputed": train(1, "always", val_check_interval=1),
        "two stages": train(2, "except_last", callbacks=[saving], enable_checkpointing=True),
        "three stages, recomputed": train(3, "always"),
    }
    torch.manual_seed(99)  # what is resumed goes on with the checkpoint's seeds
    first, second = (str(Path(folder) / f"step={step}.ckpt") for step in (3, 6))
    made["resumed on one stage"] = train(1, "always", ckpt_path=first, val_check_interval=1)
    made["resumed on three stages"] = train(3, "never", ckpt_path=second, val_check_interval=1)
    results = {name: result(outcome) for name, outcome in made.items()}
    single = fit(Dropped, "auto", 1, train=data, precision="32-true", max_epochs=4, ckpt_path=second)
    return {**results, "steps of one process, resumed": len(single.losses)}  # which ignores the key of ours


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    made: dict[str, Any] = run(trainings, str(tmp_path_factory.mktemp("checkpoints")), timeout_seconds=200)
    return made


def assert_equal(actual: Result, expected: Result, done_before: int = 0) -> None:
    masks, losses, parameters, val_loss = actual
    assert len(masks) == len(losses) == EPOCHS * len(SIZES) - done_before
    for step, (ours, theirs) in enumerate(zip(masks, expected[0][done_before:], strict=True)):
        assert torch.equal(ours, theirs), step
    assert losses == expected[1][done_before:]
    assert val_loss == expected[3]
    for name, parameter in expected[2].items():
        assert torch.equal(parameters[name], parameter), name


@pytest.mark.parametrize("which", ["one stage, recomputed", "two stages", "three stages, recomputed"])
def test_masks_are_the_same_for_any_number_of_stages_and_if_recomputed(trained: dict[str, Any], which: str) -> None:
    assert_equal(trained[which], trained["one stage"])


@pytest.mark.parametrize(("which", "done_before"), [("resumed on one stage", 3), ("resumed on three stages", 6)])
def test_resumed_runs_draw_what_would_have_come_next(trained: dict[str, Any], which: str, done_before: int) -> None:
    assert_equal(trained[which], trained["one stage"], done_before)


def test_plain_lightning_resumes_from_the_same_checkpoint(trained: dict[str, Any]) -> None:
    assert trained["steps of one process, resumed"] == (4 - 2) * len(SIZES)


def test_masks_differ_between_steps_micro_batches_and_layers(trained: dict[str, Any]) -> None:
    """Those of micro-batches of fewer rows have so few numbers that two may be equal by chance."""
    seen = []
    for masks in trained["one stage"][0]:
        assert bool(((masks == 0) | (masks > 1)).all())
        parts = masks.tensor_split(min(MICROBATCHES, len(masks)))
        seen += [tuple(mask.flatten().tolist()) for part in parts for mask in part.split(WIDTH, 1) if len(part) == 3]
    assert len(seen) == len(set(seen)) == EPOCHS * (2 + 1) * NUM_LAYERS


def twice() -> list[Tensor]:
    """The masks of two calls of ``fit``; the strategy is the same."""
    first = train(1, "always", epochs=1)
    trainer, model = first.trainer, first.model
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, data())
    return model.masks


def test_a_second_fit_goes_on(trained: dict[str, Any]) -> None:
    masks = run(twice)
    assert len(masks) == 2 * len(SIZES)
    for ours, expected in zip(masks, trained["one stage"][0], strict=False):
        assert torch.equal(ours, expected)


def test_seeds() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    seeds = Seeds.ahead_of_the_process()
    assert torch.equal(torch.get_rng_state(), state)
    drawn = [seeds.next(training) for training in (True, True, False, True)]
    assert len(set(drawn)) == 4 and all(0 <= seed < 2**63 for seed in drawn)
    again = Seeds.ahead_of_the_process()
    assert [again.next(True) for _ in range(3)] == [drawn[0], drawn[1], drawn[3]]  # others do not count
    resumed = Seeds(0)
    resumed.load_state_dict(seeds.state_dict())
    assert resumed.next(True) == again.next(True) and resumed.next(False) == seeds.next(False)
    torch.rand(1)
    assert Seeds.ahead_of_the_process().next(True) != drawn[0]


class Skips(nn.Linear):
    """Is left out half of the time, as Python's generator has it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if random.random() < 0.5 else x


class LayerDrop(Small):
    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(*[Skips(WIDTH, WIDTH) for _ in range(5)], nn.Linear(WIDTH, 2))


def layer_drop() -> None:
    one, three = (
        fit(LayerDrop, RPCSequentialStrategy(balance, microbatches=3, checkpoint=mode), len(balance))
        for balance, mode in (([6], "never"), ([2, 2, 2], "always"))
    )
    compare(three, one, 0.0)


@pytest.mark.slow
def test_pythons_random_numbers() -> None:
    run(layer_drop)
