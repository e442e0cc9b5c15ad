"""The drawing of classes of public packages: a seed is a drawing, and every failure names package, class and seed."""

import re
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
import torch
import transformers

from strategies import RPCSequentialStrategy
from strategies.commands.failure import Failure
from strategies.common.names import did_you_mean
from tests.drawing import tiny
from tests.drawing.draw import TRANSFORMERS, draw, named
from tests.drawing.judgement import (
    EQUAL,
    FAILED,
    NOT_BUILT,
    REFUSED,
    Case,
    Finding,
    Verdict,
    in_words,
    kind_of,
    markdown,
    shortcomings,
)

CASE = Case(TRANSFORMERS, "LlamaForCausalLM", 7)
NAMED = f"transformers {version('transformers')}, LlamaForCausalLM, seed 7"


def test_a_seed_is_a_drawing_of_families_that_declare_what_must_not_be_split() -> None:
    cases = draw(TRANSFORMERS, 7, 8)
    assert cases[:3] == draw(TRANSFORMERS, 7, 3)
    assert cases != draw(TRANSFORMERS, 8, 8)
    assert len({case.name for case in cases}) == 8
    assert all(getattr(transformers, case.name)._no_split_modules for case in cases)
    assert named("LlamaForCausalLM", 7) == CASE


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "DeepseekV3ForCausalLM", "ViTForImageClassification"])
def test_a_tiny_model_is_built_from_the_configuration_of_a_class(name: str) -> None:
    kind = getattr(transformers, name)
    model = kind(tiny.configuration(kind.config_class))
    assert sum(parameter.numel() for parameter in model.parameters()) < 500_000
    assert model(**tiny.batch(model, 3, 9)).logits.shape[0] == 3


def raised(function: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:
        function()
    return caught.value


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda: RPCSequentialStrategy(schedule="no schedule"), REFUSED),
        (lambda: did_you_mean("name", 3), FAILED),  # a TypeError of Python, in the strategies
        (lambda: torch.ones(2) + torch.ones(3), FAILED),
        (lambda: int("no number"), FAILED),
    ],
)
def test_only_what_the_strategies_raise_for_users_is_a_refusal(function, kind: str, elsewhere: bool) -> None:
    error: Any = raised(function)
    if elsewhere:  # as the driver raises what a worker has raised
        error = Failure.of(error, "stage 1", "forward").exception()
    assert kind_of(error) == kind
    assert in_words(error).startswith(type(error).__name__)


def test_failures_name_package_class_and_seed() -> None:
    failed = Verdict(CASE, [Finding(FAILED, "gpipe", "ZeroDivisionError: division by zero")], 3.0)
    equal = Verdict(CASE, [Finding(EQUAL, "gpipe"), Finding(REFUSED, "1f1b", "a | b")], 3.0)
    (told,) = shortcomings([equal, failed])
    assert told.startswith(f"{NAMED} (3 s)\n    FAILED: gpipe; ZeroDivisionError")
    assert "python -m tests.drawing --seed 7 --only LlamaForCausalLM" in told
    assert "| LlamaForCausalLM | 7 | refused | 1f1b | a \\| b |" in markdown([equal, failed])


def test_a_drawing_of_which_too_little_is_equal_fails() -> None:
    equal = Verdict(CASE, [Finding(EQUAL, "gpipe")], 1.0)
    not_built = Verdict(CASE, [Finding(NOT_BUILT, told="no tiny one")], 1.0)
    assert shortcomings([equal, not_built, not_built]) == []
    (told,) = shortcomings([equal, not_built, not_built, not_built])
    assert re.search(r"transformers [\d.]+, seed 7: only 1 of 4 classes were equal .*at least 33% must be", told)
