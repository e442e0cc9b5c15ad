"""A measurement is repeated until it shows what is claimed, and no more often than it may."""

from collections.abc import Callable

import pytest
from undisturbed import until_undisturbed


def is_at_least(limit: int) -> Callable[[int], None]:
    def check(value: int) -> None:
        assert value >= limit, f"{value} is too small"

    return check


def test_one_undisturbed_measurement_is_enough() -> None:
    values = iter(range(6))
    assert until_undisturbed(lambda: next(values), is_at_least(1)) == 1
    with pytest.raises(AssertionError, match="4 is too small"):
        until_undisturbed(lambda: next(values), is_at_least(9))
    assert next(values) == 5


def test_what_a_measurement_raises_is_not_repeated() -> None:
    values = iter([0])

    def measure() -> int:
        raise AssertionError(f"left behind {next(values)}")

    with pytest.raises(AssertionError, match="left behind"):
        until_undisturbed(measure, is_at_least(9))
