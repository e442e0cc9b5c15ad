"""A layer that sleeps, so that its time is known and does not depend on what else the machine does."""

import time
from typing import Any, cast

import torch
from torch import Tensor, nn


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        ctx.seconds = backward_seconds
        time.sleep(forward_seconds)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.seconds)
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
