"""Converts times of stages to the driver's clock.

driver   sent ─────┐            ┌──▶ back       The stage's time is the middle of the round trip. The error is at most
stage              └──▶ there ──┘               half of the round trip.
"""

import time
from typing import Any

from strategies.pipeline.control.client import RemoteStage

_TRIPS = 5


class Clock:
    """The clock of a stage's process, ``time.perf_counter``, compared with the clock of the driver.

    On Linux, the processes of a host share one clock. The clocks of two hosts differ by the time between their boots,
    and drift, so each call estimates the difference again.

    Args:
        remote: The stage.
    """

    def __init__(self, remote: RemoteStage) -> None:
        self._remote, self._is_shared = remote, False

    def ahead(self) -> float:
        """Return the seconds by which the driver's clock is ahead of the stage's; 0 if the difference is too small."""
        if self._is_shared:
            return 0.0
        trips = []
        for _ in range(_TRIPS):
            sent = time.perf_counter()
            there = self._remote.beside(_now).wait()
            back = time.perf_counter()
            trips.append((back - sent, (sent + back) / 2 - there))
        seconds, ahead = min(trips)  # the shortest trip has the smallest error
        self._is_shared = abs(ahead) <= seconds / 2
        return 0.0 if self._is_shared else ahead


def _now(host: Any) -> float:
    return time.perf_counter()
