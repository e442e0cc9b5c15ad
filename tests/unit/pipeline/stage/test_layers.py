"""Which layers need a seed, and whether the settings of a pass are those of the thread."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter

import pytest
import torch
from harness import run
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from strategies.common.random_seeds import draws_nothing
from strategies.pipeline.stage.layers import PassContext


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
def flag(name: str, value: bool | str) -> Iterator[None]:
    """Changes an attribute of ``torch.backends``."""
    path, _, own = name.rpartition(".")
    holder = attrgetter(path)(torch.backends) if path else torch.backends
    before = getattr(holder, own)
    setattr(holder, own, value)
    yield
    setattr(holder, own, before)


SETTINGS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "default dtype": default_dtype,
    "matmul precision": matmul_precision,
    "deterministic": lambda: deterministic(warn_only=True),
    "benchmark": lambda: flag("cudnn.benchmark", True),
    "cudnn deterministic": lambda: flag("cudnn.deterministic", True),
    "reduction": lambda: flag("cuda.matmul.allow_bf16_reduced_precision_reduction", False),
    "tf32 of cudnn": lambda: flag("cudnn.allow_tf32", False),
    "tf32": lambda: flag("cuda.matmul.fp32_precision", "tf32"),
    "bf16 of one operator on CPUs": lambda: flag("mkldnn.conv.fp32_precision", "bf16"),
    "tf32 everywhere": lambda: flag("fp32_precision", "tf32"),
    "kernel of attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "anomaly without NaN": lambda: torch.autograd.set_detect_anomaly(False, check_nan=False),
}
"""Those that are global to a process."""


@pytest.mark.parametrize(
    "setting",
    [
        lambda: torch.autocast("cpu"),
        lambda: torch.autocast("cpu", enabled=False, cache_enabled=False),
        lambda: torch.autocast("cpu", dtype=torch.float16, enabled=False),
        torch.inference_mode,
        *SETTINGS.values(),
    ],
)
def test_settings_are_compared_as_they_are_captured(setting: Callable[[], AbstractContextManager[None]]) -> None:
    torch.set_float32_matmul_precision("highest")  # the default, but fp32_precision says "none" until it is set
    before = PassContext.capture("cpu")
    assert before.is_current("cpu") and not before.is_current("cuda")
    with setting():
        within = PassContext.capture("cpu")
        assert before.is_current("cpu") == (before == within)
        assert within.is_current("cpu")
        assert within != before
    assert before.is_current("cpu")


def in_a_worker(names: list[str]) -> tuple[list[bool], bool]:
    """Applies settings, each with those of before between them; returns which arrived."""
    torch.set_float32_matmul_precision("highest")
    before = PassContext.capture("cpu")
    sent = []
    for name in names:
        with SETTINGS[name]():
            sent.append(PassContext.capture("cpu"))
    arrived = []
    for context in sent:
        context.apply()
        with context.entered(grad=True):
            arrived.append(context.is_current("cpu"))
        before.apply()
    return arrived, before.is_current("cpu")


def test_settings_arrive_on_workers_and_go_again() -> None:
    arrived, is_as_before = run(in_a_worker, list(SETTINGS))
    assert dict(zip(SETTINGS, arrived, strict=True)) == dict.fromkeys(SETTINGS, True)
    assert is_as_before
