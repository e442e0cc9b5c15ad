"""Under ``schedule="1f1b"``, random numbers, precision and anomaly detection do not depend on the number of stages.

The reference is a pipeline of one stage, which runs the same operations on the same micro-batches: everything is equal
to the last bit. What the settings are in a backward pass is told by one process.
"""

from typing import Any

import pytest
import torch
from harness import run
from parity import WIDTH, Outcome, Small, batches, compare, fit
from parity_parts import Draws
from parity_precision import SIZES, InParts, Model
from torch import Tensor, nn
from torch.nn.functional import dropout, mse_loss

from strategies import RPCSequentialStrategy

NUM_LAYERS = 6


def data() -> Any:
    return batches(SIZES)


class Dropped(Small):
    """Dropout in every layer, and random numbers drawn before and after the call; notes all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.sequential_module = nn.Sequential(*[Draws() for _ in range(NUM_LAYERS)])
        self.drawn: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = dropout(self.before(batch[0]), 0.3)
        early = torch.rand(3)
        out = self(x)
        self.drawn += [(x == 0).detach(), early, out[:, WIDTH:].detach(), torch.randn(3)]
        self.log("loss", loss := mse_loss(out[:, :2], batch[1] + torch.randn_like(batch[1])), on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses += [outputs["loss"].item(), torch.rand(1).item()]  # the process's own numbers go on


def train(make: Any, stages: int, microbatches: int = 3, **arguments: Any) -> Outcome:
    mode = {1: "never", 2: "except_last", 3: "always"}[stages]
    strategy = RPCSequentialStrategy(
        [NUM_LAYERS // stages] * stages, microbatches=microbatches, checkpoint=mode, schedule="1f1b"
    )
    return fit(make, strategy, stages, train=data, **arguments)


def dropped() -> list[Tensor]:
    one, *more = [train(Dropped, stages, microbatches=8, precision="32-true") for stages in (1, 2, 3)]
    for pipeline in more:
        compare(pipeline, one, tolerance=0)
        assert len(pipeline.model.drawn) == len(one.model.drawn) == 2 * 4 * sum(SIZES)  # a micro-batch of each row
        for ours, expected in zip(pipeline.model.drawn, one.model.drawn, strict=True):
            assert torch.equal(ours, expected)
    return one.model.drawn


@pytest.mark.slow
def test_what_is_drawn_is_the_same_for_any_number_of_stages_and_if_recomputed() -> None:
    drawn = run(dropped, timeout_seconds=150)
    numbers = torch.stack(drawn[1::4] + drawn[3::4])
    assert len(numbers.unique()) == numbers.numel()  # differ between micro-batches, and before from after
    masks = {tuple(mask.flatten().tolist()) for whole in drawn[2::4] for mask in whole.split(WIDTH, 1)}
    assert len(masks) > 40  # of the 64 that there are


class AroundModel(Model):
    """Layers that note what they see, also outside of the module, where they see what one process does."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = type(self.sequential_module[0])(), type(self.sequential_module[0])(2)
        self.seen_by_step: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.before(batch[0])
        out = self.sequential_module(x.float() if torch.is_autocast_enabled("cpu") else x)
        now = (torch.is_autocast_enabled("cpu"), torch.get_default_dtype(), torch.ones(1).dtype, out.dtype)
        if now not in self.seen_by_step:
            self.seen_by_step.append(now)
        return mse_loss(self.after(torch.cat([out] * 3, 1)).to(batch[1].dtype), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())


class AroundInOne(AroundModel, InParts):
    pass


def precisions() -> None:
    for precision in ("bf16-mixed", "64-true", "bf16-true"):
        single = fit(AroundInOne, "auto", 1, train=data, precision=precision, deterministic=True)
        one, *more = [
            train(AroundModel, stages, precision=precision, deterministic=True)
            for stages in ((1, 2, 3) if precision == "bf16-mixed" else (1, 2))
        ]
        for pipeline in (one, *more):
            compare(pipeline, one, tolerance=0)
            assert pipeline.model.seen == single.model.seen
            assert pipeline.model.seen_by_step == single.model.seen_by_step
            for layer in ("before", "after"):
                assert getattr(pipeline.model, layer).seen == getattr(single.model, layer).seen, (precision, layer)
        assert torch.get_default_dtype() == torch.float32
        if precision == "64-true":
            compare(one, single)


@pytest.mark.slow
def test_precision() -> None:
    run(precisions, timeout_seconds=170, allow=["env"])  # Lightning sets a variable for CUDA


class BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * float("nan")


class Bad(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return BadGradient.apply(super().forward(x))


class Anomalous(Small):
    """The gradient of one layer is not a number."""

    bad = 0

    def __init__(self) -> None:
        super().__init__()
        self.before = Bad(WIDTH, WIDTH) if self.bad < 0 else nn.Identity()
        if self.bad >= 0:
            self.sequential_module[self.bad] = Bad(WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return mse_loss(self(self.before(batch[0])), batch[1])


def anomalies() -> None:
    for place in (0, 3, -1):

        class There(Anomalous):
            bad = place

        train(There, 2, max_epochs=1)  # without detection it goes on
        with pytest.raises(RuntimeError, match="'BadGradientBackward' returned nan values"):
            train(There, 2, max_epochs=1, detect_anomaly=True)
        assert not torch.is_anomaly_enabled()
    train(Dropped, 2, max_epochs=1, detect_anomaly=True)


@pytest.mark.slow
def test_anomaly_detection() -> None:
    run(anomalies, timeout_seconds=150)
