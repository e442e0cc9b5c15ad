"""``schedule="1f1b"`` with a gradient scaler and with BatchNorm: decisions and statistics over the whole batch."""

from typing import Any

import parity_batchnorm as batchnorm
import parity_scaler as scaling
import pytest
import torch
from harness import run
from parity import Fresh, check, compare, fit, on_cpus
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler

from strategies import RPCSequentialStrategy


class Scaled(scaling.Scaled):
    """Gradients explode in the module and outside of it, on the driver."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.sequential_module(self.before(x))

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses += [outputs["loss"].item(), self.trainer.precision_plugin.scaler.get_scale()]


class Fused(Scaled):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


def scaled() -> list[float]:
    plugins = {"precision": None, "plugins": Fresh(lambda: [scaling.Exact()])}
    strategy = {"schedule": "1f1b", "microbatches": 3}
    single, *_ = check(Scaled, strategy=strategy, **plugins, gradient_clip_val=0.5)
    check(Scaled, strategy=strategy, **plugins, accumulate_grad_batches=2, stages=[3])
    check(Fused, strategy=strategy, **plugins, stages=[2])
    return single.losses


@pytest.mark.slow
def test_one_scale_and_one_decision_over_all_stages() -> None:
    scales = run(scaled, timeout_seconds=150)[1::2]
    assert scales == [1024.0, 512.0, 512.0, 1024.0, 1024.0, 512.0, 512.0, 1024.0]


class Half(Scaled):
    """Trains in real float16; the gradients of a loss this small are too small for it unless they are scaled."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * 1e-5


def in_float16() -> None:
    def train(stages: int) -> Any:
        plugin = MixedPrecision("16-mixed", "cpu", scaler=GradScaler("cpu", init_scale=2.0**34, growth_interval=100))
        strategy = RPCSequentialStrategy([6 // stages] * stages, microbatches=3, schedule="1f1b")
        return fit(Half, strategy, stages, precision=None, plugins=[plugin], max_epochs=4)

    one, two, three = (train(stages) for stages in (1, 2, 3))
    for pipeline in (two, three):
        compare(pipeline, one, tolerance=0)
    scales = one.losses[1::2]
    assert scales[0] == 2.0**33 and scales[-1] == scales[-8]  # it overflows at first, then it trains
    assert all(bool((state["exp_avg"] != 0).any()) for state in one.optimizers[0]["state"].values())


@on_cpus
@pytest.mark.slow
def test_float16() -> None:
    run(in_float16)


class Normed(batchnorm.Model):
    """Keeps the losses of batches, and makes one call in a step.

    No layer recomputes itself: BatchNorm would count that too, in backward passes, which come in between here.
    """

    def __init__(self) -> None:
        super().__init__()
        for layer in self.modules():
            if isinstance(layer, batchnorm.Normed):
                layer.checkpointed = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())


class EachInOne(Normed, batchnorm.Each):
    pass


class DeferredInOne(Normed, batchnorm.Deferred):
    pass


def normed() -> None:
    for reference, deferred in ((DeferredInOne, True), (EachInOne, False)):
        single = fit(reference, "auto", 1, train=batchnorm.data, val=batchnorm.data)
        for stages, mode in ((1, "never"), (2, "except_last"), (3, "always")):
            strategy = RPCSequentialStrategy(
                microbatches=batchnorm.MICROBATCHES, checkpoint=mode, schedule="1f1b", deferred_batch_norm=deferred
            )
            outcome = fit(Normed, strategy, stages, train=batchnorm.data, val=batchnorm.data)
            compare(outcome, single)


@pytest.mark.slow
def test_batch_norm() -> None:
    run(normed, timeout_seconds=150)
