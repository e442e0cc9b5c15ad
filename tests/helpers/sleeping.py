"""A model whose layers take a known time, and more of it on one process.

The layers sleep, so their times do not depend on what else the machine does, as long as it wakes them in time.
"""

import os
from pathlib import Path

from parity import WIDTH, Small
from sleep_layer import slept
from torch import Tensor, nn

SECONDS = 0.004
"""What the forward pass of a layer takes; the backward pass takes twice as long."""

SLOWNESS = 2.0
"""How many times as long a slow process takes."""


class Sleeps(nn.Linear):
    """A layer that takes time, and more of it on a slow process.

    Args:
        slow: The slow process of two: 0 for the worker, 1 for the driver; ``None`` if none is.
        since: The process is slow only if this file exists; ``None`` if it always is.
    """

    def __init__(self, slow: int | None, since: Path | None = None) -> None:
        super().__init__(WIDTH, WIDTH)
        self.driver, self.slow, self.since = os.getpid(), slow, since

    def forward(self, x: Tensor) -> Tensor:
        is_slow = self.slow == (1 if os.getpid() == self.driver else 0) and (self.since is None or self.since.exists())
        seconds = SECONDS * (SLOWNESS if is_slow else 1.0)
        return super().forward(slept(x, seconds, 2 * seconds))


class Sleepy(Small):
    """Ten layers that sleep, and a last one that does not."""

    def __init__(self, slow: int | None, since: Path | None = None) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(*(Sleeps(slow, since) for _ in range(10)), nn.Linear(WIDTH, 2))
