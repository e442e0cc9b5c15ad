"""One gradient scaler over all stages: one scale, and one decision whether a step is left out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run
from parity import Fresh, Small, check, compare, fit, on_cpus
from parity_scaler import Exact, Scaled
from pytorch_lightning.plugins.precision import MixedPrecision
from torch.amp import GradScaler

from strategies import RPCSequentialStrategy


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


class FusedUnscaledByHand(Fused):
    """Unscales the gradients of every other step ahead of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer: Any = self.optimizers()
        if batch_idx % 2:
            precision: Any = self.trainer.precision_plugin
            precision.scaler.unscale_(optimizer.optimizer)
        optimizer.step()
        optimizer.zero_grad()


def exactly() -> list[list[float]]:
    plugins = {"precision": None, "plugins": Fresh(lambda: [Exact()])}
    rows: list[tuple[Callable[[], Small], dict[str, Any]]] = [
        (Scaled, {"gradient_clip_val": 0.5}),
        (Fused, {}),
        (ExplodesLate, {}),
        (FusedUnscaledByHand, {"stages": [2]}),
    ]
    return [check(model, **plugins, **arguments)[0].losses for model, arguments in rows]


@pytest.mark.slow
def test_one_decision_over_all_stages() -> None:
    automatic, fused, *_ = run(exactly)
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


@on_cpus
def test_float16() -> None:
    run(in_float16)
