"""One gradient scaler over all stages: one scale, and one decision whether a step is left out."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness import run
from parity import Fresh, Small, check, compare, fit
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler

from strategies import RPCSequentialStrategy


def scaler() -> GradScaler:
    """Doubles the scale after two steps that it does not leave out."""
    return GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


class Exact(MixedPrecision):
    """A real scaler, but float64 instead of float16, so that results can be compared to 1e-9."""

    def __init__(self) -> None:
        super().__init__("16-mixed", "cpu", scaler=scaler())

    def autocast_context_manager(self) -> Any:
        return nullcontext()

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module.double()

    def convert_input(self, data: Any) -> Any:
        return [t.double() for t in data]


class _Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.bad = bool((x.abs() > 100).any())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * float("inf") if ctx.bad else grad


class Explodes(nn.Module):
    """The identity; for large inputs, the gradient of the layers before it is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return _Explode.apply(x)


class Scaled(Small):
    """In the second batch of each epoch the gradients of one stage explode, which is no reason for the others to."""

    explodes_behind = 1
    norm_type = 2.0

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(6, 6), nn.Identity(), nn.Linear(6, 6), nn.Identity(), nn.Linear(6, 6), nn.Linear(6, 2)]
        layers[self.explodes_behind] = Explodes()
        self.sequential_module = nn.Sequential(*layers)
        self.steps: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        factor = 1e4 if batch_idx == 1 else 1
        return super().training_step((batch[0] * factor, batch[1] * factor), batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses.append(self.trainer.precision_plugin.scaler.get_scale())


class ExplodesLate(Scaled):
    """Two optimizers, each with parameters on one process only; the first one's are those that explode."""

    explodes_behind = 3

    def configure_optimizers(self) -> Any:
        first, last = self.sequential_module[0], self.sequential_module[5]
        adam = torch.optim.Adam(last.parameters(), lr=0.01)
        return [torch.optim.SGD(first.parameters(), lr=0.01, momentum=0.9), adam]

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


class Fused(Scaled):
    """An optimizer that unscales within its step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


def exactly() -> list[list[float]]:
    plugins = {"precision": None, "plugins": Fresh(lambda: [Exact()])}
    rows: list[tuple[Callable[[], Small], dict[str, Any]]] = [
        (Scaled, {"gradient_clip_val": 0.5}),
        (Fused, {}),
        (ExplodesLate, {}),
    ]
    return [check(model, **plugins, **arguments)[0].losses for model, arguments in rows]


@pytest.mark.slow
def test_one_decision_over_all_stages() -> None:
    automatic, fused, _ = run(exactly)
    scales = [1024.0, 512.0, 512.0, 1024.0, 1024.0, 512.0, 512.0, 1024.0]
    assert automatic[1::2] == fused[1::2] == scales  # halved where a step is left out, doubled after two others


class Half(Small):
    """Also trains in real float16."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses.append(self.trainer.precision_plugin.scaler.get_scale())


def in_float16() -> None:
    def train(stages: int, balance: list[int]) -> Any:
        plugin = MixedPrecision("16-mixed", "cpu", scaler=GradScaler("cpu", init_scale=2.0**17))
        strategy = RPCSequentialStrategy(balance, microbatches=3) if stages else "auto"
        return fit(Half, strategy, max(stages, 1), precision=None, plugins=[plugin], max_epochs=3)

    single, one, *more = [train(s, b) for s, b in ((0, []), (1, [6]), (2, [2, 4]), (3, [2, 2, 2]))]
    assert single.losses[1] == single.losses[-1] == 2.0**16  # it overflows at first, then it trains
    for pipeline in more:
        compare(pipeline, one, 1e-6)  # the same micro-batches
    compare(one, single, 5e-3)  # float16 has 11 bits; gradients of micro-batches are rounded, then added


@pytest.mark.slow
def test_float16() -> None:
    run(in_float16)
