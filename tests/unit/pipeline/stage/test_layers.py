"""Which layers need a seed, and whether the settings of a pass are those of the thread."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import nn

from strategies.pipeline.stage.layers import PassContext, draws_nothing


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


@contextmanager
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@contextmanager
def matmul_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@contextmanager
def deterministic(*, warn_only: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    yield
    torch.use_deterministic_algorithms(False)


@contextmanager
def benchmark() -> Iterator[None]:
    torch.backends.cudnn.benchmark = True
    yield
    torch.backends.cudnn.benchmark = False


@pytest.mark.parametrize(
    "setting",
    [
        lambda: torch.autocast("cpu"),
        lambda: torch.autocast("cpu", enabled=False, cache_enabled=False),
        lambda: torch.autocast("cpu", dtype=torch.float16, enabled=False),
        default_dtype,
        matmul_precision,
        lambda: deterministic(warn_only=True),
        benchmark,
        lambda: torch.autograd.set_detect_anomaly(True),
        lambda: torch.autograd.set_detect_anomaly(False, check_nan=False),
        torch.inference_mode,
    ],
)
def test_settings_are_compared_as_they_are_captured(setting: Callable[[], AbstractContextManager[None]]) -> None:
    before = PassContext.capture("cpu")
    assert before.is_current("cpu") and not before.is_current("cuda")
    with setting():
        within = PassContext.capture("cpu")
        assert before.is_current("cpu") == (before == within)
        assert within.is_current("cpu")
        assert within != before
    assert before.is_current("cpu")
