"""Nets with skip connections, for several test files."""

from typing import Any

import torch
from torch import Tensor, nn

from strategies.pipeline import Namespace, pop, skippable, stash


@skippable(stash=["skip"])
class Down(nn.Module):
    """Halves the resolution, and stashes what was there before."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, 2 * channels, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x)
        return torch.tanh(self.conv(x))


@skippable(pop=["skip"])
class Up(nn.Module):
    """Doubles the resolution, and joins what was stashed there on the way down."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose1d(2 * channels, channels, 2, stride=2)
        self.conv = nn.Conv1d(2 * channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return torch.tanh(self.conv(torch.cat([self.up(x), skip], dim=1)))


def u_net() -> nn.Sequential:
    """Of 8 layers and depth 2, with BatchNorm and Dropout at the bottom; takes ``[rows, 2, 8]``.

    0 Conv  1 Down  2 Down  3 BatchNorm  4 Dropout  5 Up  6 Up  7 Conv
              │       └─────────────────────────────┘   │
              └─────────────────────────────────────────┘
    """
    outer, inner = Namespace(), Namespace()
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv1d(2, 3, 3, padding=1),
        Down(3).isolate(outer),
        Down(6).isolate(inner),
        nn.BatchNorm1d(12, affine=True),
        nn.Dropout(0.0),
        Up(6).isolate(inner),
        Up(3).isolate(outer),
        nn.Conv1d(3, 1, 3, padding=1),
    )
