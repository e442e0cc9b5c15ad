"""More small models for the tests of ZeRO: what loops do to parameters and optimizers in mid-fit."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from zero_nets import WIDTH, Net


class OwnStep(Net):
    """Clips within its own step, has a parameter that is not dense, and gives parameters other memory."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH, dtype=torch.float64)[:, :WIDTH])  # 128 KiB

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.wide / WIDTH)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        def clipped() -> Any:
            loss = closure()
            torch.nn.utils.clip_grad_value_(self.parameters(), 1e-3)
            return loss

        optimizer.step(closure=clipped)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            for parameter in self.parameters():
                parameter.data = parameter.data.clone(memory_format=torch.preserve_format)


class AddedGroup(Net):
    """Parameters that want gradients from the start come to the optimizer later."""

    def configure_optimizers(self) -> Any:
        return AdamW([*self.second.parameters(), *self.last.parameters()], lr=3e-3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 4:
            optimizer: Any = self.optimizers(use_pl_optimizer=False)
            optimizer.add_param_group({"params": [*self.first.parameters(), *self.norm.parameters()], "lr": 1e-3})
