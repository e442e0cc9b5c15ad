"""Which layers need a seed, whether the settings of a pass are those of the thread, and which buffers are kept."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter

import pytest
import torch
from harness import run
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from strategies.common.random_seeds import draws_nothing
from strategies.pipeline.stage.layers import (
    ChangedBuffers,
    Layers,
    PassContext,
    PlainAttributes,
    ReusedInput,
)


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
def test_settings_that_differ_are_captured_differently(setting: Callable[[], AbstractContextManager[None]]) -> None:
    torch.set_float32_matmul_precision("highest")  # the default, but fp32_precision says "none" until it is set
    before = PassContext.capture("cpu")
    assert before == PassContext.capture("cpu") != PassContext.capture("cuda")
    with setting():
        assert PassContext.capture("cpu") != before
    assert PassContext.capture("cpu") == before


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
            arrived.append(PassContext.capture("cpu") == context)
        before.apply()
    return arrived, PassContext.capture("cpu") == before


def test_settings_arrive_on_workers_and_go_again() -> None:
    arrived, is_as_before = run(in_a_worker, list(SETTINGS))
    assert dict(zip(SETTINGS, arrived, strict=True)) == dict.fromkeys(SETTINGS, True)
    assert is_as_before


class Counts(nn.Module):
    """Changes its buffers in each forward pass whose number is a multiple of ``every``.

    Args:
        way: How.
        every: In which passes.
        size: Of the buffer.
    """

    def __init__(self, way: str, every: int = 1, size: int = 4) -> None:
        super().__init__()
        self.way, self.every, self.passes = way, every, 0
        self.register_buffer("count", None if way == "set" else torch.ones(size))
        self.register_buffer("same", self.count)

    def forward(self) -> Tensor:
        self.passes += 1
        if self.passes % self.every == 0:
            if self.way == "in place":
                self.count.mul_(2)
            elif self.way == "data":
                self.count.data.mul_(2)
            elif self.way == "replaced":
                self.count = self.count * 2
            elif self.count is None:
                self.count = torch.ones(4)
        if self.same is not None and self.way != "replaced":
            assert self.same is self.count
        return torch.zeros(()) if self.count is None else self.count.sum()


@pytest.mark.parametrize(
    ("way", "every"), [("in place", 1), ("in place", 3), ("data", 1), ("replaced", 1), ("replaced", 3), ("set", 1)]
)
def test_a_forward_pass_that_runs_again_gives_the_same_and_changes_no_buffer(way: str, every: int) -> None:
    """Two buffers that share a tensor share it again."""
    layer, buffers = Counts(way, every), ChangedBuffers()
    buffers.search(layer.modules())
    for _ in range(7):
        with buffers.kept() as kept:
            first = layer()
        after = None if layer.count is None else layer.count.clone()
        layer.passes -= 1
        with buffers.restored(kept):
            assert torch.equal(layer(), first)
        assert (layer.count is None) if after is None else torch.equal(layer.count, after)


@pytest.mark.parametrize("every", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("way", ["in place", "replaced", "set"])
def test_a_forward_pass_begins_with_the_same_buffers_after_later_ones(way: str, every: int) -> None:
    """The last one of three does not run again, but may change the buffers."""
    layer, buffers = Counts(way, every), ChangedBuffers()
    for _ in range(4):
        buffers.search(layer.modules())
        begun = []
        for _ in range(2):
            number = layer.passes
            with buffers.kept() as kept:
                first = layer()
            begun.append((kept, number, first))
        last, number = layer(), layer.passes
        for kept, layer.passes, first in reversed(begun):
            with buffers.restored(kept):
                assert torch.equal(layer(), first)
        layer.passes = number
        assert layer.count is None or torch.equal(layer.count.sum(), last)


def test_a_small_buffer_is_copied_once_for_all_forward_passes_that_begin_with_its_value() -> None:
    layer, buffers = Counts("in place", every=3), ChangedBuffers()
    buffers.search(layer.modules())
    copies = []
    for _ in range(5):
        with buffers.kept() as kept:
            layer()
        copies.append(kept[0].copy)
    assert len({*map(id, copies[:3])}) == 1  # it changes in the third pass
    assert len({*map(id, copies)}) == 3


def test_a_large_buffer_that_changes_late_is_told() -> None:
    layer, buffers = Counts("in place", every=3, size=2**16), ChangedBuffers()
    buffers.search(layer.modules())
    for number in range(1, 10):
        told = pytest.warns(UserWarning, match="Counts has changed its buffer 'count'")
        with told if number == 3 else nullcontext(), buffers.kept() as kept:
            layer()
        assert [each.copy is not None for each in kept] == {1: [False] * 2, 2: [False] * 2, 3: []}.get(
            number, [True] * 2
        )


def test_a_large_buffer_that_a_forward_pass_changes_that_does_not_run_again_is_told_once() -> None:
    layer, buffers = Counts("in place", every=2, size=2**16), ChangedBuffers()
    buffers.search(layer.modules())
    for number in range(1, 4):
        with buffers.kept() as kept:
            layer()
        layer()
        told = pytest.warns(UserWarning, match="Counts has changed its buffer 'count'")
        with told if number == 1 else nullcontext(), buffers.restored(kept):
            assert layer.count[0] == 2 ** (number - 1 if number > 1 else 1)


class Rated(nn.Module):
    """Has a rate that user code sets, and counts its calls, every second call, and its calls that are repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.calls, self.pairs, self.repeated = 0.5, 0, 0, 0

    def forward(self, repeats: bool = False) -> float:
        self.calls += 1
        self.pairs += self.calls % 2 == 0
        self.repeated += repeats
        return self.rate


def test_a_forward_pass_that_runs_again_has_its_attributes_and_goes_on_counting() -> None:
    layer, attributes = Rated(), PlainAttributes()
    for rates in ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)):
        attributes.search(layer.modules())
        passes = []
        for layer.rate in rates:
            with attributes.kept() as kept:
                layer()
            passes.append(kept)
        layer.rate, layer.user = 7.0, 1
        for kept, rate in zip(reversed(passes), reversed(rates), strict=True):
            with attributes.restored(kept):
                assert layer(repeats=True) == rate
            assert (layer.rate, layer.user) == (7.0, 1)
    assert (layer.calls, layer.pairs, layer.repeated) == (12, 6, 6)


def test_attributes_come_back_after_an_error_in_a_layer() -> None:
    layer, attributes = Rated(), PlainAttributes()
    attributes.search(layer.modules())
    with attributes.kept() as kept:
        layer()
    layer.rate = 7.0
    with pytest.raises(ZeroDivisionError), attributes.restored(kept):
        raise ZeroDivisionError
    assert layer.rate == 7.0
    del layer.rate
    with attributes.restored(kept):
        assert layer() == 0.5
    assert not hasattr(layer, "rate")


class MayWrite(nn.Module):
    """The identity; writes to its input if told to."""

    def __init__(self, told: list[bool]) -> None:
        super().__init__()
        self.told = told

    def forward(self, x: Tensor) -> Tensor:
        return x.zero_() if self.told else x


def lend(lender: ReusedInput, layers: Layers, value: Tensor) -> bool:
    """Lends the layers an input, and returns whether they got the input itself."""
    with layers.kept() as state, lender.lent(value, state) as own:
        layers.layers(own)
    return own is value


def test_an_input_is_lent_only_to_layers_that_have_shown_not_to_write() -> None:
    """In the same mode and with the same attributes."""
    value, dropout = torch.ones(100), nn.Dropout(0.0, inplace=True)
    layers, lender = Layers(nn.Sequential(dropout), 0, torch.device("cpu")), ReusedInput("layers")
    runs = [(True, 0.0), (True, 0.0), (False, 0.0), (False, 0.0), (False, 0.5), (False, 0.5), (True, 0.5), (True, 0.0)]
    lent = []
    for is_training, dropout.p in runs:
        dropout.train(is_training)
        lent.append(lend(lender, layers, value))
        assert value.eq(1).all()
    assert lent == [False, True, False, True, False, True, False, False]


def test_an_input_that_is_written_unexpectedly_is_an_error_once() -> None:
    told: list[bool] = []
    layers = Layers(nn.Sequential(nn.Identity(), MayWrite(told)), 3, torch.device("cpu"))
    lender = ReusedInput(layers.description)
    assert [lend(lender, layers, torch.ones(2)) for _ in range(2)] == [False, True]
    told.append(True)
    with pytest.raises(RuntimeError, match=r"layers 3 to 4 \(Identity, MayWrite\) have changed their input in place"):
        lend(lender, layers, torch.ones(2))
    assert not lend(lender, layers, value := torch.ones(2))
    assert value.eq(1).all()
