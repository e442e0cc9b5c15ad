"""Brings times of stages to the driver's clock.

driver   sent ─────┐            ┌──▶ back       The stage's time is that of the middle of the round trip, give or take
stage              └──▶ there ──┘               half of it.
"""

import time
from typing import Any

from strategies.pipeline.control.client import RemoteStage

_TRIPS = 5


class Clock:
    """The clock of a stage's process, ``time.perf_counter``, next to that of the driver.

    On Linux the processes of a host have one clock. The clocks of two hosts differ by the time between their starts,
    and drift, so each call estimates the difference anew.

    Args:
        remote: The stage.
    """

    def __init__(self, remote: RemoteStage) -> None:
        self._remote, self._is_shared = remote, False

    def ahead(self) -> float:
        """Return the seconds by which the driver's clock is ahead of the stage's: 0 if they cannot be told apart."""
        if self._is_shared:
            return 0.0
        trips = []
        for _ in range(_TRIPS):
            sent = time.perf_counter()
            there = self._remote.beside(_now).wait()
            back = time.perf_counter()
            trips.append((back - sent, (sent + back) / 2 - there))
        seconds, ahead = min(trips)  # the shortest trip leaves least room for an error
        self._is_shared = abs(ahead) <= seconds / 2
        return 0.0 if self._is_shared else ahead


def _now(host: Any) -> float:
    return time.perf_counter()
