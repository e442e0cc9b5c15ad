"""Which layers need a seed."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from strategies.pipeline.stage.layers import draws_nothing


class OwnLinear(nn.Linear):
    """May do anything."""


def hooked() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_forward_pre_hook(lambda *_: None)
    return layer


def replaced() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.forward = lambda x: x + torch.rand(2)
    return layer


class Noisy(nn.Parameter):
    """May do anything, too."""


def gradient_hook() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.weight.register_hook(lambda grad: grad + torch.randn_like(grad))
    return layer


def subclass() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.weight = Noisy(torch.ones(2, 2))
    return layer


def compiled() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.compile(backend="eager")
    return layer


MAY_DRAW = {
    "gradient hook": gradient_hook,
    "parameter of own class": subclass,
    "compiled": compiled,
    "dropout": lambda: nn.Dropout(0.1),
    "within": lambda: nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.RReLU())),
    "attention": lambda: nn.MultiheadAttention(2, 1, dropout=0.1),
    "own class": lambda: OwnLinear(2, 2),
    "hook": hooked,
    "replaced forward": replaced,
    "parametrization": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    "lazy": lambda: nn.LazyLinear(2),
}


@pytest.mark.parametrize("make", MAY_DRAW.values(), ids=MAY_DRAW)
def test_layers_that_may_draw(make: Callable[[], nn.Module]) -> None:
    assert not draws_nothing(make())


def test_layers_that_draw_nothing() -> None:
    assert draws_nothing(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.GELU()))
    hook = nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    try:
        assert not draws_nothing(nn.Linear(2, 2))
    finally:
        hook.remove()
