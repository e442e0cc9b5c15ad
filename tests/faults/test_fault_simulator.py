"""The short forms of the simulator of faults; ``make faults`` runs a thousand cases (docs/faults.md)."""

import pytest

from tests.faults.simulator.campaign import Campaign
from tests.faults.simulator.cases import DRIVER, WORKER, draw, first_seed

QUICK = {
    "kill": WORKER,
    "exception": WORKER,
    "disk full": WORKER,
    "cut off": DRIVER,
    "connection lost": WORKER,
    "hang": WORKER,
}


def check(seed: int) -> None:
    verdict = Campaign().examine(draw(seed))
    again = f"python -m tests.faults.simulator --seed {seed}"
    assert not verdict.wrong, "\n".join([again, verdict.case, verdict.ending, *verdict.wrong])


@pytest.mark.parametrize("kind", QUICK)
def test_a_fault(kind: str) -> None:
    check(first_seed(kind, QUICK[kind]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1030))
def test_some_faults(seed: int) -> None:
    check(seed)
