"""BatchNorm in pipelines of two and three stages trains as in one process that is fed the same micro-batches.

The reference runs in one process, without a line of the pipeline, and takes all updates of the running statistics from
BatchNorm itself.
"""

from typing import Any

import pytest
from harness import run
from parity import Outcome, compare, fit, one_device
from parity_batchnorm import BEFORE, MICROBATCHES, SIZES, Deferred, Each, Model, data

from strategies import RPCSequentialStrategy


def train(stages: int, **options: Any) -> Outcome:
    """As a pipeline whose balance is found by looking at the layers."""
    strategy = RPCSequentialStrategy(microbatches=MICROBATCHES, **options)
    outcome = fit(Model, strategy, stages, train=data, val=data)
    assert len(strategy.balance) == stages
    return outcome


def assert_as_in_one_process(reference: type[Model], rows: list[dict[str, Any]]) -> dict[str, int]:
    """Compares losses, parameters, buffers, optimizer states and the validation loss.

    Returns:
        How many updates each BatchNorm has counted.
    """
    single = fit(reference, one_device(), 1, train=data, val=data)
    for row in rows:
        compare(train(**row), single)
    counts = {name: int(b) for name, b in single.buffers.items() if name.endswith(".norm.num_batches_tracked")}
    return {name.removeprefix("sequential_module.").split(".norm")[0]: n - BEFORE for name, n in counts.items()}


def deferred() -> dict[str, int]:
    rows = [
        {"stages": 1, "checkpoint": "never"},
        {"stages": 2, "checkpoint": "except_last"},
        {"stages": 3, "checkpoint": "always", "balance": "by_time"},
    ]
    return assert_as_in_one_process(Deferred, [{**row, "deferred_batch_norm": True} for row in rows])


@pytest.mark.slow
def test_deferred_statistics_are_updated_once_a_batch() -> None:
    calls = 2 * (len(SIZES) + 1)
    assert run(deferred) == {"0.2": calls, "1": calls, "2": 0, "3": calls, "5.0": calls, "5.1": 0, "6.0": calls}


def each() -> dict[str, int]:
    rows = [
        {"stages": 1, "checkpoint": "never"},
        {"stages": 2, "checkpoint": "always"},
        {"stages": 3, "checkpoint": "except_last"},
    ]
    return assert_as_in_one_process(Each, rows)


def test_statistics_are_updated_once_a_micro_batch() -> None:
    with_gradients, without = 2 * (3 + 3 + 2 + 3), 2 * 3
    once, twice = with_gradients + without, 2 * with_gradients + without
    assert run(each) == {"0.2": twice, "1": once, "2": 0, "3": once, "5.0": twice, "5.1": 0, "6.0": once}
