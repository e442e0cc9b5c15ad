"""The difference of two clocks is estimated from round trips; clocks that cannot be told apart are one."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from sleep_layer import READ_SECONDS, only_sleep_takes_time

from strategies.pipeline.control.clocks import Clock


class Remote:
    """A stage whose clock differs; ``beside`` takes a while each way, and once in a while much longer."""

    def __init__(self, behind: float, sleep: Callable[[float], object]) -> None:
        self.behind, self.sleep, self.num_asked = behind, sleep, 0

    def beside(self, function: Callable[[Any], float]) -> Any:
        self.num_asked += 1
        self.sleep(0.02 if self.num_asked % 2 else 0.001)
        self._there = function(None) - self.behind
        return self

    def wait(self) -> float:
        self.sleep(0.001)
        return self._there


@pytest.mark.parametrize("behind", [-3600.0, 0.25])
def test_of_another_host(behind: float, monkeypatch: pytest.MonkeyPatch) -> None:
    remote: Any = Remote(behind, only_sleep_takes_time(monkeypatch))
    clock = Clock(remote)
    assert clock.ahead() == pytest.approx(behind, abs=2 * READ_SECONDS)
    before = remote.num_asked
    clock.ahead()
    assert remote.num_asked == 2 * before  # clocks drift


def test_of_the_same_host() -> None:
    remote: Any = Remote(0.0, time.sleep)
    clock = Clock(remote)
    assert clock.ahead() == 0.0
    before = remote.num_asked
    assert clock.ahead() == 0.0 and remote.num_asked == before
