"""Clipped, accumulated, watched for NaN, from several losses: gradients are those of one process."""

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import run
from parity import WIDTH, Outcome, Small, batches, check, fit, one_device
from parity_parts import Doubled, NanGradient, assert_same_gradients, gradients
from torch import Tensor, nn
from torch.nn.functional import l1_loss, mse_loss
from torch.nn.utils import clip_grad_norm_

from strategies import RPCSequentialStrategy, Schedule

Seen = list[dict[str, Tensor | None]]
LIMIT = 0.02


class Watching(Small):
    """Keeps the gradients of every stage after each backward pass, and those with which it has stepped."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: Seen = []
        self.stepped: Seen = []

    def on_after_backward(self) -> None:
        self.computed.append(gradients(self))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.stepped.append(gradients(self))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)  # Adam would make up for clipping


class Shared(Watching):
    """The layers of either end share their weight; one end on a worker, the other on the driver."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)]
        last = nn.Linear(WIDTH, WIDTH)
        layers[1].weight = layers[0].weight
        self.sequential_module = nn.Sequential(*layers, last, last)

    def forward(self, x: Tensor) -> Tensor:
        return self.sequential_module(x)[:, :2]


def check_gradients(make: Callable[[], Small], **arguments: Any) -> list[Outcome]:
    """Like ``check``, for the gradients at every moment too."""
    single, *pipelines = outcomes = check(make, **arguments)
    for outcome in pipelines:
        assert_same_gradients(outcome.model.computed, single.model.computed)
        assert_same_gradients(outcome.model.stepped, single.model.stepped)
    return outcomes


def norm(grads: dict[str, Tensor | None]) -> float:
    return torch.cat([g.flatten().cpu() for g in grads.values() if g is not None]).norm().item()


def largest(grads: dict[str, Tensor | None]) -> float:
    return max(g.abs().max().item() for g in grads.values() if g is not None)


def clipped_by_norm() -> tuple[Seen, Seen]:
    train = partial(batches, (8, 7, 6, 8, 2))
    outcomes = check_gradients(Shared, train=train, gradient_clip_val=LIMIT, accumulate_grad_batches=2)
    return outcomes[-1].model.computed, outcomes[-1].model.stepped


def test_clipping_by_norm_with_shared_weights_and_accumulation() -> None:
    """Two epochs of five batches; the last one ends an accumulation early."""
    computed, stepped = run(clipped_by_norm, timeout_seconds=170)
    assert len(computed) == len(stepped) == 10
    for k in (1, 3, 4, 6, 8, 9):
        assert norm(computed[k]) > 2 * LIMIT
        assert norm(stepped[k]) == pytest.approx(LIMIT, rel=1e-4)
    assert norm(stepped[0]) == norm(computed[0])


class Sparing(Watching):
    """Has no loss for one batch in the midst of an accumulation."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        return None if batch_idx == 1 else loss


def clipped_by_value() -> tuple[Seen, Seen]:
    outcomes = check_gradients(
        Sparing,
        strategy={"schedule": Schedule(pipelined_backward=False), "checkpoint": "always"},
        train=partial(batches, (8, 7, 6, 8, 2)),
        gradient_clip_val=LIMIT,
        gradient_clip_algorithm="value",
        accumulate_grad_batches=3,
        detect_anomaly=True,
    )
    return outcomes[-1].model.computed, outcomes[-1].model.stepped


@pytest.mark.slow
def test_clipping_by_value_with_backward_in_one_call_and_anomaly_detection() -> None:
    computed, stepped = run(clipped_by_value, timeout_seconds=170)
    assert len(computed) == 8 and len(stepped) == 10
    for k in (2, 4, 7, 9):
        assert largest(stepped[k]) == pytest.approx(LIMIT, rel=1e-9)
    assert all(largest(grads) > 2 * LIMIT for grads in computed)


class OwnClipping(Watching):
    """Clips in another way at each step, most of them by the strategy's function."""

    WAYS = ((2.0, LIMIT), (1.0, 5 * LIMIT), (float("inf"), LIMIT / 2), (3.0, LIMIT), (2.0, float("inf")))

    def __init__(self) -> None:
        super().__init__()
        self.totals: list[float] = []

    def configure_gradient_clipping(self, optimizer: Any, **limit_and_algorithm: Any) -> None:
        norm_type, limit = self.WAYS[self.global_step % len(self.WAYS)]
        strategy: Any = self.trainer.strategy
        if isinstance(strategy, RPCSequentialStrategy):
            total = strategy.clip_grad_norm_(limit, norm_type)
        else:
            total = clip_grad_norm_(self.parameters(), limit, norm_type)
        self.totals.append(total.item())


class SeveralLosses(Doubled, Watching):
    """Two losses of one output and one of another pass, one backward pass; the user clips by himself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        output, other = self(batch[0]), self(batch[0].flip(0))
        losses = [mse_loss(output, batch[1]), l1_loss(output, batch[1]), other.square().mean()]
        self.losses.extend(loss.item() for loss in losses)
        optimizer.zero_grad()
        self.manual_backward(sum(losses))
        self.clip_gradients(optimizer, LIMIT, ("norm", "value")[batch_idx % 2])
        optimizer.step()


def clipped_by_the_user() -> tuple[list[list[float]], Seen]:
    train = partial(batches, (8, 7, 6, 8, 2))
    outcomes = check_gradients(OwnClipping, train=train, gradient_clip_val=1.0)
    several = check_gradients(SeveralLosses, precision="32-true")
    return [outcome.model.totals for outcome in outcomes], several[-1].model.stepped


def test_own_clipping_and_several_losses() -> None:
    (single, *pipelines), stepped = run(clipped_by_the_user, timeout_seconds=170)
    assert len(single) == 10
    assert all(total > limit for total, (_, limit) in zip(single, OwnClipping.WAYS * 2, strict=True) if limit < 1)
    for totals in pipelines:
        assert totals == pytest.approx(single, rel=1e-9)
    assert norm(stepped[0]) == pytest.approx(LIMIT, rel=1e-4)
    assert largest(stepped[1]) == pytest.approx(LIMIT)


class OfOneLayer(Doubled, Watching):
    """Clips the gradients of two optimizers by value, each with the parameters of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss = self.loss(batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            self.clip_gradients(optimizer, LIMIT, "value")
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.sequential_module[k].parameters(), lr=0.1) for k in (0, 5)]


def clipped_on_one_stage() -> Seen:
    outcomes = check_gradients(OfOneLayer, precision="32-true")
    return outcomes[-1].model.stepped


def test_clipping_by_value_where_some_stages_have_no_gradients_of_the_optimizer() -> None:
    for grads in run(clipped_on_one_stage, timeout_seconds=170):
        of_layers = [{name: grad for name, grad in grads.items() if f".{k}." in name} for k in (0, 5)]
        assert [largest(each) for each in of_layers] == pytest.approx([LIMIT] * 2)


class Poisoned(Small):
    """Makes NaN in the backward pass of its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module[1] = NanGradient()


def poisoned() -> list[str]:
    pipelines = [(RPCSequentialStrategy(balance, microbatches=2), len(balance)) for balance in ([3, 3], [1, 1, 4])]
    messages = []
    for strategy, devices in [(one_device(), 1), *pipelines]:
        with pytest.raises(RuntimeError) as error:
            fit(Poisoned, strategy, devices, detect_anomaly=True)
        messages.append(str(error.value))
    return messages


def test_anomaly_on_a_worker() -> None:
    messages = run(poisoned, timeout_seconds=55)  # rpc_timeout_sec is 60: nobody waited for the failed stage
    assert messages == ["Function 'SqrtBackward0' returned nan values in its 0th output."] * 3


def clipped_nan() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        fit(Poisoned, RPCSequentialStrategy([2, 2, 2], microbatches=2), 3, gradient_clip_val=1.0, max_steps=1)
    return [str(warning.message) for warning in caught if "not finite" in str(warning.message)]


def test_a_norm_that_is_not_finite_names_the_stage() -> None:
    where = r"parameter 0.{} of stage 0 \(layers 0 to 1: Linear, NanGradient\)"
    (message,) = run(clipped_nan)
    assert re.fullmatch(
        rf"the norm of the gradients is nan: not finite are those of {where.format('weight')}; {where.format('bias')}",
        message,
    )
