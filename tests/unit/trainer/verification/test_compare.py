"""Limits of rounding, runs of several ranks, and leaves of nested values."""

import math
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from trainer.verification.certificate import WRONG, ReferenceRuns, certify, factor_between
from trainer.verification.compare import Finding, findings, rounding_of
from trainer.verification.logged import LoggedCall
from trainer.verification.observed_run import ObservedRun, ObservedStep, leaves, merged, with_logs_of_ranks

EXACT = rounding_of("64-true", "float64")


def observed(gradient: Any = None, value: Any = None, **others: Any) -> ObservedRun:
    """One step of one parameter ``a.weight``, beside a large gradient of ``b.weight``."""
    weight = torch.ones(3, dtype=torch.float64)
    step = ObservedStep(
        batches=1,
        gradients={"a.weight": weight if gradient is None else gradient, "b.weight": 100 * weight},
        values={"a.weight": weight if value is None else value},
        norm=1.0,
    )
    return ObservedRun("run", **{"losses": [1.0], "initial": {"a.weight": weight}, "steps": [step], **others})


def wrong(actual: ObservedRun, expected: ObservedRun, rounding: Any = EXACT) -> list[tuple[str, str]]:
    return [(each.part, each.name) for each in findings(actual, expected, rounding) if each.is_wrong]


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_rounding_is_no_difference_and_more_is() -> None:
    assert wrong(observed(), observed()) == []
    assert wrong(observed(tensor(1, 1, 1 + 1e-11)), observed()) == []
    assert wrong(observed(tensor(1, 1, 1 + 1e-8)), observed()) == [("gradients", "a.weight")]
    assert wrong(observed(value=tensor(1, 1, 1 + 1e-8)), observed()) == [("parameters", "a.weight")]


def test_a_gradient_that_is_zero_but_for_rounding_may_be_another() -> None:
    assert wrong(observed(tensor(0, 3e-16, 0)), observed(tensor(0, -1e-16, 1e-16))) == []
    assert wrong(observed(tensor(0, 3e-10, 0)), observed(tensor(0, -1e-16, 1e-16))) == [("gradients", "a.weight")]


def test_in_float32_an_optimizer_may_step_by_noise() -> None:
    single = rounding_of("32-true", "float32")
    quiet, moved = tensor(1e-9, 1e-9, 1e-9), tensor(1.1, 0.9, 1.1)
    assert wrong(observed(-quiet, tensor(0.9, 1.1, 1.1)), observed(quiet, moved), single) == []
    assert ("parameters", "a.weight") in wrong(observed(-quiet, tensor(0.9, 1.1, 1.6)), observed(quiet, moved), single)
    loud = tensor(1, 1, 1)
    assert wrong(observed(loud, tensor(0.9, 1.1, 1.1)), observed(loud, moved), single) == [("parameters", "a.weight")]


@pytest.mark.parametrize(
    "precision, narrowest, relative",
    [("64-true", "float64", 1e-9), ("64-true", "float32", 2e-5), ("32-true", "float32", 2e-3)],
)
def test_limits_by_precision(precision: str, narrowest: str, relative: float) -> None:
    assert rounding_of(precision, narrowest).relative == relative
    assert relative < rounding_of("bf16-mixed", "bfloat16").relative <= 0.2


def test_what_micro_batches_make_of_rounding_is_the_limit_where_parts_are_in_float32() -> None:
    mixed = rounding_of("64-true", "float32")
    assert mixed.measured(0.0).relative == pytest.approx(1e-9)
    assert mixed.measured(1e-5).relative == pytest.approx(1e-2 * mixed.relative)
    assert mixed.measured(0.1).relative == mixed.relative
    assert EXACT.measured(0.0) == EXACT


@pytest.mark.parametrize("narrowest, safety", [("bfloat16", 4), ("float16", 4), ("float32", 100)])
def test_limits_in_less_than_float64_are_a_multiple_of_what_micro_batches_change(narrowest: str, safety: int) -> None:
    largest = rounding_of("", narrowest)
    measured = largest.measured(0.1 / safety)
    assert measured.relative == pytest.approx(0.1 * largest.relative) and measured.is_measured
    assert measured.noise == pytest.approx(0.1 * largest.noise)
    assert largest.measured(0.0).relative == pytest.approx(largest.least * largest.relative)
    assert largest.measured(1.0).relative == largest.relative


def test_steps_in_which_rounding_was_not_measured_have_the_largest_limits() -> None:
    largest = replace(rounding_of("bf16-true", "bfloat16"), noise=0.0)
    measured, near = largest.measured(0.0, steps=1), tensor(1, 1, 1 + 0.5 * largest.relative)

    def steps(*gradients: Tensor) -> ObservedRun:
        return observed(
            steps=[replace(observed(each).steps[0], batches=i + 1) for i, each in enumerate(gradients)],
            losses=[1.0] * len(gradients),
        )

    ones = tensor(1, 1, 1)
    for of_step, found in ((0, [("gradients", "a.weight")]), (1, [])):
        actual = steps(*(near if i == of_step else ones for i in range(2)))
        assert wrong(actual, steps(ones, ones), measured) == found
    assert wrong(steps(ones, 2 * ones), steps(ones, ones), measured) == [("gradients", "a.weight")]


def test_what_differs_only_after_the_steps_of_the_run_with_micro_batches_has_an_origin() -> None:
    ones = tensor(1, 1, 1)
    first = observed().steps[0]
    second, wrong_second = (replace(observed(each).steps[0], batches=2) for each in (ones, 2 * ones))
    one = observed(steps=[first, second], losses=[1.0, 1.0], stopped_after=2)
    micro = observed(steps=[first], stopped_after=1)
    actual = observed(steps=[first, wrong_second], losses=[1.0, 1.0], stopped_after=2)
    result = certify(actual, ReferenceRuns(one, micro), EXACT, is_whole_loss=False)
    assert result.verdict == WRONG and result.origin is not None
    assert (result.origin.step, result.origin.part, result.origin.layer) == (1, "gradients", "a")


@pytest.mark.parametrize("missing", [tensor(1, 1), tensor(1, 1, math.nan), tensor(1, math.inf, 1)])
def test_another_shape_and_what_is_no_number_is_wrong(missing: Tensor) -> None:
    assert wrong(observed(missing), observed()) == [("gradients", "a.weight")]


def test_what_is_missing_or_too_much_is_wrong() -> None:
    more = observed(validation={"val_loss": 1.0})
    assert wrong(more, observed()) == wrong(observed(), more) == [("validation", "val_loss")]
    assert wrong(observed(checkpoint={"epoch": 1}), observed(checkpoint={"epoch": 2})) == [("checkpoint", "epoch")]
    assert wrong(ObservedRun("none"), observed())[0] == ("initial values", "a.weight")
    fewer = observed()
    fewer.steps = []
    assert ("losses", "number of steps") in wrong(fewer, observed())


class Plain:
    def __init__(self, number: int) -> None:
        self.number, self.tensor, self.array, self.own = number, tensor(number), numpy.array([number]), self


@pytest.mark.parametrize("wrapped", [lambda n: [n], lambda n: [numpy.array([n])], lambda n: [tensor(n)]])
def test_objects_are_compared_by_what_they_hold(wrapped: Any) -> None:
    one, other, more = (observed(checkpoint=leaves({"object": Plain(n), "more": wrapped(n)})) for n in (1, 1, 2))
    assert wrong(one, other) == []
    parts = ["object.number", "object.tensor", "object.array", "more.0"]
    assert wrong(one, more) == [("checkpoint", part) for part in parts]


def test_a_loss_too_many_is_wrong() -> None:
    assert wrong(observed(losses=[1.0, 1.0]), observed()) == [("losses", "number of losses")]


@pytest.mark.parametrize("batches_of_steps", [(), (1,), (2,), (1, 1)])  # two optimizers may step in one batch
def test_losses_and_logged_values_of_all_batches_are_compared(batches_of_steps: tuple[int, ...]) -> None:
    def run(losses: list[float]) -> ObservedRun:
        steps = [replace(observed().steps[0], batches=number) for number in batches_of_steps]
        return observed(steps=steps, losses=losses, logged=[{"doubled": 2 * loss} for loss in losses])

    one = run([1.0, 2.0, 3.0])
    assert len([each for each in findings(one, one, EXACT) if each.part == "losses"]) == 3
    for batch in range(3):
        other = run([loss + (i == batch) for i, loss in enumerate(one.losses)])
        assert sorted(wrong(other, one)) == [("logged values", "doubled"), ("losses", f"batch {batch}")]


def test_a_batch_belongs_to_the_step_that_follows_it() -> None:
    steps = [replace(observed().steps[0], batches=number) for number in (3, 6)]
    one = observed(steps=steps, losses=[1.0] * 8)
    of_step = [each.step for each in findings(one, one, EXACT) if each.part == "losses"]
    assert of_step == [0, 0, 0, 1, 1, 1, None, None]
    assert len(one.first(1).losses) == 3


def test_hyperparameters_are_compared_in_units_of_their_size() -> None:
    ours, theirs = observed(), observed()
    ours.steps[0].hyperparameters, theirs.steps[0].hyperparameters = {"0.0.lr": 1.1e-3}, {"0.0.lr": 1e-3}
    assert wrong(ours, theirs, rounding_of("bf16-true", "bfloat16").measured(0.0)) == [("hyperparameters", "0.0.lr")]


def test_integers_are_compared_exactly() -> None:
    ours, theirs = (observed(validation={"count": torch.tensor([count])}) for count in (1_000_000, 1_000_001))
    assert wrong(ours, theirs) == [("validation", "count")]


@pytest.mark.parametrize("precision, narrowest", [("64-true", "float64"), ("bf16-true", "bfloat16")])
@pytest.mark.parametrize(
    "part, name, value, lost",
    [
        ("checkpoint", "state_dict.a.weight", 0.05, 0.0),
        ("checkpoint", "optimizer_states.0.state.0.exp_avg_sq", 1e-12, 0.0),
        ("checkpoint", "optimizer_states.0.param_groups.0.lr", 1e-3, 2e-3),
        ("checkpoint", "averages.a.weight", 0.05, 0.0),
        ("checkpoint", "of_a_hook.center", 0.05, 0.0),
        ("validation", "output", 0.05, 0.0),
        ("predictions", "0", 0.05, 0.0),
    ],
)
def test_small_values_that_are_lost_are_found(
    part: str, name: str, value: float, lost: float, precision: str, narrowest: str
) -> None:
    rounding, kind = rounding_of(precision, narrowest), getattr(torch, narrowest)

    def run(number: float) -> ObservedRun:
        found = number if name.endswith("lr") else torch.full((3,), number, dtype=kind)
        return observed(tensor(100, 100, 100), **{part: {name: found}})  # no noise, which may move weights

    assert wrong(run(value), run(value), rounding) == []
    assert wrong(run(lost), run(value), rounding) == [("predict" if part == "predictions" else part, name)]


def test_weights_of_a_checkpoint_have_the_limits_of_the_weights_after_the_step() -> None:
    single = rounding_of("32-true", "float32")
    quiet, moved = tensor(1e-9, 1e-9, 1e-9), tensor(1.1, 0.9, 1.1)

    def run(gradient: Tensor, value: Tensor) -> ObservedRun:
        return observed(gradient, value, checkpoint={"state_dict.a.weight": value})

    assert wrong(run(-quiet, tensor(0.9, 1.1, 1.1)), run(quiet, moved), single) == []
    assert ("checkpoint", "state_dict.a.weight") in wrong(run(-quiet, tensor(0.9, 1.1, 1.6)), run(quiet, moved), single)


def test_weights_that_a_hook_casts_for_the_checkpoint_may_differ_by_a_spacing() -> None:
    one, near, far = (
        observed(checkpoint={"state_dict.a.weight": torch.tensor([value], dtype=torch.bfloat16)})
        for value in (1.0, 1.0 + 2**-7, 1.0 + 2**-4)
    )
    assert wrong(near, one) == []
    assert wrong(far, one) == [("checkpoint", "state_dict.a.weight")]


def test_a_value_that_is_not_compared_is_left_out_for_every_loader_of_the_validation() -> None:
    names = ("rows", "rows/dataloader_idx_0", "rows/dataloader_idx_1")
    one, other = (observed(validation=dict.fromkeys(names, rows), left_out=["rows"]) for rows in (1.0, 2.0))
    assert wrong(other, one) == []


def test_runs_of_ranks_become_one() -> None:
    ranks = [observed(losses=[0.0, 2.0]), observed(losses=[1.0, 3.0])]
    ranks[0].steps[0].gradients = {"a": None, "b": tensor(1.0)}
    ranks[1].steps[0].gradients = {"a": tensor(2.0), "b": None}
    whole = merged(ranks)
    assert whole.losses == [0.0, 1.0, 2.0, 3.0]
    assert whole.steps[0].batches == 2
    assert {name: float(value) for name, value in whole.steps[0].gradients.items() if value is not None} == {
        "a": 2.0,
        "b": 1.0,
    }
    assert ranks[0].steps[0].gradients["a"] is None


def test_a_logged_value_of_a_rank_is_compared_with_what_it_must_be() -> None:
    calls = [[LoggedCall("loss", value, is_synchronised=True)] for value in (1.0, 3.0)]
    one = with_logs_of_ranks(observed(losses=[1.0, 3.0], calls=calls, logged=[{"other": 1.0}, {"other": 1.0}]), 2)
    assert [values["loss"] for values in one.logged] == [2, 2]
    ranks = [observed(losses=[loss], logged=[{"loss": 2.0, "rate": 1.0}]) for loss in (1.0, 3.0)]
    for each in ranks:
        each.logged_of_epoch = [{"loss": 2.0}]
    assert wrong(merged(ranks), one) == []
    ranks[1].logged[0]["loss"] = 3.0  # not reduced
    assert wrong(merged(ranks), one) == [("logged values", "loss")]
    ranks[1].logged[0].pop("loss")
    assert wrong(merged(ranks), one) == [("logged values", "loss")]


def test_leaves() -> None:
    found = leaves({"a": [torch.ones(1), {"b": 2}], "c": "text", "d": ()})
    assert list(found) == ["a.0", "a.1.b", "c"]
    assert found["a.1.b"] == 2


def test_factor_between() -> None:
    one = torch.randn(4, 3)
    assert factor_between(0.5 * one, one) == pytest.approx(0.5)
    assert factor_between(torch.randn(4, 3), one) is None
    assert factor_between(one, torch.zeros(4, 3)) is None
    assert factor_between(one[0], one) is None


def test_a_finding_that_is_not_a_number_is_wrong() -> None:
    assert Finding(0, "losses", "batch 0", math.nan, math.nan, 1.0, math.nan, 1.0).is_wrong


def test_a_logged_value_in_float32_may_differ_by_spacings_of_float32() -> None:
    values = [torch.tensor(1.0 + difference, dtype=torch.float32) for difference in (0.0, 1e-6, 1e-4)]
    expected, near, far = (observed(logged=[{"metric": value}]) for value in values)
    assert wrong(near, expected) == []
    assert wrong(far, expected) == [("logged values", "metric")]
