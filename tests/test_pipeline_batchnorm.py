"""The digits example, which has BatchNorm, as a pipeline of two stages and of one: the same numbers to the last bit.

One process without micro-batches is no reference here: BatchNorm normalises by the rows that it gets together.
"""

import logging
import warnings
from typing import Any

import pytest
import torch
from harness import run
from pytorch_lightning import seed_everything

from examples.digits import DigitClassifier, Digits
from strategies import RPCSequentialStrategy
from trainer import Trainer

ROWS, NUM_STEPS = 30, 6  # 30 rows in 4 micro-batches: 8, 8, 7, 7


def train(devices: int, deferred_batch_norm: bool) -> dict[str, Any]:
    """Trains a few steps and validates, both as a pipeline."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    seed_everything(0, verbose=False)
    model, data = DigitClassifier(width=4), Digits(batch_size=ROWS)
    balance = [10] if devices == 1 else [4, 6]  # a BatchNorm on either stage
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=RPCSequentialStrategy(balance, microbatches=4, deferred_batch_norm=deferred_batch_norm),
        max_steps=NUM_STEPS,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loss = trainer.callback_metrics["train_loss"].item()
    trainer.limit_val_batches = 3
    (validated,) = trainer.validate(model, data, verbose=False)
    after = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return {"state": state, "loss": loss, "validated": validated, "after": after}


def train_everywhere() -> list[dict[str, Any]]:
    return [train(1, True), train(2, True), train(1, False)]


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = run(train_everywhere)
    return results


def test_two_stages_are_one(trained: list[dict[str, Any]]) -> None:
    one, two, _ = trained
    assert any("running_var" in name for name in one["state"])
    for kind in ("state", "after"):
        assert two[kind].keys() == one[kind].keys()
        for name, expected in one[kind].items():
            assert torch.equal(two[kind][name], expected), name
    assert two["loss"] == one["loss"]
    assert two["validated"] == one["validated"]
    assert set(one["validated"]) == {"val_loss", "val_accuracy"}


def test_statistics_are_updated_once_a_batch_or_once_a_micro_batch(trained: list[dict[str, Any]]) -> None:
    for result, updates in zip(trained, [NUM_STEPS, NUM_STEPS, 4 * NUM_STEPS], strict=True):
        counts = [t.item() for name, t in result["state"].items() if name.endswith("num_batches_tracked")]
        assert counts == [updates, updates]
        for name, tensor in result["after"].items():
            assert torch.equal(tensor, result["state"][name]), name  # validation changes nothing


def test_deferring_changes_nothing_but_the_statistics(trained: list[dict[str, Any]]) -> None:
    deferred, each = trained[0]["state"], trained[2]["state"]
    different = {name for name in deferred if not torch.equal(deferred[name], each[name])}
    assert {name.rsplit(".", 1)[1] for name in different} == {"running_mean", "running_var", "num_batches_tracked"}
