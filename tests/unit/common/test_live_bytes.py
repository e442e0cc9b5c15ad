"""Bytes of tensors that are alive: counted when they are made and freed, on any device, in both passes."""

import pytest
import torch
from torch import nn

from strategies.common.live_bytes import LiveBytes


def test_tensors_count_until_they_are_freed() -> None:
    given = torch.zeros(100)
    with LiveBytes() as live:
        first = given + 1
        assert (live.bytes, live.peak) == (400, 400)
        second = first.view(10, 10)  # the same storage
        first.add_(1)
        given[:50].mul_(2)
        assert live.bytes == 400
        third = second * 2
        assert live.bytes == live.peak == 800
        del first, second
        assert (live.bytes, live.peak) == (400, 800)
        live.reset_peak()
        assert live.peak == 400
        del third
    assert live.bytes == 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_both_passes(device: str) -> None:
    layer = nn.Linear(8, 8, device=device)
    x = torch.zeros(16, 8, device=device)
    for p in layer.parameters():
        p.grad = torch.zeros_like(p)
    with LiveBytes() as live:
        output = layer(x).tanh()  # which is saved; what it was computed from is not
        assert (live.bytes, live.peak) == (16 * 8 * 4, 2 * 16 * 8 * 4)
        output.sum().backward()
        del output
        assert live.bytes == 0
