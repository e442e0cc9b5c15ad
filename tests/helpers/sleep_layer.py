"""A layer that sleeps, so that its time is known, and a clock for tests of what is measured in their own process."""

import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

READ_SECONDS = 1e-5
"""What a read of the clock takes under :func:`only_sleep_takes_time`."""

_sleep: Callable[[float], object] = time.sleep


def only_sleep_takes_time(patch: pytest.MonkeyPatch) -> Callable[[float], float]:
    """Replaces ``time.perf_counter`` by a clock that other load on the machine does not move.

    A layer of this module moves it by exactly the time for which it would sleep. So does a read, by ``READ_SECONDS``:
    a loop that measures until a time is over ends.

    Returns:
        What moves the clock by some seconds.
    """
    now = 0.0

    def move(seconds: float) -> float:
        nonlocal now
        now += seconds
        return now

    patch.setattr(time, "perf_counter", lambda: move(READ_SECONDS))
    patch.setitem(globals(), "_sleep", move)
    return move


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        ctx.seconds = backward_seconds
        _sleep(forward_seconds)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _sleep(ctx.seconds)
        return *gradients, None, None


def slept(value: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
    """A copy of the value; the forward pass and the backward pass take time."""
    return cast(Tensor, _Sleep.apply(value, forward_seconds, backward_seconds))


class Sleep(nn.Module):
    """Copies its input, and sleeps in the forward pass and in the backward pass."""

    def __init__(self, forward_seconds: float, backward_seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds = forward_seconds, backward_seconds

    def forward(self, value: Tensor) -> Tensor:
        return slept(value, *self.seconds)
