"""Each function of ``hooks`` replaces a method of one object, and what it returns puts the original back."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import (
    Callback,
    ModelCheckpoint,
    ModelSummary,
)
from pytorch_lightning.plugins.precision import MixedPrecision, Precision
from pytorch_lightning.profilers import PyTorchProfiler
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from strategies.lightning.hooks import (
    GradientOperations,
    add_to_progress_bar,
    after_backward,
    around_stop,
    before_file_exists,
    collect_logs,
    follow_precision,
    overridden_gradient_hooks,
    run_hooks_within,
    show_summary,
    steps_may_run_in_backward,
)


class Elsewhere:
    """The gradients of other processes: notes what is done to them, and finds an infinite one if told."""

    def __init__(self, finds_infinite: bool = False) -> None:
        self.calls: list[tuple[str, Any, Any]] = []
        self._finds_infinite = finds_infinite

    def clip_norm(self, optimizer: Optimizer, limit: float) -> None:
        self.calls.append(("norm", optimizer, limit))

    def clip_value(self, optimizer: Optimizer, limit: float) -> None:
        self.calls.append(("value", optimizer, limit))

    def start_unscaling(self, optimizer: Optimizer, inv_scale: Tensor, allow_fp16: bool) -> Any:
        self.calls.append(("unscale", optimizer, inv_scale.item()))
        return lambda found: found.fill_(1.0) if self._finds_infinite else found

    def operations(self) -> GradientOperations:
        return GradientOperations(self.clip_norm, self.start_unscaling, self.clip_value)


def optimizer_with_gradient(gradient: float = 8.0) -> SGD:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.full((1,), gradient)
    return SGD([parameter], lr=1.0)


def gradient_of(optimizer: Optimizer) -> float:
    gradient: float = optimizer.param_groups[0]["params"][0].grad.item()
    return gradient


def test_clipping_reaches_all_processes_until_it_is_undone() -> None:
    precision, elsewhere, optimizer = Precision(), Elsewhere(), optimizer_with_gradient()
    undo = follow_precision(precision, elsewhere.operations())
    precision.clip_grad_by_norm(optimizer, 2.0)
    precision.clip_grad_by_value(optimizer, 3.0)
    assert elsewhere.calls == [("norm", optimizer, 2.0), ("value", optimizer, 3.0)]
    assert gradient_of(optimizer) == 8.0
    for function in undo:
        function()
    precision.clip_grad_by_value(optimizer, 3.0)
    assert len(elsewhere.calls) == 2 and gradient_of(optimizer) == 3.0


@pytest.mark.parametrize("finds_infinite", [False, True])
def test_an_infinite_gradient_of_another_process_skips_the_step(finds_infinite: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    precision, elsewhere = MixedPrecision("16-mixed", "cpu", scaler=scaler), Elsewhere(finds_infinite)
    optimizer = optimizer_with_gradient()
    undo = follow_precision(precision, elsewhere.operations())
    scaler.scale(torch.zeros(()))  # creates the scale
    scaler.unscale_(optimizer)
    assert elsewhere.calls == [("unscale", optimizer, 0.25)] and gradient_of(optimizer) == 2.0
    scaler.step(optimizer)
    scaler.update()
    stepped = optimizer.param_groups[0]["params"][0].item() != 0
    assert stepped is not finds_infinite and scaler.get_scale() == (2.0 if finds_infinite else 4.0)
    for function in undo:
        function()
    assert not vars(precision).keys() & {"clip_grad_by_norm", "clip_grad_by_value"}
    assert "_unscale_grads_" not in vars(scaler)


def test_after_backward_runs_before_hooks_of_the_user() -> None:
    precision, order = Precision(), []

    class Model(LightningModule):
        def on_after_backward(self) -> None:
            order.append("hook")

    model, loss = Model(), torch.zeros((), requires_grad=True)
    undo = after_backward(precision, lambda: order.append("function"))
    precision.backward(loss, model, None)
    model.on_after_backward()
    undo()
    precision.backward(loss, model, None)
    assert order == ["function", "hook"] and loss.grad is not None


def test_only_overridden_hooks_run_within_the_context() -> None:
    within: list[bool] = []
    entered = [False]

    class Own(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            within.append(entered[0])

    @contextmanager
    def context() -> Iterator[None]:
        entered[0] = True
        yield
        entered[0] = False

    callback: Any = Own()
    undo = run_hooks_within(callback, ["on_train_start", "on_train_end"], context)
    callback.on_train_start(None, None)
    assert len(undo) == 1 and "on_train_end" not in vars(callback)
    undo[0]()
    callback.on_train_start(None, None)
    assert within == [True, False]


def test_a_summary_and_the_look_for_a_file_and_the_stop_of_a_profiler_are_replaced() -> None:
    summary: Any = ModelSummary()
    undo_summary = show_summary(summary, lambda trainer, model: "stages")
    assert summary._summary(None, None) == "stages"

    waited: list[str] = []
    checkpoint, trainer = ModelCheckpoint(), Trainer(logger=False, barebones=True)
    undo_look = before_file_exists(checkpoint, lambda: waited.append("waited"))
    assert not checkpoint.file_exists("no such file", trainer) and waited == ["waited"]

    profiler, stopped = PyTorchProfiler(), []
    undo_stop = around_stop(profiler, lambda stop, action_name: stopped.append(action_name))
    profiler.stop("an action")
    assert stopped == ["an action"]

    for undo in (undo_summary, undo_look, undo_stop):
        undo()
    assert "_summary" not in vars(summary) and "file_exists" not in vars(checkpoint) and "stop" not in vars(profiler)


def test_logged_values_are_collected_with_the_names_of_their_arguments() -> None:
    model, collected = LightningModule(), []
    undo = collect_logs(model, lambda: lambda *call: collected.append(call))
    model.log("loss", 1.0, True, on_epoch=True)
    assert collected == [("loss", 1.0, {"prog_bar": True, "on_epoch": True})]
    undo()
    assert "log" not in vars(model)


class Logging(LightningModule):
    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        vars(self).setdefault("logged", []).append((name, value, args, kwargs))


def test_logged_values_that_nobody_collects_go_to_the_model() -> None:
    model = Logging()
    collect_logs(model, lambda: None)
    model.log("loss", 1.0, True, on_epoch=True)
    assert vars(model)["logged"] == [("loss", 1.0, (True,), {"on_epoch": True})]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_model_whose_logged_values_are_collected_can_be_copied(copied: Callable[[Any], Any]) -> None:
    model = Logging()
    collect_logs(model, lambda: None)
    other = copied(model)
    other.log("loss", 1.0)
    assert vars(other)["logged"] == [("loss", 1.0, (), {})] and "logged" not in vars(model)


def test_who_reads_gradients_before_the_step() -> None:
    class Reading(LightningModule):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            pass

    class Stepping(LightningModule):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            pass

    class Watching(Callback):
        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            pass

    def trainer(**settings: Any) -> Trainer:
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        return Trainer(accelerator="cpu", **{**quiet, **settings})

    plain, watched, precision = trainer(), trainer(callbacks=[Watching()]), Precision()
    scaling = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    manual = LightningModule()
    manual.automatic_optimization = False
    assert steps_may_run_in_backward(plain, LightningModule(), precision)
    assert not steps_may_run_in_backward(plain, LightningModule(), scaling)
    assert not steps_may_run_in_backward(plain, manual, precision)
    assert not steps_may_run_in_backward(plain, Reading(), precision)
    assert not steps_may_run_in_backward(plain, Stepping(), precision)
    assert not steps_may_run_in_backward(watched, LightningModule(), precision)
    assert not steps_may_run_in_backward(trainer(gradient_clip_val=1.0), LightningModule(), precision)
    assert overridden_gradient_hooks(watched, Reading()) == ["on_before_optimizer_step", "Watching.on_after_backward"]


def test_added_items_are_the_first_in_a_progress_bar() -> None:
    """At 80 columns, tqdm leaves out the last ones."""
    bar = SimpleNamespace(get_metrics=lambda *_: {"v_num": 0, "train_loss": 4.5})
    undo = add_to_progress_bar(bar, lambda: {"use": "83|91%"})
    assert list(bar.get_metrics(None, None)) == ["use", "v_num", "train_loss"]
    undo()
    assert list(bar.get_metrics(None, None)) == ["v_num", "train_loss"]
