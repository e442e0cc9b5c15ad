"""The difference of two clocks is estimated from round trips; clocks that cannot be told apart are one."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from strategies.pipeline.control.clocks import Clock


class Remote:
    """A stage whose clock differs; ``beside`` takes a while each way, and once in a while much longer."""

    def __init__(self, behind: float) -> None:
        self.behind, self.num_asked = behind, 0

    def beside(self, function: Callable[[Any], float]) -> Any:
        self.num_asked += 1
        time.sleep(0.02 if self.num_asked % 2 else 0.001)
        self._there = function(None) - self.behind
        return self

    def wait(self) -> float:
        time.sleep(0.001)
        return self._there


@pytest.mark.parametrize("behind", [-3600.0, 0.25])
def test_of_another_host(behind: float) -> None:
    remote: Any = Remote(behind)
    clock = Clock(remote)
    assert clock.ahead() == pytest.approx(behind, abs=0.01)
    before = remote.num_asked
    clock.ahead()
    assert remote.num_asked == 2 * before  # clocks drift


def test_of_the_same_host() -> None:
    remote: Any = Remote(0.0)
    clock = Clock(remote)
    assert clock.ahead() == 0.0
    before = remote.num_asked
    assert clock.ahead() == 0.0 and remote.num_asked == before
