"""The logged values of ranks, by Lightning's rules, computed from the calls of one process."""

from typing import Any

import pytest

from trainer.verification.logged import LoggedCall, logged_of_ranks


def calls(name: str, values: list[float], sizes: list[int] | None = None, **settings: Any) -> list[list[LoggedCall]]:
    sizes = sizes or [1] * len(values)
    return [[LoggedCall(name, value, size, **settings)] for value, size in zip(values, sizes, strict=True)]


def test_a_value_of_a_step_is_the_value_of_the_rank() -> None:
    found = logged_of_ranks(calls("loss", [1.0, 2.0, 3.0, 4.0]), 2, [], {})
    assert [each["loss"] for each in found.of_batches] == [1, 2, 3, 4]
    assert [each["loss"] for each in found.of_epoch] == [3, 4]


@pytest.mark.parametrize("reduce_fx, first, second", [("mean", 1.5, 3.5), ("sum", 3, 7), ("min", 1, 3), ("max", 2, 4)])
def test_a_synchronised_value_is_reduced_over_the_ranks(reduce_fx: str, first: float, second: float) -> None:
    settings = {"reduce_fx": reduce_fx, "is_synchronised": True}
    found = logged_of_ranks(calls("loss", [1.0, 2.0, 3.0, 4.0], **settings), 2, [], {})
    assert [each["loss"] for each in found.of_batches] == [first, first, second, second]


def test_an_epoch_is_a_mean_over_the_batches_of_the_rank_or_of_all_ranks() -> None:
    own = calls("loss", [1.0, 2.0, 3.0, 4.0], [3, 1, 1, 1], on_epoch=True)
    found = logged_of_ranks(own, 2, [], {})
    assert [each["loss_step"] for each in found.of_batches] == [1, 2, 3, 4]
    assert [each["loss"] for each in found.of_epoch] == [each["loss_epoch"] for each in found.of_epoch] == [1.5, 3]
    whole = calls("loss", [1.0, 2.0, 3.0, 4.0], [3, 1, 1, 1], on_step=False, on_epoch=True, is_synchronised=True)
    found = logged_of_ranks(whole, 2, [], {})
    assert found.of_batches == [{}, {}, {}, {}]
    assert [each["loss"] for each in found.of_epoch] == [2, 2]


def test_a_sum_over_an_epoch() -> None:
    own = calls("rows", [1.0, 2.0, 3.0, 4.0], on_step=False, on_epoch=True, reduce_fx="sum")
    assert [each["rows"] for each in logged_of_ranks(own, 2, [], {}).of_epoch] == [4, 6]


def test_a_metric_is_that_of_its_batch_and_of_the_whole_epoch() -> None:
    metric = [[LoggedCall("acc", None, on_epoch=True)] for _ in range(2)]
    found = logged_of_ranks(metric, 2, [{"acc": 0.25}, {"acc": 0.75}], {"acc_epoch": 0.5})
    assert [each["acc_step"] for each in found.of_batches] == [0.25, 0.75]
    assert [each["acc_epoch"] for each in found.of_epoch] == [0.5, 0.5]


def test_a_value_that_a_step_does_not_log_remains() -> None:
    found = logged_of_ranks([[LoggedCall("a", 1.0)], [LoggedCall("a", 2.0)], [], []], 2, [], {})
    assert [each["a"] for each in found.of_batches] == [1, 2, 1, 2]
