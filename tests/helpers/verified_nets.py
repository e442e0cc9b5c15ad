"""Models to verify, and faults that are planted in their training, in one process or on the driver of a pipeline."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
from parity import WIDTH, batches
from pytorch_lightning import Callback, LightningDataModule, LightningModule
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

ROWS = 8


class Counting(nn.Module):
    """The identity, which counts the rows that it has seen in training."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
        return x


class CountingDropout(Counting):
    """Dropout, which counts the rows that it has seen in training."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.3

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), self.dropout, self.training)


class Noise(nn.Module):
    """Adds noise of numpy."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * torch.from_numpy(numpy.random.randn(*x.shape)).to(x.dtype)


DRIVERS: set[int] = set()
"""The processes that run Lightning's loop."""


class WorkerFault(nn.Module):
    """The identity, whose backward pass is wrong in a worker's process.

    Args:
        kind: How.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0

    def forward(self, x: Tensor) -> Tensor:
        if os.getpid() in DRIVERS or not x.requires_grad:
            return x
        self.calls += 1
        x = x.clone()
        if self.kind == "scaled":
            x.register_hook(lambda grad: grad * 0.5)
        elif self.kind == "rows left out" and self.calls % 3 == 0:
            x.register_hook(torch.zeros_like)
        elif self.kind == "late":
            return x + 1e-4 * self.calls
        elif self.kind == "failing":
            raise ArithmeticError("only on workers")
        return x


class Tied(nn.Module):
    """A linear layer that shares the weight of another layer."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.weight = other.weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class VerifiedNet(LightningModule):
    """Seven layers, an optimizer with a schedule, logged values, validation and ``predict``.

    Args:
        extra: A layer in the middle: its place in a table here.
        optimizer: The optimizer.
    """

    EXTRA: ClassVar[dict[str, Callable[[], nn.Module]]] = {
        "none": nn.Identity,
        "dropout": lambda: nn.Dropout(0.3),
        "batch norm": lambda: nn.BatchNorm1d(WIDTH),
        "dropout and batch norm": lambda: nn.Sequential(nn.Dropout(0.3), nn.BatchNorm1d(WIDTH)),
        "dropout and counting": CountingDropout,
        "counting": Counting,
        "numpy": Noise,
        **{kind: partial(WorkerFault, kind) for kind in ("scaled", "rows left out", "late", "failing")},
    }

    def __init__(self, extra: str = "none", optimizer: str = "AdamW") -> None:
        super().__init__()
        torch.manual_seed(1)
        first = nn.Linear(WIDTH, WIDTH)
        self.sequential_module = nn.Sequential(
            first,
            nn.Tanh(),
            nn.LayerNorm(WIDTH),
            self.EXTRA[extra](),
            nn.Linear(WIDTH, WIDTH),
            Tied(first),
            nn.Linear(WIDTH, 2),
        )
        self.kind = optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.sequential_module(x)

    def loss(self, batch: Any) -> Tensor:
        return mse_loss(self(batch[0]), batch[1])

    def setup(self, stage: str) -> None:
        DRIVERS.add(os.getpid())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("val_loss", loss, batch_size=len(batch[0]), sync_dist=True)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        if self.kind == "SGD":
            optimizer: Any = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), 0.02)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SumLoss(VerifiedNet):
    """The loss is a root of a mean: no mean over rows."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch).sqrt()


class Divided(VerifiedNet):
    """Layers that pipelines divide by columns and by rows."""

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"sequential_module.4": "colwise_gather_output", "sequential_module.6": "rowwise_split_input"}


class FaultOfAPart(Divided):
    """The second pipeline steps its part of a layer with a wrong gradient, which no check of a run compares."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if getattr(self.trainer.strategy, "part", 0):
            self.sequential_module[6].weight.grad.mul_(2)


class Logging(VerifiedNet):
    """Logs values in every way in which ranks reduce them."""

    def __init__(self, extra: str = "none") -> None:
        super().__init__(extra)
        self.metric = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, rows = super().training_step(batch, batch_idx), len(batch[0])
        self.log("of rank", loss, on_epoch=True, batch_size=rows)
        self.log("of all", loss, on_epoch=True, batch_size=rows, sync_dist=True)
        self.log("largest", loss, on_epoch=True, batch_size=rows, sync_dist=True, reduce_fx="max")
        self.log("rows", float(rows), on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        self.metric(loss.detach(), rows)
        self.log("metric", self.metric, on_step=True, on_epoch=True)
        if batch_idx == 1:
            self.log("second", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().validation_step(batch, batch_idx)
        self.log("val_rows", float(len(batch[0])), sync_dist=True, reduce_fx="sum")
        return loss


class VerifiedData(LightningDataModule):
    """Batches that do not divide evenly."""

    def train_dataloader(self) -> DataLoader:
        return batches((ROWS, 7, ROWS, 5), seed=3)

    def val_dataloader(self) -> DataLoader:
        return batches((6,), seed=4)


class Writing(Callback):
    """Writes into the user's folder."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        Path("written").write_text("by a callback")


class PlantedStrategy(SingleDeviceStrategy):
    """One process, into which a fault is planted.

    Args:
        fault: Its name in ``FAULTS``.
        others: Ignored.
    """

    def __init__(self, fault: str = "", **others: Any) -> None:
        super().__init__("cpu")
        self.fault = fault

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if self.fault and trainer.state.fn == "fit":
            FAULTS[self.fault].plant(self, trainer, trainer.lightning_module)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, optimizer: Any = None) -> Tensor:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return nn.utils.clip_grad_norm_(self.of_norm(parameters), max_norm, norm_type)

    def of_norm(self, parameters: list[Any]) -> list[Any]:
        return parameters


@dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
        plant: Plants it, given strategy, Trainer and model.
        part: What it is found in.
        layer: The layer, or the name, that is found.
        what: A part of the description.
        extra: The layer that the model needs.
        optimizer: The optimizer that the model needs.
        step: The step in which it is found.
    """

    plant: Callable[[Any, Any, Any], Any]
    part: str
    layer: str
    what: str = ""
    extra: str = "none"
    optimizer: str = "AdamW"
    step: int | None = 0


def _layer(model: Any, place: int) -> Any:
    return model.sequential_module[place]


def _scaled(place: int, factor: float, name: str = "weight") -> Callable[..., None]:
    def plant(strategy: Any, trainer: Any, model: Any) -> None:
        getattr(_layer(model, place), name).register_hook(lambda grad: grad * factor)

    return plant


def _all_scaled(factor: float) -> Callable[..., None]:
    def plant(strategy: Any, trainer: Any, model: Any) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: grad * factor)

    return plant


def _rows_without_gradient(place: int, rows: int) -> Callable[..., None]:
    """The last rows of a batch add nothing to the gradients of a layer and of those before."""

    def zeroed(grad: Tensor) -> Tensor:
        return torch.cat([grad[:-rows], torch.zeros_like(grad[-rows:])])

    def hook(module: Any, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(zeroed)

    def plant(strategy: Any, trainer: Any, model: Any) -> None:
        _layer(model, place).register_forward_hook(hook)

    return plant


def _last_micro_batch_alone(strategy: Any, trainer: Any, model: Any) -> None:
    """Only the last rows train, as under a pipeline of a peer."""
    original = model.training_step

    def training_step(batch: Any, *rest: Any) -> Tensor:
        return original([tensor[-3:] for tensor in batch], *rest)

    model.training_step = training_step


def _at_step(function: Callable[[Any, Any], Any]) -> Callable[..., None]:
    """Calls ``function(model, optimizer)`` where Lightning clips gradients."""

    def plant(strategy: Any, trainer: Any, model: Any) -> None:
        model.configure_gradient_clipping = lambda *_, **__: function(model, trainer.optimizers[0])

    return plant


def _after_step(function: Callable[[Any, Any], Any]) -> Callable[..., None]:
    def plant(strategy: Any, trainer: Any, model: Any) -> None:
        optimizer = trainer.optimizers[0]
        optimizer.register_step_post_hook(lambda *_: function(model, optimizer))

    return plant


def _norm_of(choose: Callable[[list[Any]], list[Any]]) -> Callable[..., None]:
    def plant(strategy: Any, trainer: Any, model: Any) -> None:
        strategy.of_norm = choose

    return plant


def _without(place: int) -> Callable[..., None]:
    """The optimizer lacks the weight of a layer while it steps."""

    def plant(strategy: Any, trainer: Any, model: Any) -> None:
        optimizer, weight = trainer.optimizers[0], _layer(model, place).weight
        kept: list[Any] = []

        def clear(*_: Any, **__: Any) -> None:
            kept.append(weight.grad)
            weight.grad = None

        model.configure_gradient_clipping = clear
        optimizer.register_step_post_hook(lambda *_: setattr(weight, "grad", kept.pop()))

    return plant


def _late_hyperparameters(strategy: Any, trainer: Any, model: Any) -> None:
    optimizer = trainer.optimizers[0]
    rates = [group["lr"] for group in optimizer.param_groups]
    now: list[Any] = []

    def before(*_: Any, **__: Any) -> None:
        now[:] = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def after(*_: Any) -> None:
        for group, rate in zip(optimizer.param_groups, now, strict=True):
            group["lr"] = rate
        rates[:] = now

    model.configure_gradient_clipping = before
    optimizer.register_step_post_hook(after)


def _stale_tie(strategy: Any, trainer: Any, model: Any) -> None:
    """The second use of a tied weight is a copy that no step changes."""
    model.sequential_module[5].weight = nn.Parameter(model.sequential_module[0].weight.detach().clone())


def _stale_tie_with_gradient(strategy: Any, trainer: Any, model: Any) -> None:
    """The copy adds its gradient to the first use, but keeps its old value."""
    own = model.sequential_module[0].weight
    copy = nn.Parameter(own.detach().clone())
    kept: list[Tensor] = []
    copy.register_hook(lambda grad: kept.append(grad))
    own.register_hook(lambda grad: grad + kept.pop())
    model.sequential_module[5].weight = copy


def _buffer_not_carried(strategy: Any, trainer: Any, model: Any) -> None:
    layer = _layer(model, 3)
    before = layer.seen.clone()
    original = strategy.lightning_module_state_dict

    def state_dict() -> dict[str, Any]:
        return {**original(), "sequential_module.3.seen": before.to(layer.seen.dtype)}

    strategy.lightning_module_state_dict = state_dict


def _buffer_twice(strategy: Any, trainer: Any, model: Any) -> None:
    _layer(model, 3).register_forward_hook(lambda layer, args, _: layer.seen.add_(len(args[0])) and None)


def _evaluation_mode(strategy: Any, trainer: Any, model: Any) -> None:
    _layer(model, 3).eval()
    _layer(model, 3).train = lambda mode=True: _layer(model, 3)


def _state_lost(strategy: Any, trainer: Any, model: Any) -> None:
    original = strategy.optimizer_state

    def optimizer_state(optimizer: Any) -> dict[str, Any]:
        state = original(optimizer)
        return {**state, "state": {key: value for key, value in state["state"].items() if key != 4}}

    strategy.optimizer_state = optimizer_state


def _state_of_wrong_parameter(strategy: Any, trainer: Any, model: Any) -> None:
    original = strategy.optimizer_state

    def optimizer_state(optimizer: Any) -> dict[str, Any]:
        state = original(optimizer)
        swapped = {**state["state"], 2: state["state"][3], 3: state["state"][2]}
        return {**state, "state": swapped}

    strategy.optimizer_state = optimizer_state


def _logged_of_last_part(strategy: Any, trainer: Any, model: Any) -> None:
    original = model.log

    def log(name: str, value: Any, **settings: Any) -> None:
        original(name, value * (2 if name == "loss" else 1), **settings)

    model.log = log


def _not_logged(strategy: Any, trainer: Any, model: Any) -> None:
    model.log = lambda *args, **kwargs: None


def _validates_in_training_mode(strategy: Any, trainer: Any, model: Any) -> None:
    original = model.validation_step

    def validation_step(batch: Any, *rest: Any) -> Any:
        return original([tensor[1:] for tensor in batch], *rest)

    model.validation_step = validation_step


def _predicts_other_rows(strategy: Any, trainer: Any, model: Any) -> None:
    original = model.predict_step
    model.predict_step = lambda batch, *rest: original(batch, *rest).flip(0)


def _checkpoint_lacks_a_key(strategy: Any, trainer: Any, model: Any) -> None:
    model.on_save_checkpoint = lambda checkpoint: checkpoint["state_dict"].pop("sequential_module.4.bias")


def _checkpoint_is_older(strategy: Any, trainer: Any, model: Any) -> None:
    def older(checkpoint: Any) -> None:
        checkpoint["state_dict"]["sequential_module.4.bias"] = torch.zeros(WIDTH, dtype=torch.float64)

    model.on_save_checkpoint = older


def _decay_left_out(strategy: Any, trainer: Any, model: Any) -> None:
    trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.0


def _other_initial_value(strategy: Any, trainer: Any, model: Any) -> None:
    with torch.no_grad():
        _layer(model, 4).bias.add_(1e-6)


def _swapped_layers(strategy: Any, trainer: Any, model: Any) -> None:
    layers = list(model.sequential_module)
    forward = nn.Sequential(*layers[:4], layers[5], layers[4], layers[6])
    model.forward = lambda x: forward(x)


def _rows_of_wrong_targets(strategy: Any, trainer: Any, model: Any) -> None:
    original = model.training_step

    def training_step(batch: Any, *rest: Any) -> Tensor:
        x, y = batch
        return original([x, torch.cat([y[1:2], y[:1], y[2:]])], *rest)

    model.training_step = training_step


def _steps_twice(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        weight = _layer(model, 6).weight
        weight.sub_(0.001 * weight.grad)


def _copy_back(place: int) -> Callable[..., None]:
    """A worker's step is lost: the weight of a layer goes back to what it was."""
    kept: dict[str, Tensor] = {}

    def plant(strategy: Any, trainer: Any, model: Any) -> None:
        weight, optimizer = _layer(model, place).weight, trainer.optimizers[0]
        optimizer.register_step_pre_hook(lambda *_: kept.update(weight=weight.detach().clone()))
        optimizer.register_step_post_hook(lambda *_: weight.data.copy_(kept["weight"]))

    return plant


def _clip_by(factor: float) -> Callable[..., None]:
    def scale(model: Any, optimizer: Any) -> None:
        for place in (0, 2):
            for parameter in _layer(model, place).parameters():
                parameter.grad.mul_(factor)

    return _at_step(scale)


def _gradient_of_step_before(strategy: Any, trainer: Any, model: Any) -> None:
    """A layer's gradient is that of the step before."""
    weight, kept = _layer(model, 4).weight, []

    def late(grad: Tensor) -> Tensor:
        kept.append(grad.clone())
        return kept[-2] if len(kept) > 1 else grad

    weight.register_hook(late)


def _not_cleared(strategy: Any, trainer: Any, model: Any) -> None:
    """The gradient of the step before is added to."""
    weight, kept = _layer(model, 4).weight, [torch.zeros(())]

    def added(grad: Tensor) -> Tensor:
        kept.append(kept[-1] + grad)
        return kept[-1]

    weight.register_hook(added)


def _half_precision(place: int) -> Callable[..., None]:
    def plant(strategy: Any, trainer: Any, model: Any) -> None:
        _layer(model, place).weight.register_hook(lambda grad: grad.bfloat16().to(grad.dtype))

    return plant


def _missing_gradient(model: Any, optimizer: Any) -> None:
    _layer(model, 4).weight.grad = None


def _drop(name: str) -> Callable[..., None]:
    def plant(strategy: Any, trainer: Any, model: Any) -> None:
        parameter = dict(model.named_parameters())[name]
        parameter.requires_grad_(False)

    return plant


_S = "sequential_module"

FAULTS: dict[str, Fault] = {
    "gradient of a layer scaled": Fault(_scaled(4, 0.5), "gradients", f"{_S}.4", "0.5 times"),
    "gradient of the first layer scaled a little": Fault(_scaled(2, 1.0001), "gradients", f"{_S}.2", "1.0001 times"),
    "gradient of a bias scaled": Fault(_scaled(6, 2.0, "bias"), "gradients", f"{_S}.6", "2 times"),
    "all gradients scaled": Fault(_all_scaled(0.25), "gradients", f"{_S}.6", "all layers are 0.25 times"),
    "gradient with the wrong sign": Fault(_scaled(4, -1.0), "gradients", f"{_S}.4", "-1 times"),
    "gradient is zero": Fault(_scaled(4, 0.0), "gradients", f"{_S}.4", "zero"),
    "gradient is not a number": Fault(_scaled(4, float("nan")), "gradients", f"{_S}.4", "not a number"),
    "gradient in bfloat16": Fault(_half_precision(4), "gradients", f"{_S}.4", "direction"),
    "micro-batch left out of the backward pass": Fault(
        _rows_without_gradient(4, 2), "gradients", f"{_S}.4", "direction"
    ),
    "micro-batch left out before the last layer": Fault(_rows_without_gradient(2, 2), "gradients", f"{_S}.2"),
    "only the last micro-batch trains": Fault(_last_micro_batch_alone, "losses", "batch 0"),
    "rows with targets of others": Fault(_rows_of_wrong_targets, "losses", "batch 0"),
    "layers in another order": Fault(_swapped_layers, "losses", "batch 0"),
    "layer in evaluation mode": Fault(_evaluation_mode, "losses", "batch 0", extra="batch norm"),
    "gradient of the step before": Fault(_gradient_of_step_before, "gradients", f"{_S}.4", step=1),
    "gradients not cleared": Fault(_not_cleared, "gradients", f"{_S}.4", step=1),
    "parameter without gradient": Fault(_drop(f"{_S}.4.bias"), "gradients", f"{_S}.4", "no gradient"),
    "norm of one stage": Fault(
        _norm_of(lambda own: own[:1]), "global norm", "global norm", f"norm of {_S}.0.weight alone"
    ),
    "norm without a layer": Fault(_norm_of(lambda own: own[2:]), "global norm", "global norm"),
    "norm with a layer twice": Fault(_norm_of(lambda own: own + own[:1]), "global norm", "global norm"),
    "clipped with another norm": Fault(_clip_by(0.7), "parameters", f"{_S}.0", "0.7 times", optimizer="SGD"),
    "weight missing in the optimizer": Fault(_without(4), "parameters", f"{_S}.4", "did not change"),
    "step of a stage lost": Fault(_copy_back(4), "parameters", f"{_S}.4", "did not change"),
    "hyperparameters one step late": Fault(
        _late_hyperparameters, "parameters", f"{_S}.0", "learning rate of the step before", optimizer="SGD", step=1
    ),
    "hyperparameters one step late, Adam": Fault(_late_hyperparameters, "parameters", f"{_S}.0", "", step=1),
    "weight decay left out": Fault(_decay_left_out, "hyperparameters", "0.0.weight_decay", "instead of"),
    "weight changed after the step": Fault(_after_step(_steps_twice), "parameters", f"{_S}.6"),
    "another initial value": Fault(_other_initial_value, "initial values", f"{_S}.4.bias", step=None),
    "stale tied weight": Fault(_stale_tie, "gradients", f"{_S}.0", "tied"),
    "stale copy of a tied weight": Fault(_stale_tie_with_gradient, "parameters", f"{_S}.5", "tied"),
    "buffer not carried": Fault(_buffer_not_carried, "buffers", f"{_S}.3", "did not change", extra="counting"),
    "buffer changed twice": Fault(_buffer_twice, "buffers", f"{_S}.3", "differs", extra="counting"),
    "optimizer state lost": Fault(_state_lost, "optimizer states", f"{_S}.4", "missing"),
    "optimizer state of another parameter": Fault(_state_of_wrong_parameter, "optimizer states", f"{_S}.2"),
    "logged value doubled": Fault(_logged_of_last_part, "logged values", "loss", "instead of"),
    "value not logged": Fault(_not_logged, "logged values", "loss", "missing"),
    "validation leaves out a row": Fault(_validates_in_training_mode, "validation", "output", step=None),
    "predictions in another order": Fault(_predicts_other_rows, "predict", "0", step=None),
    "checkpoint lacks a key": Fault(
        _checkpoint_lacks_a_key, "checkpoint", f"state_dict.{_S}.4.bias", "missing", step=None
    ),
    "checkpoint with an old value": Fault(_checkpoint_is_older, "checkpoint", f"state_dict.{_S}.4.bias", step=None),
}
