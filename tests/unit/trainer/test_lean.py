"""The lean training step: hooks, their order, logged values and errors are those of Lightning's Trainer."""

import copy
import inspect
import itertools
import logging
import pickle
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import TQDMProgressBar
from pytorch_lightning.profilers import SimpleProfiler
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from strategies.lightning.compat import ResultCollection, TrainingEpochLoop, current_hook
from trainer import Trainer, lean

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 2,
}
Make = Callable[..., pl.Trainer]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen.append(("training_step", current_hook(self)))
        self.in_step(batch_idx)
        return self.layer(batch[0]).square().mean()

    def in_step(self, batch_idx: int) -> None:
        pass

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.seen.append(("validation_step", current_hook(self)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(27.0).view(9, 3)), batch_size=2)


def fit(make: Make, model: pl.LightningModule, *, bar: bool = False, **settings: Any) -> pl.Trainer:
    made = make(**QUIET, enable_progress_bar=bar, **settings)
    made.fit(model, loader(), loader())
    return made


def under_both(make_model: Callable[[], Model], **settings: Any) -> tuple[Model, Model]:
    """Fit a new model under Lightning's Trainer and under Relay's, each with new callbacks."""
    models = []
    for make in (pl.Trainer, Trainer):
        model = make_model()
        own = {name: value() if name in ("callbacks", "profiler") else value for name, value in settings.items()}
        model.fitted = [fit(make, model, **own)]
        models.append(model)
    return models[0], models[1]


def hooks_of(base: type) -> list[str]:
    """Names of the hooks of a base class, also of those that do something."""
    more = ["optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping", "batch_to_device"]
    more += ["transfer_batch_to_device", "setup", "teardown"]
    return [name for name in dir(base) if (name.startswith("on_") or name in more) and callable(getattr(base, name))]


def recording(name: str, original: Callable[..., Any], who: str, seen: list[Any], module: Any) -> Callable[..., Any]:
    def hook(*args: Any, **kwargs: Any) -> Any:
        model = module() if callable(module) and not isinstance(module, nn.Module) else module
        seen.append((who, name, current_hook(model), len(args), sorted(kwargs)))
        return original(*args, **kwargs)

    return hook


class OverridesAll(Model):
    """Each hook of the model and of two callbacks records itself."""

    def __init__(self) -> None:
        super().__init__()
        for name in hooks_of(pl.LightningModule):
            setattr(self, name, recording(name, getattr(self, name), "model", self.seen, self))

    def configure_callbacks(self) -> list[pl.Callback]:
        return [recording_callback("first", self), recording_callback("second", self)]


def recording_callback(who: str, model: Model) -> pl.Callback:
    kind = type(who, (pl.Callback,), {})  # Lightning takes two of one class for one
    callback = kind()
    for name in hooks_of(pl.Callback):
        setattr(callback, name, recording(name, getattr(callback, name), who, model.seen, model))
    return callback


def test_all_hooks_run_in_lightnings_order() -> None:
    lightnings, relays = under_both(OverridesAll, accumulate_grad_batches=2, gradient_clip_val=0.1)
    assert len(set(map(str, lightnings.seen))) > 60
    assert relays.seen == lightnings.seen
    assert torch.equal(relays.layer.weight, lightnings.layer.weight)


def test_a_model_without_hooks_learns_the_same() -> None:
    lightnings, relays = under_both(Model)
    assert relays.seen == lightnings.seen
    assert torch.equal(relays.layer.weight, lightnings.layer.weight)


class Attaches(Model):
    """In its third step the model attaches hooks to itself, its class, the strategy and callbacks."""

    def in_step(self, batch_idx: int) -> None:
        if self.trainer.current_epoch or batch_idx != 2:
            return
        for name in ("on_after_backward", "on_before_zero_grad", "on_train_batch_end", "on_train_batch_start"):
            setattr(self, name, recording(name, getattr(self, name), "model", self.seen, self))
        callbacks = self.trainer.callbacks
        for name in ("on_before_optimizer_step", "on_train_batch_end"):
            setattr(callbacks[0], name, recording(name, getattr(callbacks[0], name), "there", self.seen, self))
        callbacks.append(recording_callback("later", self))
        own = type(self)
        own.on_before_optimizer_step = lambda model, optimizer: model.seen.append("of the class")
        strategy, precision = self.trainer.strategy, self.trainer.precision_plugin
        for holder, name in ((strategy, "on_train_batch_start"), (strategy, "backward"), (precision, "pre_backward")):
            setattr(holder, name, recording(name, getattr(holder, name), "plug-in", self.seen, self))


def test_hooks_attached_in_mid_run_run() -> None:
    lightnings, relays = under_both(
        lambda: type("Attaching", (Attaches,), {})(), callbacks=lambda: [pl.Callback()], max_steps=-1
    )
    assert {"of the class", "model", "there", "later", "plug-in"} <= {
        entry if isinstance(entry, str) else entry[0] for entry in lightnings.seen
    }
    assert relays.seen == lightnings.seen


def calls_in(run: Callable[[], Any], *functions: Any) -> Counter[str]:
    """Count the calls of functions by their names."""
    counted: Counter[str] = Counter()
    codes = {inspect.unwrap(each).__code__: each.__qualname__ for each in functions}

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in codes:
            counted[codes[frame.f_code]] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return counted


COUNTED = (
    nn.Module.__setattr__,
    pl.LightningModule.on_train_batch_start,
    pl.LightningModule.on_before_zero_grad,
    pl.LightningModule.clip_gradients,
    pl.Callback.on_train_batch_end,
    pl.profilers.Profiler.profile,
    inspect.getfullargspec,
)


def test_what_nobody_overrides_is_not_called() -> None:
    settings: dict[str, Any] = {"callbacks": [pl.Callback()], "limit_val_batches": 0}
    theirs = calls_in(lambda: fit(pl.Trainer, Model(), **settings), *COUNTED)
    relays = calls_in(lambda: fit(Trainer, Model(), **settings), *COUNTED)
    after = calls_in(lambda: fit(pl.Trainer, Model(), **settings), *COUNTED)
    steps = 10
    assert after == theirs  # a plain Trainer in the same process is as it was
    assert theirs["ModelHooks.on_train_batch_start"] == theirs["Callback.on_train_batch_end"] == steps
    for name in ("ModelHooks.on_train_batch_start", "ModelHooks.on_before_zero_grad", "Callback.on_train_batch_end"):
        assert relays[name] == 0, name
    assert relays["LightningModule.clip_gradients"] == 0
    assert theirs["Module.__setattr__"] - relays["Module.__setattr__"] >= 40 * steps
    assert theirs["Profiler.profile"] - relays["Profiler.profile"] >= 15 * steps
    assert theirs["getfullargspec"] - relays["getfullargspec"] == steps - 1


OF_EPOCHS = (
    pl.profilers.Profiler.profile,
    pl.profilers.PassThroughProfiler.start,
    pl.plugins.Precision.train_step_context,
    pl.core.hooks.move_data_to_device,
    pl.core.hooks.DataHooks.on_before_batch_transfer,
    pl.core.hooks.DataHooks.on_after_batch_transfer,
    pl.loops.optimization.automatic.ClosureResult.from_training_step_output,
    pl.utilities.model_helpers.is_overridden,
    ResultCollection.metrics,
    TrainingEpochLoop._update_learning_rates,
)
"""Functions that Lightning calls in every step, and that have no effect in the steps of most models."""


class Plain(Model):
    validation_step = pl.LightningModule.validation_step


def test_what_has_no_effect_is_not_called_in_steps() -> None:
    """The number of calls does not depend on the number of steps."""

    def calls(make: Make, num_batches: int) -> Counter[str]:
        return calls_in(lambda: fit(make, Plain(), limit_train_batches=num_batches), *OF_EPOCHS)

    of_two, of_five = calls(pl.Trainer, 2), calls(pl.Trainer, 5)
    assert [of_five[each.__qualname__] - of_two[each.__qualname__] >= 2 * 3 for each in OF_EPOCHS] == [True] * 10
    assert calls(Trainer, 2) == calls(Trainer, 5)


def test_a_step_makes_less_than_half_of_lightnings_calls() -> None:
    def calls(make: Make, num_batches: int) -> int:
        count = itertools.count()
        before = sys.getprofile()
        sys.setprofile(lambda frame, event, _: event == "call" and next(count))
        try:
            fit(make, Plain(), limit_train_batches=num_batches)
        finally:
            sys.setprofile(before)
        return next(count)

    for make in (pl.Trainer, Trainer):
        fit(make, Plain())  # what only the first run does
    theirs, own = (calls(make, 5) - calls(make, 3) for make in (pl.Trainer, Trainer))
    assert own < 0.45 * theirs, (own / 4, theirs / 4)


def test_other_sources_of_lightning_run_as_they_are() -> None:
    settings: dict[str, Any] = {"callbacks": [pl.Callback()], "limit_val_batches": 0}
    theirs = calls_in(lambda: fit(pl.Trainer, Model(), **settings), *COUNTED[1:])
    with mock.patch.object(lean, "has_known_sources", return_value=False):
        relays = calls_in(lambda: fit(Trainer, Model(), **settings), *COUNTED[1:])
    assert relays == theirs


def test_profilers_see_all_hooks() -> None:
    lightnings, relays = under_both(Model, profiler=SimpleProfiler, callbacks=lambda: [pl.Callback()])
    theirs, own = (
        {name: len(times) for name, times in model.fitted[0].profiler.recorded_durations.items()}
        for model in (lightnings, relays)
    )
    assert own == theirs
    assert theirs["[LightningModule]Model.on_train_batch_start"] == 10


def test_the_debug_log_shows_all_hooks(caplog: pytest.LogCaptureFixture) -> None:
    messages = []
    with caplog.at_level(logging.DEBUG, logger="pytorch_lightning.trainer.call"):
        for make in (pl.Trainer, Trainer):
            caplog.clear()
            fit(make, Model())
            messages.append([each.message for each in caplog.records if each.name == "pytorch_lightning.trainer.call"])
    assert messages[0] == messages[1]
    assert len(messages[0]) > 200


def test_nothing_stays_behind() -> None:
    model = Model()
    during: list[set[str]] = []
    model.in_step = lambda batch_idx: during.append({"log", "_call_batch_hook"} & set(vars(model)))
    made = fit(Trainer, model, max_steps=3)
    assert during == [{"log", "_call_batch_hook"}] * 3
    assert not {"log", "_call_batch_hook"} & set(vars(model))
    assert not {"pre_backward", "post_backward", "_after_closure"} & set(vars(made.precision_plugin))


def test_nothing_stays_behind_after_an_error() -> None:
    model = Model()
    model.in_step = mock.Mock(side_effect=KeyError("step"))
    with pytest.raises(KeyError, match="step"):
        fit(Trainer, model)
    assert not {"log", "_call_batch_hook"} & set(vars(model))


class Copies(Model):
    def in_step(self, batch_idx: int) -> None:
        if batch_idx == 1:
            self.copies = [copy.deepcopy(self), pickle.loads(pickle.dumps(self))]


def test_copies_made_in_a_step_are_models_of_their_own() -> None:
    model = Copies()
    fit(Trainer, model, max_steps=2)
    for own in model.copies:
        assert own.log.__self__ is own
        assert fit(Trainer, own).global_step == fit(pl.Trainer, own).global_step == 10


def test_a_log_attached_in_mid_run_is_called_and_stays() -> None:
    model, calls = Model(), []

    def step(batch_idx: int) -> None:
        model.log = partial(calls.append, batch_idx)
        model.log()

    model.in_step = step
    fit(Trainer, model, max_steps=3)
    assert calls == [0, 1, 2]
    assert isinstance(model.log, partial)


NUM_CALLS = 0


def test_overridden_methods_run_in_the_module_of_the_user() -> None:
    class Logs(Model):
        def in_step(self, batch_idx: int) -> None:
            self.log("loss", 1.0)

        def log(self, *args: Any, **kwargs: Any) -> None:
            global NUM_CALLS
            NUM_CALLS += 1
            super().log(*args, **kwargs)

    class Counts(pl.plugins.Precision):
        def pre_backward(self, *args: Any) -> Tensor:
            global NUM_CALLS
            NUM_CALLS += 100
            return super().pre_backward(*args)

    before = NUM_CALLS
    made = fit(Trainer, Logs(), plugins=[Counts()])
    assert NUM_CALLS - before == 10 * 101
    assert made.callback_metrics["loss"] == 1.0


# Logged values


class Logs(Model):
    """Logs each step in all ways, and notes what the Trainer shows."""

    def in_step(self, batch_idx: int) -> None:
        value = torch.tensor(float(batch_idx), requires_grad=True) * 3
        self.log("default", value)
        self.log("bar", value, prog_bar=True, on_epoch=True)
        for how in ("mean", "sum", "min", "max"):
            self.log(how, value, on_step=False, on_epoch=True, reduce_fx=how)
        self.log("rows", value, on_epoch=True, batch_size=batch_idx + 1)
        self.log("number", batch_idx * 1.5, on_epoch=True)
        self.log("half", value.half(), on_epoch=True)
        self.log("double", value.double(), on_epoch=True)
        self.log("whole", torch.tensor(batch_idx), on_epoch=True)
        self.log("graph", value, enable_graph=True, on_epoch=True)
        self.log_dict({"a": value, "b": value + 1}, on_step=True, on_epoch=True)
        if batch_idx % 2:
            self.log("sometimes", value, on_epoch=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("at the end", float(self.global_step), on_epoch=True)
        self.note()

    def on_validation_epoch_end(self) -> None:
        self.log("validated", 4.0, prog_bar=True)

    def on_train_epoch_end(self) -> None:
        self.log("epoch", 2.0)
        self.note()

    def note(self) -> None:
        made = self.trainer
        for metrics in (made.callback_metrics, made.logged_metrics, made.progress_bar_metrics):
            self.seen.append({name: (type(value), float(value)) for name, value in metrics.items()})
        self.seen.append(made.callback_metrics["graph"].requires_grad)


class LogsToo(pl.Callback):
    def on_before_zero_grad(self, trainer: pl.Trainer, model: Any, optimizer: Any) -> None:
        model.log("callback", float(trainer.global_step), on_epoch=True)


@pytest.mark.parametrize("bar", [False, True])
def test_logged_values_are_lightnings(bar: bool) -> None:
    callbacks: list[Any] = [LogsToo, TQDMProgressBar] if bar else [LogsToo]
    settings = {"bar": bar, "accumulate_grad_batches": 2, "log_every_n_steps": 2, "val_check_interval": 3}
    lightnings, relays = under_both(Logs, callbacks=lambda: [make() for make in callbacks], **settings)
    assert len(lightnings.seen) > 40
    assert relays.seen == lightnings.seen
    theirs, own = (
        {name: float(value) for name, value in model.fitted[0].callback_metrics.items()}
        for model in (lightnings, relays)
    )
    assert own == theirs and len(theirs) > 25


class LogsAnew(Model):
    def in_step(self, batch_idx: int) -> None:
        self.log("loss", torch.ones(()), **self.arguments(batch_idx))

    def arguments(self, batch_idx: int) -> dict[str, Any]:
        return {"on_epoch": batch_idx > 2}


@pytest.mark.parametrize("make", [pl.Trainer, Trainer])
def test_other_arguments_are_refused(make: Make) -> None:
    with pytest.raises(MisconfigurationException, match=r"You called `self.log\(loss, ...\)` twice in `training_step`"):
        fit(make, LogsAnew())


@pytest.mark.parametrize("make", [pl.Trainer, Trainer])
def test_a_hook_that_may_not_log_is_refused(make: Make) -> None:
    model = Model()
    model.on_train_end = partial(model.log, "loss", 1.0)
    with pytest.raises(MisconfigurationException, match="inside `on_train_end`"):
        fit(make, model)


@pytest.mark.parametrize("make", [pl.Trainer, Trainer])
def test_logging_with_an_iterator_needs_a_batch_size(make: Make) -> None:
    class Iterates(Model):
        def training_step(self, dataloader_iter: Any) -> Tensor:
            batch, *_ = next(dataloader_iter)
            loss = self.layer(batch[0]).square().mean()
            self.log("loss", loss)
            return loss

    with pytest.raises(MisconfigurationException, match="batch_size"):
        fit(make, Iterates())


def test_a_step_with_another_signature_is_called_as_it_asks() -> None:
    class Swaps(Model):
        def in_step(self, batch_idx: int) -> None:
            if batch_idx == 2:
                self.training_step = self.of_batch_only

        def of_batch_only(self, batch: list[Tensor]) -> Tensor:
            self.seen.append("of the batch only")
            return self.layer(batch[0]).square().mean()

    lightnings, relays = under_both(Swaps)
    assert relays.seen == lightnings.seen
    assert relays.seen.count("of the batch only") == 7


def test_a_compiled_model_learns_the_same() -> None:
    # It does not log: torch 2.13 cannot trace Lightning's own LightningModule.log.
    values = []
    for make in (pl.Trainer, Trainer):
        model = Model()
        made = make(**QUIET, enable_progress_bar=False)
        made.fit(torch.compile(model, backend="eager"), loader())
        values.append((made.global_step, model.layer.weight))
    assert values[0][0] == values[1][0] == 10
    assert torch.equal(values[0][1], values[1][1])


# Clipping, and the name of the current hook


def test_clipping_that_somebody_overrides_is_called() -> None:
    model, made = Model(), []
    model.clip_gradients = lambda *args, **kwargs: made.append("model")
    fit(Trainer, model, max_steps=2)
    trainer = Trainer(**{**QUIET, "max_epochs": 1}, enable_progress_bar=False)
    trainer.precision_plugin.clip_gradients = lambda *args, **kwargs: made.append("precision")
    trainer.fit(Model(), loader())
    assert made == ["model"] * 2 + ["precision"] * 5


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradients_are_clipped(algorithm: str) -> None:
    lightnings, relays = under_both(Model, gradient_clip_val=0.01, gradient_clip_algorithm=algorithm)
    plain = Model()
    fit(Trainer, plain)
    assert torch.equal(relays.layer.weight, lightnings.layer.weight)
    assert not torch.equal(relays.layer.weight, plain.layer.weight)


class NotesNames(Model):
    """Notes the names of hooks that are assigned to it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_current_fx_name":
            vars(self).setdefault("noted", []).append(value)
        super().__setattr__(name, value)

    def on_after_backward(self) -> None:
        pass

    def on_before_zero_grad(self, optimizer: Any) -> None:
        pass

    def configure_callbacks(self) -> list[pl.Callback]:
        callback = pl.Callback()
        callback.on_after_backward = callback.on_before_zero_grad = lambda *args: None
        return [callback]


def test_a_setattr_of_the_user_sees_the_names_of_hooks() -> None:
    names = {"on_after_backward", "on_before_zero_grad", "training_step"}
    noted = [[name for name in model.noted if name in names] for model in under_both(NotesNames)]
    assert noted[0] == noted[1]
    assert set(noted[1]) == names


# The loss, which Lightning divides by the number of batches whose gradients it accumulates


class KeepsLoss(Model):
    """Keeps its losses as it returned them."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.kept.append(loss)
        return loss

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seen.append(float(outputs["loss"]))


def num_divisions(run: Callable[[], Any]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
    return sum(event.count for event in profiler.key_averages() if event.key == "aten::div")


def test_a_loss_that_nobody_sees_is_not_divided_by_one() -> None:
    theirs = num_divisions(lambda: fit(pl.Trainer, KeepsLoss()))
    assert theirs - num_divisions(lambda: fit(Trainer, KeepsLoss())) == 2 * 10  # in the forward and backward pass
    theirs = num_divisions(lambda: fit(pl.Trainer, KeepsLoss(), accumulate_grad_batches=2))
    assert num_divisions(lambda: fit(Trainer, KeepsLoss(), accumulate_grad_batches=2)) == theirs


def doubling(model: KeepsLoss, original: Callable[..., Any]) -> Callable[..., Any]:
    """A function among those of the backward pass that changes the loss in place."""

    def double(*args: Any, **kwargs: Any) -> Any:
        for loss in args:
            if type(loss) is Tensor and loss.ndim == 0:
                model.seen.append((loss is model.kept[-1], type(loss.grad_fn).__name__))
                loss.detach().mul_(2)
        return original(*args, **kwargs)

    return double


LOSS_PLACES = {
    "model.on_before_backward": lambda trainer: trainer.lightning_module,
    "model.backward": lambda trainer: trainer.lightning_module,
    "callback.on_before_backward": lambda trainer: trainer.callbacks[0],
    "strategy.backward": lambda trainer: trainer.strategy,
    "strategy.pre_backward": lambda trainer: trainer.strategy,
    "strategy.post_backward": lambda trainer: trainer.strategy,
    "precision.pre_backward": lambda trainer: trainer.precision_plugin,
    "precision.backward": lambda trainer: trainer.precision_plugin,
    "precision.post_backward": lambda trainer: trainer.precision_plugin,
}


@pytest.mark.parametrize("place", LOSS_PLACES)
@pytest.mark.parametrize("in_zero_grad", [False, True], ids=["in the step", "in another hook"])
def test_whatever_sees_the_loss_gets_lightnings(place: str, in_zero_grad: bool) -> None:
    """A function that is attached in the third step, also if only after the step, may change the loss in place."""
    name = place.partition(".")[2]

    def attach(model: KeepsLoss) -> None:
        if len(model.kept) == 3 - (not in_zero_grad):
            holder = LOSS_PLACES[place](model.trainer)
            setattr(holder, name, doubling(model, getattr(holder, name)))

    class Attaching(KeepsLoss):
        def in_step(self, batch_idx: int) -> None:
            if not in_zero_grad:
                attach(self)

        def on_before_zero_grad(self, optimizer: Any) -> None:
            if in_zero_grad:
                attach(self)

    if not in_zero_grad:
        del Attaching.on_before_zero_grad
    lightnings, relays = under_both(Attaching, callbacks=lambda: [pl.Callback()])
    noted = [entry for entry in relays.seen if isinstance(entry, tuple) and entry[0] is False]
    assert len(noted) == 8
    assert relays.seen == lightnings.seen
    assert torch.equal(relays.layer.weight, lightnings.layer.weight)
    assert [loss.item() for loss in relays.kept] == [loss.item() for loss in lightnings.kept]


@pytest.mark.parametrize("of_class", [pl.LightningModule, pl.plugins.Precision, pl.strategies.Strategy])
def test_a_backward_that_replaces_that_of_a_class_gets_lightnings_loss(of_class: type) -> None:
    models = []
    for make in (pl.Trainer, Trainer):
        model = KeepsLoss()
        with mock.patch.object(of_class, "backward", doubling(model, of_class.backward)):
            fit(make, model)
        models.append(model)
    assert models[0].seen == models[1].seen
    assert sum(isinstance(entry, tuple) and entry[0] is False for entry in models[1].seen) == 10
    assert torch.equal(models[0].layer.weight, models[1].layer.weight)


# Batches on their way to the step


class TakesBatches(Model):
    """Notes what becomes of batches of all kinds."""

    def __init__(self, made: list[Any]) -> None:
        super().__init__()
        self.made = made

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        original = self.made[batch_idx]
        self.seen.append((type(batch), batch is original, torch.utils._pytree.tree_leaves(batch)))
        return self.layer.weight.sum()


class Movable:
    def __init__(self) -> None:
        self.moved_to: list[torch.device] = []

    def to(self, device: torch.device, **_: Any) -> None:
        self.moved_to.append(device)  # and returns nothing, which Lightning allows


def test_batches_are_moved_as_by_lightning() -> None:
    one = torch.ones(2, 3)
    parameter = nn.Parameter(torch.ones(2))
    made = [one, [one, one], (one, 1), (one,), {"a": one}, {"a": [one]}, [one, None], [], 7, Movable(), [parameter]]
    lightnings, relays = (TakesBatches(made) for _ in range(2))
    for make, model in ((pl.Trainer, lightnings), (Trainer, relays)):
        trainer = make(**{**QUIET, "max_epochs": 1}, enable_progress_bar=False)
        trainer.fit(model, DataLoader(made, batch_size=None, collate_fn=lambda batch: batch))
    for theirs, own in zip(lightnings.seen, relays.seen, strict=True):
        assert own[0] is theirs[0]
        assert own[1] is theirs[1] or own[0] is tuple  # a tuple cannot be told from an equal one
        assert all(mine is other for mine, other in zip(own[2], theirs[2], strict=True))
    assert len(made[9].moved_to) == 2


BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


@pytest.mark.parametrize("who", ["model", "data module", "both", "model with data module"])
def test_batch_hooks_attached_in_mid_run_run(who: str) -> None:
    class Attaching(Model):
        def in_step(self, batch_idx: int) -> None:
            data = self.trainer.datamodule
            holders = {"model": [self], "data module": [data], "both": [self, data], "model with data module": [self]}
            if self.trainer.current_epoch == 0 and batch_idx == 2:
                for holder in holders[who]:
                    for name in BATCH_HOOKS:
                        noting = recording(name, getattr(holder, name), type(holder).__name__, self.seen, self)
                        setattr(holder, name, noting)

    models = []
    for make in (pl.Trainer, Trainer):
        model = Attaching()
        data: dict[str, Any] = {"train_dataloaders": loader(), "val_dataloaders": loader()}
        if who != "model":
            data = {"datamodule": pl.LightningDataModule.from_datasets(loader().dataset, loader().dataset)}
        make(**QUIET, enable_progress_bar=False).fit(model, **data)
        models.append(model)
    assert models[1].seen == models[0].seen
    assert {entry[1] for entry in models[1].seen} > set(BATCH_HOOKS)
    assert torch.equal(models[0].layer.weight, models[1].layer.weight)


# Settings that most runs leave as they are


class Changes(Model):
    """In its third step the model changes something of the run, and notes what the run does."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.change_in_step = change

    def in_step(self, batch_idx: int) -> None:
        if self.trainer.current_epoch == 0 and batch_idx == 2:
            self.change_in_step(self)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((batch_idx, self.trainer.global_step, self.trainer.optimizers[0].param_groups[0]["lr"]))
        self.seen.append(torch.is_grad_enabled())
        self.log("epoch", float(self.trainer.current_epoch))


class NoValidation(Changes):
    validation_step = pl.LightningModule.validation_step


def _adds_scheduler(model: Changes) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(model.trainer.optimizers[0], 1)
    model.trainer.strategy.lr_scheduler_configs.append(
        pl.utilities.types.LRSchedulerConfig(scheduler, interval="step", frequency=1)
    )


def _accumulates(model: Changes) -> None:
    model.trainer.accumulate_grad_batches = 2


def _ends_earlier(model: Changes) -> None:
    model.trainer.fit_loop.epoch_loop.max_steps = 4


def _validates(model: Changes) -> None:
    model.validation_step = lambda batch, batch_idx: model.seen.append("validated")


def _enters_context(model: Changes) -> None:
    precision = model.trainer.precision_plugin
    entered = precision.train_step_context
    precision.train_step_context = lambda: model.seen.append("entered") or entered()


class SeenLogger(pl.loggers.CSVLogger):
    def __init__(self, seen: list[Any]) -> None:
        super().__init__("unused")
        self.seen = seen

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.seen.append((dict(metrics), step))

    def save(self) -> None:
        pass


def _adds_logger(model: Changes) -> None:
    model.trainer.loggers = [SeenLogger(model.seen)]


CHANGES = {
    _adds_scheduler: lambda seen: seen[-2][2] < 1e-5,
    _accumulates: lambda seen: seen[-2][1] == 8,
    _ends_earlier: lambda seen: seen[-2][1] == 4,
    _validates: lambda seen: seen.count("validated") == 10,
    _enters_context: lambda seen: seen.count("entered") == 7,
    _adds_logger: lambda seen: sum(isinstance(entry, tuple) and isinstance(entry[0], dict) for entry in seen) >= 7,
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_settings_may_change_in_mid_run(change: Callable[[Any], None]) -> None:
    lightnings, relays = under_both(lambda: NoValidation(change), log_every_n_steps=1)
    assert CHANGES[change](lightnings.seen)
    assert relays.seen == lightnings.seen
    assert torch.equal(relays.layer.weight, lightnings.layer.weight)


def test_a_profiler_set_in_mid_run_sees_what_follows() -> None:
    def follow(model: Changes) -> None:
        model.trainer.profiler = SimpleProfiler()

    recorded = []
    for model in under_both(lambda: Changes(follow)):
        durations = model.fitted[0].profiler.recorded_durations
        recorded.append({name: len(times) for name, times in durations.items()})
    assert recorded[0] == recorded[1]
    assert recorded[1]["run_training_batch"] == recorded[1]["[_TrainingEpochLoop].train_dataloader_next"] == 7


# Gradients that somebody else enables or disables


class Leaves(Model):
    """A step that leaves gradients disabled."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.seen.append(torch.is_grad_enabled())
        torch.set_grad_enabled(False)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(torch.is_grad_enabled())


class WithoutGradients(torch.optim.SGD):
    """An optimizer that calls the step without enabling gradients."""

    def step(self, closure: Callable[[], Any]) -> None:
        with torch.no_grad():
            closure()
            super().step()


class OwnOptimizer(Leaves):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return WithoutGradients(self.parameters(), lr=0.1)


@pytest.mark.parametrize(("make_model", "after_step"), [(Leaves, True), (OwnOptimizer, False)])
def test_gradients_are_enabled_for_the_step_only(make_model: type[Model], after_step: bool) -> None:
    lightnings, relays = under_both(make_model)
    assert relays.seen == lightnings.seen
    assert [entry for entry in relays.seen if isinstance(entry, bool)] == [True, after_step] * 10
    assert torch.equal(relays.layer.weight, lightnings.layer.weight)
    assert not torch.equal(relays.layer.weight, make_model().layer.weight)
