"""A model that computes with the weights of its layers and never calls the layers is refused in its first step."""

from collections.abc import Callable

import pytest
from torch import nn

from strategies.pipeline.partition.bypass import BypassCheck

WEIGHT = "parameter 0.weight [4, 4] of stage 0"
BLOCKS = nn.ModuleList([nn.Linear(4, 4)])


def uses(check: BypassCheck) -> None:
    check.note_use(WEIGHT, in_pass=False)


def uses_and_calls(check: BypassCheck) -> None:
    check.note_use(WEIGHT, in_pass=False)
    check.note_call()


def step(check: BypassCheck, code: Callable[[BypassCheck], None]) -> None:
    with check.watching():
        code(check)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (BLOCKS, r"has not called the blocks in 'net\.layers', .* parameter 0\.weight \[4, 4\] of stage 0 .*forward"),
        (nn.Sequential(*BLOCKS), r"has not called 'net\.layers', .*model\.net\.layers = nn\.ModuleList\(model"),
    ],
)
def test_a_step_that_uses_weights_and_calls_nothing_is_refused(layers: nn.Sequential, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        step(BypassCheck(layers, "net.layers"), uses)


def test_a_step_that_touches_nothing_is_not_refused_and_the_next_one_may_be() -> None:
    check = BypassCheck(BLOCKS, "layers")
    step(check, lambda check: None)
    with pytest.raises(RuntimeError, match="has not called"):
        step(check, uses)


def test_weights_may_be_used_beside_a_call_and_in_every_later_step() -> None:
    check = BypassCheck(BLOCKS, "layers")
    step(check, uses_and_calls)
    step(check, uses)


def test_what_happens_outside_of_steps_does_not_count() -> None:
    check = BypassCheck(BLOCKS, "layers")
    uses_and_calls(check)
    with pytest.raises(RuntimeError, match="has not called"):
        step(check, uses)


def test_where_values_cannot_be_read_the_use_itself_is_refused() -> None:
    check = BypassCheck(BLOCKS, "layers")
    with (
        pytest.raises(RuntimeError, match=r"has not called .*uses this weight first.*self\.tied"),
        check.watching(),
    ):
        check.note_use(WEIGHT, in_pass=True)
    with check.watching():
        check.note_call()
        check.note_use(WEIGHT, in_pass=True)


def test_an_error_of_the_step_itself_is_raised() -> None:
    check = BypassCheck(BLOCKS, "layers")
    with pytest.raises(KeyError, match="own"), check.watching():
        uses(check)
        raise KeyError("own")
