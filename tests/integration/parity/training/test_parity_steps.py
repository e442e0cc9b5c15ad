"""Frozen layers, optimizers that take turns, steps taken in every way: the gradients of each stage at every moment."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from harness import run
from parity import Fresh, Small, batches, check, compare, fit, one_device
from parity_parts import Doubled, TracedAdamW, assert_same_gradients, gradients
from pytorch_lightning.callbacks import BaseFinetuning
from torch import Tensor, optim

from strategies import RPCSequentialStrategy, StrategyPlugin, ZeROStrategy


class Thaw(BaseFinetuning):
    """Trains the last stages, then the first ones, then nearly all; a frozen layer keeps what its optimizer knows."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.sequential_module[k] for k in (0, 2)])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: optim.Optimizer) -> None:
        layers = pl_module.sequential_module
        if epoch == 1:
            self.make_trainable([layers[0], layers[2]])
            self.freeze([layers[3], layers[5]])
        if epoch == 2:
            self.make_trainable(layers[5])
            layers[2].bias.requires_grad_(False)


class Frozen(Small):
    """Keeps the gradients of each step; a part of the last layer is frozen by the user."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module[5].bias.requires_grad_(False)
        self.seen: list[dict[str, Tensor | None]] = []

    def on_after_backward(self) -> None:
        self.seen.append(gradients(self))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def frozen() -> list[set[str]]:
    single, *pipelines = check(Frozen, callbacks=Fresh(lambda: [Thaw()]), max_epochs=3)
    for outcome in pipelines:
        assert_same_gradients(outcome.model.seen, single.model.seen)
    return [short_names(step) for step in pipelines[-1].model.seen[::4]]


def short_names(step: dict[str, Tensor | None]) -> set[str]:
    return {name.removeprefix("sequential_module.") for name, grad in step.items() if grad is not None}


def test_frozen_layers() -> None:
    """On three stages [2, 2, 2]; layers 1 and 4 have no parameters, the bias of layer 5 is frozen by the user."""
    assert run(frozen, timeout_seconds=170) == [
        {"3.weight", "3.bias", "5.weight"},
        {"0.weight", "0.bias", "2.weight", "2.bias"},
        {"0.weight", "0.bias", "2.weight", "5.weight", "5.bias"},
    ]


# No optimizer


class WithoutOptimizer(Small):
    def configure_optimizers(self) -> None:
        return None

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        if isinstance(self.trainer.strategy, StrategyPlugin):
            assert self.trainer.strategy.clip_grad_norm_(0.1).item() == 0
        return super().training_step(batch, batch_idx)


def without_optimizer() -> None:
    single, pipeline = check(WithoutOptimizer, stages=(2,), gradient_clip_val=0.1, max_epochs=1)
    assert single.trainer.global_step == pipeline.trainer.global_step == 4
    options = {"gradient_clip_val": 0.1, "max_epochs": 1, "use_distributed_sampler": False}
    zero = fit(WithoutOptimizer, ZeROStrategy(stage=2), 1, **options)
    compare(zero, single)
    assert zero.trainer.global_step == 4
    torch.distributed.destroy_process_group()


def test_without_optimizer() -> None:
    run(without_optimizer, timeout_seconds=170, allow=("env", "port"))


# Several optimizers


class InTurn(Doubled, Small):
    """Optimizers of the first stage, the last one, the middle, and both ends take turns at each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seen: list[dict[str, Tensor | None]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.seen.append(gradients(self))
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            assert all(p.requires_grad for p in self.parameters())

    def configure_optimizers(self) -> Any:
        first, _, norm, middle, _, last = self.sequential_module
        return [
            TracedAdamW(first.parameters(), lr=0.02),
            optim.SGD(last.parameters(), lr=0.1, momentum=0.9),
            optim.Adagrad([*norm.parameters(), *middle.parameters()], lr=0.1),
            optim.RMSprop([last.weight, first.weight], lr=0.01),
        ]


def in_turn() -> list[set[str]]:
    single, *pipelines = check(InTurn, precision="32-true")
    for outcome in pipelines:
        assert_same_gradients(outcome.model.seen, single.model.seen)
    return [short_names(step) for step in pipelines[-1].model.seen[:4]]


def test_optimizers_in_turn() -> None:
    """Each clears only its own gradients, so those of the one before are still there, as in one process."""
    first, last, middle = {"0.weight", "0.bias"}, {"5.weight", "5.bias"}, {"2.weight", "2.bias", "3.weight", "3.bias"}
    assert run(in_turn, timeout_seconds=170) == [first, first | last, first | last | middle, first | last | middle]


# One optimizer, stepped by Lightning, through Lightning's wrapper, and by itself


class EveryWay(Small):
    """Takes each step in another way, clears gradients in another way, and notes what happens in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(2))
        self.events: list[str] = []
        self.seen: list[dict[str, Tensor | None]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.sequential_module(x)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.automatic_optimization = batch_idx == 0
        self.events.append(f"batch {batch_idx}")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        if batch_idx == 0:
            return self.loss(batch)
        wrapper, bare = self.optimizers(), self.optimizers(use_pl_optimizer=False)
        optimizer = (wrapper, bare)[batch_idx % 2]
        if batch_idx <= 2:
            self.closure(batch, (wrapper, bare)[batch_idx - 1], set_to_none=batch_idx == 1)
            optimizer.step()
        else:
            holder = (self, self.sequential_module)[batch_idx - 3]
            optimizer.step(closure=lambda: self.closure(batch, holder, set_to_none=batch_idx == 4))
        return None

    def closure(self, batch: tuple[Tensor, Tensor], holder: Any, set_to_none: bool) -> Tensor:
        loss = self.loss(batch)
        holder.zero_grad(set_to_none=set_to_none)
        self.seen.append(gradients(self))
        self.manual_backward(loss)
        return loss

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=epoch == 0)
        self.seen.append(gradients(self))

    def on_after_backward(self) -> None:
        self.events.append("backward")
        self.seen.append(gradients(self))

    def on_before_optimizer_step(self, optimizer: optim.Optimizer) -> None:
        self.events.append("before step")

    def configure_optimizers(self) -> Any:
        return optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Clears(Small):
    """Clears gradients by a ``zero_grad`` that it overrides, that an object has of its own, of a layer, and by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.seen: list[dict[str, Tensor | None]] = []
        self.sequential_module.zero_grad = partial(self.called, self.sequential_module.zero_grad)

    def called(self, original: Callable[[bool], None], set_to_none: bool = True) -> None:
        self.calls.append("replaced")
        original(set_to_none)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls.append("overridden")
        super().zero_grad(set_to_none)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: optim.Optimizer) -> None:
        layers = self.sequential_module
        if batch_idx < 2:
            self.zero_grad(set_to_none=batch_idx == 0)
        elif batch_idx == 2:
            layers.zero_grad()
        elif batch_idx == 3:
            layers[0].zero_grad()
            layers[5].zero_grad(set_to_none=False)
        else:
            for parameter in layers[2].parameters():
                parameter.grad = None
        self.seen.append(gradients(self))

    def on_after_backward(self) -> None:
        self.seen.append(gradients(self))

    def configure_optimizers(self) -> Any:
        return optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def cleared() -> dict[str, list[str]]:
    train, settings = partial(batches, (8, 7, 5, 8, 4)), {"microbatches": 3}
    single = fit(Clears, one_device(), 1, train=train)
    calls = {"one process": single.model.calls}
    for schedule in ("gpipe", "1f1b"):
        strategy = RPCSequentialStrategy([2, 2, 2], schedule=schedule, **settings)
        outcome = fit(Clears, strategy, 3, train=train)
        compare(outcome if schedule == "gpipe" else replace(outcome, losses=single.losses), single)
        assert_same_gradients(outcome.model.seen, single.model.seen)
        calls[schedule] = outcome.model.calls
    return calls


def test_ways_to_clear_gradients() -> None:
    calls = run(cleared, timeout_seconds=170)
    assert calls["gpipe"] == calls["1f1b"] == calls["one process"]
    assert calls["one process"].count("overridden") >= 4 and calls["one process"].count("replaced") == 2


class Watched(RPCSequentialStrategy):
    """Notes when the contract's hooks are called."""

    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        self.lightning_module.events.append(f"pre_backward {closure_loss.item() == self.lightning_module.losses[-1]}")

    def post_optimizer_step(self, optimizer: optim.Optimizer) -> None:
        super().post_optimizer_step(optimizer)
        self.lightning_module.events.append(f"after step of {type(optimizer).__name__}")


def every_way() -> list[tuple[list[str], list[dict[str, Tensor | None]]]]:
    train = partial(batches, (8, 7, 5, 8, 4))
    single = fit(EveryWay, one_device(), 1, train=train)
    pipelines = [
        fit(EveryWay, Watched(balance, microbatches=3), len(balance), train=train) for balance in ([3, 3], [2, 2, 2])
    ]
    for outcome in pipelines:
        compare(outcome, single)
        assert_same_gradients(outcome.model.seen, single.model.seen)
    return [(outcome.model.events, outcome.model.seen) for outcome in pipelines]


def test_steps_in_every_way() -> None:
    """The wrapper steps batches 2 and 4, the bare optimizer 1 and 3, which Lightning knows nothing of."""
    expected = [
        event
        for batch in (0, 1, 2, 3, 4) * 2
        for event in (
            f"batch {batch}",
            "pre_backward True",
            "backward",
            *(["before step"] if batch in (0, 2, 4) else []),
            "after step of SGD",
        )
    ]
    for events, seen in run(every_way, timeout_seconds=170):
        assert events == expected
        cleared, computed = seen[::2], seen[1::2]
        assert len(cleared) == len(computed) == 10
        for gradients_after_backward in computed:
            for name, gradient in gradients_after_backward.items():
                assert gradient is not None and gradient.abs().sum() > 0, name
        assert {g is None for g in cleared[1].values()} == {True}
        for clearing in (cleared[2], cleared[3], cleared[5]):
            assert {g is None for g in clearing.values()} == {False}
            assert not any(g.any() for g in clearing.values() if g is not None)
        for clearing in (cleared[4], cleared[9]):
            assert {name for name, g in clearing.items() if g is not None} == {"scale"}
