"""The short forms of the simulator of faults; ``make faults`` runs a thousand cases (docs/faults.md)."""

import pytest

from tests.faults.simulator.campaign import Campaign
from tests.faults.simulator.cases import draw, first_of_each

QUICK = ("kill", "exception", "disk full", "cut off", "connection lost", "hang")


def check(seed: int) -> None:
    verdict = Campaign().examine(draw(seed))
    again = f"python -m tests.faults.simulator --seed {seed}"
    assert not verdict.wrong, "\n".join([again, verdict.case, verdict.ending, *verdict.wrong])


@pytest.mark.parametrize("kind", QUICK)
def test_a_fault(kind: str) -> None:
    (seed,) = first_of_each([kind])
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1030))
def test_some_faults(seed: int) -> None:
    check(seed)
