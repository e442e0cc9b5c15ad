"""The pipeline trains what one process trains: losses, parameters, optimizer state, checkpoint."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pipeline_job
import pytest
import torch
from harness import run
from paths import ROOT
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import SingleDeviceStrategy

from strategies import RPCSequentialStrategy

Outcome = dict[str, Any]


NUM_STEPS = 8
"""Steps of an epoch of five batches, of which the last is smaller, and of a second epoch."""


def train_everywhere(precision: str) -> list[Outcome]:
    """The same training in one process and as pipelines of 2 and 3 stages, one after the other in one process."""
    strategies = [
        (SingleDeviceStrategy("cpu"), 1),
        (RPCSequentialStrategy(balance=[2, 4], microbatches=4), 2),
        (RPCSequentialStrategy(microbatches=4, checkpoint="always", balance="by_size"), 3),
        ("rpc_sequential", 2),  # with its defaults: 8 micro-batches, though no batch has 8 rows
    ]
    settings = {"precision": precision, "gradient_clip_val": 0.5, "max_steps": NUM_STEPS}
    return [pipeline_job.outcome(*pipeline_job.fit(*strategy, **settings)) for strategy in strategies]


@pytest.fixture(scope="module")
def in_float64() -> list[Outcome]:
    return run(train_everywhere, "64-true")


def test_losses_and_parameters_in_float64(in_float64: list[Outcome]) -> None:
    single, *pipelines = in_float64
    assert len(single["losses"]) == NUM_STEPS
    for pipeline in pipelines:
        assert pipeline["losses"] == pytest.approx(single["losses"], rel=1e-9, abs=0)
        assert pipeline["val_loss"] == pytest.approx(single["val_loss"], rel=1e-9, abs=0)
        assert pipeline["rates"] == single["rates"]
        assert pipeline["parameters"].keys() == single["parameters"].keys()
        for name, expected in single["parameters"].items():
            torch.testing.assert_close(pipeline["parameters"][name], expected, rtol=1e-9, atol=1e-9)


def test_every_parameter_was_trained(in_float64: list[Outcome]) -> None:
    before = dict(pipeline_job.small_gpt().double().named_parameters())
    for outcome in in_float64:
        for name, parameter in outcome["parameters"].items():
            assert not torch.equal(parameter, before[name]), name


def test_optimizer_state_is_back_after_fit(in_float64: list[Outcome]) -> None:
    single, *pipelines = (outcome["optimizer"] for outcome in in_float64)
    for state in pipelines:
        assert state["param_groups"] == single["param_groups"]
        assert state["state"].keys() == single["state"].keys()
        for number, expected in single["state"].items():
            for key in ("step", "exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(state["state"][number][key], expected[key], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_losses_and_parameters_in_float32() -> None:
    single, *pipelines = run(train_everywhere, "32-true")
    for pipeline in pipelines:
        assert pipeline["losses"] == pytest.approx(single["losses"], rel=1e-5, abs=0)
        assert_trained_alike(pipeline["parameters"], single["parameters"])


def assert_trained_alike(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compares parameters that AdamW trained in float32.

    Adam makes steps of about the learning rate out of the rounding of tiny gradients, hence the absolute tolerance. The
    gradient of a key's bias is nothing but rounding (softmax is blind to what is added to all of its inputs), so there
    the tolerance is a whole step. In float64 all of them agree to 1e-9.
    """
    for name, value in expected.items():
        tolerance = torch.full_like(value, 0.1 * pipeline_job.LEARNING_RATE)
        if name.endswith("query_key_value.bias"):
            tolerance[value.shape[0] // 3 : 2 * value.shape[0] // 3] = pipeline_job.LEARNING_RATE
        difference = (actual[name] - value).abs()
        assert (difference <= 1e-4 * value.abs() + tolerance).all(), (name, difference.max())


def checkpoint_of_a_pipeline(folder: str) -> Outcome:
    strategy = RPCSequentialStrategy(balance=[1, 3, 2], microbatches=4)
    callback = ModelCheckpoint(folder, filename="during", every_n_train_steps=20)
    model, trainer = pipeline_job.fit(strategy, 3, callbacks=[callback], enable_checkpointing=True)
    trainer.save_checkpoint(Path(folder) / "after.ckpt")
    trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    metrics = {**trainer.validate(model, pipeline_job.loaders()[1], verbose=False)[0]}
    # One process goes on from where three stages stopped, and so do two stages.
    single, _ = pipeline_job.fit("auto", 1, max_steps=25, ckpt_path=f"{folder}/during.ckpt")
    two_stages = RPCSequentialStrategy(balance=[4, 2], microbatches=4)
    again, _ = pipeline_job.fit(two_stages, 2, max_steps=25, ckpt_path=f"{folder}/during.ckpt")
    return {
        "trained": trained,
        "metrics": metrics,
        "val_loss": trainer.callback_metrics["val_loss"].item(),
        "single": (single.losses, dict(single.state_dict())),
        "pipeline": (again.losses, dict(again.state_dict())),
    }


LOAD_WITHOUT_STRATEGIES = """
import sys, torch
from examples.gpt import GPT, generate
model = GPT.load_from_checkpoint(sys.argv[1], map_location="cpu")
assert len(generate(model, "The ", 20)) == 24
assert not [name for name in sys.modules if name.split(".")[0] in ("strategies", "trainer")]
torch.save(model.state_dict(), sys.argv[2])
"""


@pytest.mark.slow
def test_checkpoint_is_a_standard_one(tmp_path: Path) -> None:
    made = run(checkpoint_of_a_pipeline, str(tmp_path))
    for name in ("during", "after"):
        command = [sys.executable, "-c", LOAD_WITHOUT_STRATEGIES, tmp_path / f"{name}.ckpt", tmp_path / "weights"]
        subprocess.run(command, check=True, timeout=60, cwd=ROOT)
        loaded = torch.load(tmp_path / "weights")
        assert loaded.keys() == made["trained"].keys()
        for key, value in loaded.items():
            assert torch.equal(value, made["trained"][key]), key
    checkpoint = torch.load(tmp_path / "during.ckpt", weights_only=True)
    assert len(checkpoint["optimizer_states"][0]["state"]) == len(list(pipeline_job.small_gpt().parameters()))

    (losses, single), (losses_again, pipeline) = made["single"], made["pipeline"]
    assert len(losses) == len(losses_again) == 5
    assert losses_again == pytest.approx(losses, rel=1e-5)
    assert_trained_alike(pipeline, single)
