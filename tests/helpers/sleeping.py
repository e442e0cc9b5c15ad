"""A model whose layers take a known time, and more of it on one process; and what the strategy tells meanwhile.

The layers sleep, so their times do not depend on what else the machine does, as long as it wakes them in time.
"""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from parity import WIDTH, Small
from torch import Tensor, nn

SECONDS = 0.004
"""What the forward pass of a layer takes; the backward pass takes twice as long."""

SLOWNESS = 2.0
"""How many times as long a slow process takes."""


class _Sleep(torch.autograd.Function):
    """Identity that takes time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        time.sleep(2 * ctx.seconds)
        return grads[0], None


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
        return super().forward(cast(Tensor, _Sleep.apply(x, SECONDS * (SLOWNESS if is_slow else 1.0))))


class Sleepy(Small):
    """Ten layers that sleep, and a last one that does not."""

    def __init__(self, slow: int | None, since: Path | None = None) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(*(Sleeps(slow, since) for _ in range(10)), nn.Linear(WIDTH, 2))


class _Messages(logging.Handler):
    def __init__(self, lines: list[str], start: str) -> None:
        super().__init__()
        self._lines, self._start = lines, start

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(self._start):
            self._lines.append(record.getMessage())


@contextmanager
def told(start: str) -> Iterator[list[str]]:
    """Within this, lines with the given start that Lightning tells the user are added to a list."""
    lines: list[str] = []
    handler, log = _Messages(lines, start), logging.getLogger("pytorch_lightning.utilities.rank_zero")
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
