"""A gradient scaler in float64, and a model whose gradients overflow on one stage only."""

from contextlib import nullcontext
from typing import Any

import torch
from parity import Small
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler


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
