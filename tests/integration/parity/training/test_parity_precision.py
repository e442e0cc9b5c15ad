"""Every precision and numeric setting reaches the layers on workers, in forward and backward passes.

One process that is fed the same micro-batches comes to the same numbers to the last bit, also where they have 8 bits:
autograd adds up their gradients from the last to the first, as a pipeline does. Layers on every stage write down what
they see of the settings.
"""

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from harness import run
from parity import Outcome, accelerator, batches, compare, fit, one_device
from parity_precision import MICROBATCHES, NUM_LAYERS, SIZES, InParts, Model

from strategies import RPCSequentialStrategy


def data() -> Any:
    return batches(SIZES)


def train(strategy: Any, stages: int, make: type[Model], validates: bool, **arguments: Any) -> Outcome:
    outcome = fit(make, strategy, stages, train=data, val=data, **arguments)
    if validates:
        (validated,) = outcome.trainer.validate(outcome.model, data(), verbose=False)
        outcome.metrics["validated"] = validated["val_loss"]
    return outcome


Seen = list[dict[str, list[dict[str, Any]]]]


def compared(matmul: str, stages: Sequence[int] = (1, 2, 3), *, validates: bool = False, **arguments: Any) -> Seen:
    """Trains in one process and in pipelines; returns what each layer saw in all of them."""
    torch.set_float32_matmul_precision(matmul)
    single = train(one_device(), 1, InParts, validates, **arguments)
    if accelerator() == "cpu":  # in bfloat16, two of them are equal on a GPU
        assert len(set(single.losses)) == 2 * len(SIZES)
    for number in stages:
        strategy = RPCSequentialStrategy([NUM_LAYERS // number] * number, microbatches=MICROBATCHES)
        pipeline = train(strategy, number, Model, validates, **arguments)
        compare(pipeline, single, tolerance=0)
        for name, parameter in single.parameters.items():
            assert pipeline.parameters[name].dtype == parameter.dtype, name
        processes = [layer.process for layer in pipeline.model.sequential_module]
        assert len(set(processes)) == number and os.getpid() not in processes  # none is noted for the driver
        assert pipeline.model.seen == single.model.seen
    return single.model.seen


def everything() -> dict[str, Seen]:
    return {
        "bf16-mixed": compared("medium", precision="bf16-mixed", deterministic=True),
        "bf16-true": compared("high", precision="bf16-true", deterministic="warn"),
        # most other parity tests are in float64, for two and three stages
        "64-true": compared("highest", (1, 2), precision="64-true", deterministic=False, validates=True),
    }


@pytest.fixture(scope="module")
def seen() -> dict[str, Seen]:
    made: dict[str, Seen] = run(everything, timeout_seconds=200, allow=["env"])  # Lightning sets a variable for CUDA
    return made


def assert_seen(
    seen: Seen, settings: dict[str, Any], forward: dict[str, Any], backward: dict[str, Any], *evaluation: dict[str, Any]
) -> None:
    """The same each time, also if it is recomputed; what a first layer gets may have a type of its own."""
    for layer in seen[1:]:
        assert layer["forward"] == [{**settings, "inference": False, **forward}]
        assert layer["backward"] == [{**settings, "inference": False, **backward}]
        assert layer["evaluation"] == [{**settings, **forward, "grad": False, **each} for each in evaluation]


FLOAT, HALF, DOUBLE = torch.float32, torch.bfloat16, torch.float64


@pytest.mark.slow
def test_bf16_mixed_and_deterministic(seen: dict[str, Seen]) -> None:
    settings = {"matmul": "medium", "deterministic": True, "only warns": False, "default dtype": FLOAT}
    forward = {"autocast": HALF, "dtypes": [HALF, HALF, FLOAT, FLOAT]}
    backward = {"autocast": None, "dtypes": [HALF]}
    assert_seen(seen["bf16-mixed"], settings, forward, backward, {"inference": False})


@pytest.mark.slow
def test_bf16_true_and_deterministic_with_warnings(seen: dict[str, Seen]) -> None:
    settings = {"matmul": "high", "deterministic": True, "only warns": True, "autocast": None}
    forward = {"default dtype": HALF, "dtypes": [HALF] * 4}
    backward = {"default dtype": FLOAT, "dtypes": [HALF]}
    assert_seen(seen["bf16-true"], settings, forward, backward, {"inference": False})


@pytest.mark.slow
def test_64_true_and_inference_mode(seen: dict[str, Seen]) -> None:
    """Lightning validates in inference mode, but not within ``fit``."""
    settings = {"matmul": "highest", "deterministic": False, "only warns": False, "autocast": None}
    forward = {"default dtype": DOUBLE, "dtypes": [DOUBLE] * 4}
    backward = {"default dtype": FLOAT, "dtypes": [DOUBLE]}
    assert_seen(seen["64-true"], settings, forward, backward, {"inference": False}, {"inference": True})
