"""Whatever the optimizers, groups, schedulers and frozen layers: a pipeline trains what one process trains."""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
from harness import run
from parity import WIDTH, Small, _even, alike, batches, check, fit
from parity_parts import Branches, Doubled, TracedAdamW, TracedSGD
from torch import Tensor, nn, optim
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler

from strategies import RPCSequentialStrategy
from strategies.checkpoint.consolidate import consolidate

# Many optimizers next to each other, each with a branch of the model that reaches through every stage

Make = Callable[[Any], optim.Optimizer]

KINDS: dict[str, Make] = {
    "sgd": partial(optim.SGD, lr=0.1, weight_decay=0.1),
    "momentum": partial(optim.SGD, lr=0.05, momentum=0.9, dampening=0.1),
    "nesterov": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adam": partial(optim.Adam, lr=0.02, amsgrad=True),
    "adam_foreach": partial(optim.Adam, lr=0.02, foreach=True),
    "adamw": partial(optim.AdamW, lr=0.02),
    "adamw_fused": partial(optim.AdamW, lr=0.02, fused=True),
    "adagrad": partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.1, lr_decay=0.1),
    "rmsprop": partial(optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "adadelta": partial(optim.Adadelta, lr=1.0),
    "adamax": partial(optim.Adamax, lr=0.02),
    "nadam": partial(optim.NAdam, lr=0.02),
    "radam": partial(optim.RAdam, lr=0.02),
    "adafactor": partial(optim.Adafactor, lr=0.02),
    "named": lambda parameters: optim.AdamW([(f"p{k}", p) for k, p in enumerate(parameters)], lr=0.02),
}

STEPS = 2 * 4
SCHEDULES: dict[str, tuple[Make, Callable[[Any], Any]]] = {
    "onecycle_betas": (
        partial(TracedAdamW, lr=0.01),
        partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=STEPS),
    ),
    "onecycle_momentum": (
        partial(TracedSGD, lr=0.01, momentum=0.9),
        partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=STEPS),
    ),
    "cyclic": (
        partial(TracedSGD, lr=0.01, momentum=0.9),
        partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=3),
    ),
    "sequential": (
        partial(TracedSGD, lr=0.1),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, STEPS)],
            milestones=[3],
        ),
    ),
    "chained": (
        partial(TracedAdamW, lr=0.1),
        lambda optimizer: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.7)]
        ),
    ),
    "plateau": (
        partial(TracedSGD, lr=0.1),
        partial(lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0, threshold=0.5),
    ),
    "rate_in_a_tensor": (  # which schedulers change in place
        lambda parameters: TracedAdamW(parameters, lr=torch.tensor(0.05)),
        partial(lr_scheduler.StepLR, step_size=1, gamma=0.7),
    ),
}


class SideBySide(Doubled, Small):
    """A branch for each optimizer, so that the name of a parameter tells whose it is."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.names = [*KINDS, *SCHEDULES]
        shapes = [(WIDTH, 4), None, (4, 4), None, (4, 3), (3, 2)]
        layers = [nn.Tanh() if shape is None else Branches(self.names, partial(nn.Linear, *shape)) for shape in shapes]
        self.sequential_module = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.sequential_module(x[:, None].expand(-1, len(self.names), -1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        losses = (self(batch[0]) - batch[1][:, None]).square().mean((0, 2))
        self.losses.extend(losses.tolist())
        self.manual_backward(losses.sum())
        for optimizer in self.optimizers():
            optimizer.step()
        for name, scheduler in zip(SCHEDULES, self.lr_schedulers(), strict=True):
            scheduler.step(*[losses[self.names.index(name)].item()] if name == "plateau" else ())

    def configure_optimizers(self) -> Any:
        makes = {**KINDS, **{name: make for name, (make, _) in SCHEDULES.items()}}
        made = {}
        for name, make in makes.items():
            made[name] = make([p for full, p in self.named_parameters() if f".{name}." in full])
        return list(made.values()), [schedule(made[name]) for name, (_, schedule) in SCHEDULES.items()]


def side_by_side() -> dict[str, list[float]]:
    for outcome in check(SideBySide, precision="32-true"):
        states = [state["state"] for state in outcome.optimizers]
        for name, optimizer in zip([*KINDS, *SCHEDULES], states, strict=True):
            assert len(optimizer) == (0 if name == "sgd" else 8), name
        traces = {name: [s["trace"] for s in states[k].values()] for k, name in enumerate(SCHEDULES, start=len(KINDS))}
    for name, (first, *others) in traces.items():
        assert all(trace == first for trace in others), name
    return {name: every[0] for name, every in traces.items()}


def test_optimizers_and_schedulers() -> None:
    traces = run(side_by_side, timeout_seconds=170)
    for name, trace in traces.items():
        numbers = 3 if name in ("onecycle_betas", "chained", "rate_in_a_tensor") else 2
        steps = [tuple(trace[k : k + numbers]) for k in range(0, len(trace), numbers)]
        assert len(steps) == STEPS, name
        assert len(set(steps)) >= (2 if name == "plateau" else 5), (name, steps)
        moves = name in ("onecycle_betas", "onecycle_momentum", "cyclic")
        assert (len({rest for _, *rest in map(list, steps) for rest in rest[:1]}) > 1) == moves, name


class Grouped(Small):
    """Groups over all stages, on the first only and on the last only.

    Three schedulers multiply their rates: every second step, every epoch, and when the validation loss stays.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.sequential_module(x)

    def configure_optimizers(self) -> Any:
        first, _, norm, middle, _, last = self.sequential_module
        groups = [
            {"params": [last.weight, first.weight, norm.weight], "weight_decay": 0.1},
            {"params": [norm.bias, last.bias, self.scale], "lr": 0.05, "betas": (0.8, 0.9)},
            {"params": [first.bias], "lr": 0.02},
            {"params": [middle.weight, middle.bias], "amsgrad": True},
        ]
        optimizer = TracedAdamW(groups, lr=0.1)
        every_second = lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.9)
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.99)
        return [optimizer], [
            {"scheduler": every_second, "interval": "step", "frequency": 2},
            lr_scheduler.ExponentialLR(optimizer, 0.7),
            {"scheduler": plateau, "monitor": "val_loss"},
        ]


def grouped() -> list[list[float]]:
    outcomes = check(Grouped, val=batches, max_epochs=3)
    states = [state for _, state in sorted(outcomes[-1].optimizers[0]["state"].items())]
    assert [("max_exp_avg_sq" in state) for state in states] == [False] * 7 + [True] * 2
    return [state["trace"] for state in states]


def test_groups_and_the_schedulers_that_lightning_steps() -> None:
    """The first epoch's validation loss is the best so far, the second one's is not better by the threshold."""
    traces = run(grouped, timeout_seconds=170)
    factors = [0.9 ** (step // 2) * 0.7 ** (step // 4) * (0.5 if step >= 8 else 1.0) for step in range(12)]
    for place, trace in enumerate(traces):
        rate = 0.05 if place in (3, 4, 5) else 0.02 if place == 6 else 0.1
        assert trace[::3] == pytest.approx([rate * factor for factor in factors]), place
        assert set(trace[1::3]) == ({0.8} if place in (3, 4, 5) else {0.9}), place


# Methods of optimizers


class Averaged(Small):
    """A Schedule-Free optimizer, which has other weights for validation and checkpoints than for training."""

    def __init__(self, make: Make, folder: str) -> None:
        super().__init__()
        self.make, self.folder = make, folder
        self.saved: list[dict[str, Any]] = []

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = mse_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss, batch_size=len(batch[0]), on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_start(self) -> None:
        self.optimizers().train()

    def on_validation_epoch_start(self) -> None:
        self.optimizers(use_pl_optimizer=False).eval()

    def on_validation_epoch_end(self) -> None:
        self.optimizers(use_pl_optimizer=False).train()

    def on_train_epoch_end(self) -> None:
        path = Path(self.folder) / f"{self.current_epoch}.ckpt"
        training = {name: value.clone() for name, value in self.state_dict().items()}
        self.trainer.save_checkpoint(path)
        if path.is_dir():
            consolidate(path, path := path.with_suffix(".whole"))
        self.saved.append(torch.load(path, weights_only=True))
        for name, value in self.saved[-1]["state_dict"].items():
            assert not torch.equal(value.cpu(), training[name].cpu()), name

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """After weights and states have been gathered; in one process they are the model's own tensors."""
        self.optimizers().eval()


def schedule_free() -> None:
    adamw = partial(schedulefree.AdamWScheduleFree, lr=0.05, warmup_steps=3, weight_decay=0.1)
    sgd = partial(schedulefree.SGDScheduleFree, lr=0.5, foreach=False)
    cases = [(adamw, {"schedule": "gpipe"}), (sgd, {"schedule": "1f1b", "state_dict_type": "sharded"})]
    for make, strategy in cases:
        with tempfile.TemporaryDirectory() as folder:
            single, pipeline = check(partial(Averaged, make, folder), stages=(2,), val=batches, strategy=strategy)
        assert len(single.model.saved) == 2
        for ours, theirs in zip(pipeline.model.saved, single.model.saved, strict=True):
            alike(ours["state_dict"], theirs["state_dict"], 1e-9, "state_dict")
            (one,), (other,) = ours["optimizer_states"], theirs["optimizer_states"]
            assert one["param_groups"] == other["param_groups"]
            alike(one["state"], other["state"], 1e-9, "optimizer state")


def test_optimizers_with_modes() -> None:
    run(schedule_free, timeout_seconds=170)


class Reshaped(optim.SGD):
    """An optimizer with methods of all kinds, which call each other, and an argument of its step."""

    def step(self, closure: Any = None, *, factor: float = 1.0) -> Any:
        result = super().step(closure)
        self.note(factor)  # in the step, which every process makes
        return result

    def note(self, factor: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("noted", []).append(factor)

    @torch.no_grad()
    def grow(self, factor: float) -> "Reshaped":
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(factor)
                self.state[p]["grown"] = self.state[p].get("grown", 0) + 1
        return self

    def grow_twice(self, *, factors: tuple[float, float]) -> None:
        for factor in factors:
            self.grow(factor)

    def rate(self) -> float:
        return self.param_groups[0]["lr"]

    def largest(self) -> float:
        return max(p.abs().max().item() for group in self.param_groups for p in group["params"])

    def weights(self) -> list[Tensor]:
        return [p.detach() for group in self.param_groups for p in group["params"]]

    def apply(self, function: Any) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                function(p)


class Reshaping(Small):
    def configure_optimizers(self) -> Any:
        return Reshaped(self.parameters(), 0.1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        assert optimizer.rate() == 0.1
        if batch_idx == 1:
            optimizer.grow(1.1)
        if batch_idx == 2:
            optimizer.grow_twice(factors=(0.9, 1.2))
        if batch_idx == 3 and isinstance(self.trainer.strategy, RPCSequentialStrategy):
            for method, arguments, message in (
                ("largest", (), r"Reshaped\.largest returned .* for those of stage 0.*so neither is the value for all"),
                ("weights", (), r"Reshaped\.weights returned a Tensor"),
                ("apply", (torch.zero_,), r"Reshaped\.apply was called with a builtin_function_or_method"),
            ):
                with pytest.raises((RuntimeError, TypeError), match=message):
                    getattr(optimizer, method)(*arguments)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        """Runs in the closure, and so in the step: it is the user who calls."""
        self.optimizers().grow(1.01)
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer.step(optimizer_closure, factor=1.0 + batch_idx)
        if isinstance(self.trainer.strategy, RPCSequentialStrategy):
            with pytest.raises(TypeError, match=r"Reshaped\.step was called with a Tensor"):
                optimizer.step(factor=torch.ones(1))


def methods() -> None:
    _, pipeline = check(Reshaping, stages=(2,))
    states = pipeline.optimizers[0]["state"].values()
    assert all(state["noted"] == [1.0, 2.0, 3.0, 4.0] * 2 for state in states)
    assert {state["grown"] for state in states} == {2 * (1 + 2 + 4)}


def test_methods_of_optimizers() -> None:
    run(methods, timeout_seconds=170)


class ClearsByKeyword(optim.SGD):
    """An optimizer whose ``zero_grad`` takes no positional argument."""

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)


class ClearedByKeyword(Small):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: optim.Optimizer) -> None:
        optimizer.zero_grad(**({"set_to_none": False} if batch_idx % 2 else {}))

    def configure_optimizers(self) -> Any:
        return ClearsByKeyword(self.parameters(), lr=0.1, momentum=0.9)


def cleared_by_keyword() -> None:
    check(ClearedByKeyword, stages=(2,))


def test_zero_grad_without_positional_arguments() -> None:
    run(cleared_by_keyword, timeout_seconds=170)


# Random numbers


class DrawsLater(optim.SGD):
    """Draws random numbers in its third step, and only for a parameter of a certain shape, which the trial has not."""

    def __init__(self, params: Any, shape: tuple[int, ...]) -> None:
        super().__init__(params, 0.1)
        self.shape, self.number = shape, 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.number += 1
        if self.number == 3 and any(p.shape == self.shape for group in self.param_groups for p in group["params"]):
            torch.rand(1)
        return loss


class DrawingLater(Small):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def configure_optimizers(self) -> Any:
        linear = [layer for layer in self.sequential_module if isinstance(layer, nn.Linear)]
        return DrawsLater(self.parameters(), tuple(linear[self.layer].weight.shape))


def drawing_later(cases: Sequence[tuple[int, str]]) -> list[str]:
    seen = []
    for layer, schedule in cases:
        strategy = RPCSequentialStrategy(balance=_even(Small, 2), microbatches=3, schedule=schedule)
        models: list[DrawingLater] = []

        def make(layer: int = layer, models: list[DrawingLater] = models) -> DrawingLater:
            models.append(DrawingLater(layer))
            return models[0]

        try:
            fit(make, strategy, 2)
        except Exception as error:
            passes = 3 if schedule == "1f1b" else 1  # which runs training_step for each micro-batch
            seen.append(f"{len(models[0].losses) / passes} steps, {type(error).__name__}: {error}")
    return seen


@pytest.mark.parametrize(
    "cases",
    [[(0, "gpipe"), (-1, "1f1b")], pytest.param([(0, "1f1b"), (-1, "gpipe")], marks=pytest.mark.slow)],
    ids=["some", "others"],
)
def test_an_optimizer_that_draws_random_numbers_late_ends_the_run(cases: list[tuple[int, str]]) -> None:
    """On a worker or on the driver, in the step in which it draws."""
    seen = run(drawing_later, cases, timeout_seconds=170)
    assert len(seen) == 2
    for said in seen:
        assert "DrawsLater draws random numbers in its step (from torch's generator on the CPU)" in said, said
        assert said.startswith("3.0 steps"), said
