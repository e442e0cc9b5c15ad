"""``trainer.verify`` of models with dropout: three times the steps suffice, and planted faults are still found."""

from collections.abc import Sequence
from typing import Any

import pytest
from harness import run
from torch.nn.utils import clip_grad_norm_
from verified_nets import FAULTS, VerifiedData, VerifiedNet
from verifying import verified

from strategies import RPCSequentialStrategy
from trainer.verification.certificate import DOCUMENTED, WRONG
from trainer.verification.runner import steps_of_random_layers

pytestmark = pytest.mark.timeout(300)

STEPS: list[int] = []
"""The batch of every step that is made in this process."""


class Counted(VerifiedNet):
    """Notes every step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        STEPS.append(batch_idx)


def counted(cases: Sequence[tuple[str, dict[str, Any]]]) -> list[tuple[dict[str, Any], int]]:
    """Verifies models; returns the certificate of each, and the number of steps of all runs together."""
    found = []
    for extra, arguments in cases:
        STEPS.clear()
        strategy = RPCSequentialStrategy([4, 3], microbatches=3, schedule="1f1b")
        found.append((verified(Counted(extra), VerifiedData(), strategy, **arguments), len(STEPS)))
    return found


@pytest.mark.slow
def test_all_runs_together_make_at_most_three_times_the_steps() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("dropout", {}),
        ("dropout", {"precision": "bf16-mixed"}),  # rounding is measured too
        ("dropout", {"steps": 5}),
        ("dropout and batch norm", {}),
        ("batch norm", {"precision": "bf16-mixed"}),
    ]
    for (extra, arguments), (found, made) in zip(cases, run(counted, cases, timeout_seconds=280), strict=True):
        steps = arguments.get("steps", 3)
        assert found["verdict"] == DOCUMENTED
        assert made == sum(found["facts"]["steps of runs"]) <= 3 * steps
        if extra.startswith("dropout"):
            assert found["steps"] == (2 if steps == 3 else 5)
            assert "over 2 steps" in "".join(found["notes"])


def test_the_steps_of_runs_with_and_without_dropout() -> None:
    assert [steps_of_random_layers(steps) for steps in range(1, 8)] == [
        *((1, 1), (2, 1), (2, 2), (3, 2), (5, 2), (6, 2), (7, 2))
    ]
    assert all(2 * sum(steps_of_random_layers(steps)) + 1 <= 3 * steps for steps in range(3, 50))


# Planted faults: in the strategy of the user alone, or in that with one stage too, as a fault of the engine is


class OfUser(RPCSequentialStrategy):
    """The strategy that is verified; its reference is a plain ``RPCSequentialStrategy`` with one stage."""


def planted(names: Sequence[str]) -> dict[tuple[str, bool], Any]:
    """Plants faults into training with dropout; returns certificates by fault and whether every strategy has it."""
    setup, clip = RPCSequentialStrategy.setup, RPCSequentialStrategy.clip_grad_norm_
    now: list[Any] = []

    def with_fault(self: Any, trainer: Any) -> None:
        setup(self, trainer)
        name, is_of_all = now
        if trainer.state.fn == "fit" and (is_of_all or type(self) is OfUser):
            FAULTS[name].plant(self, trainer, trainer.lightning_module)

    def clip_some(self: Any, max_norm: float, norm_type: float = 2.0, *, optimizer: Any = None) -> Any:
        if (choose := getattr(self, "of_norm", None)) is None:
            return clip(self, max_norm, norm_type, optimizer=optimizer)
        own = [p for group in optimizer.param_groups for p in group["params"]]
        return clip_grad_norm_(choose(own), max_norm, norm_type)

    vars_of: Any = RPCSequentialStrategy
    vars_of.setup, vars_of.clip_grad_norm_ = with_fault, clip_some
    extras = {"none": "dropout", "counting": "dropout and counting", "batch norm": "dropout and batch norm"}
    found = {}
    for name in names:
        for is_of_all in (False, True):
            now[:] = [name, is_of_all]
            model = VerifiedNet(extras[FAULTS[name].extra], FAULTS[name].optimizer)
            found[name, is_of_all] = verified(model, VerifiedData(), OfUser(microbatches=3), devices=1)
    return found


LATE = (
    "hyperparameters one step late",
    "optimizer state lost",
    "stale copy of a tied weight",
    "checkpoint lacks a key",
)
PER_CALL = ("gradient of the step before", "gradients not cleared")
"""With a hook that runs per micro-batch, so these start in the first step here."""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(LATE, marks=pytest.mark.slow),
        *(pytest.param(tuple(FAULTS)[part::4], marks=pytest.mark.nightly) for part in range(4)),
    ],
)
def test_planted_faults_are_found_under_dropout(names: Sequence[str]) -> None:
    found = run(planted, names, timeout_seconds=280)
    assert len(found) == 2 * len(names)
    for (name, is_of_all), each in found.items():
        fault, origin = FAULTS[name], each["origin"]
        assert each["verdict"] == WRONG, (name, is_of_all)
        step = 0 if name in PER_CALL else fault.step
        assert (origin["part"], origin["layer"], origin["step"]) == (fault.part, fault.layer, step), (name, is_of_all)
        assert ("one process" in each["reference"]) == is_of_all  # which alone shows faults of both strategies
