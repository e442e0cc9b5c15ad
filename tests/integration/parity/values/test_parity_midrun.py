"""What user code changes or reads in mid-run reaches the stage where the layer lives, or is refused."""

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import run
from parity import WIDTH, Small, batches, check, fit, small_layers
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from strategies import RPCSequentialStrategy


class Moody(nn.Linear):
    """Depends on its mode and on a plain attribute, makes a buffer late and drops another.

    It counts its calls in a number, in a list that starts as ``None``, and in a tensor.
    """

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.temperature, self.calls = 1.0, 0
        self.sizes: list[int] | None = None
        self.total = torch.zeros(())
        self.register_buffer("late", None)
        self.register_buffer("early", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.late, self.early = torch.full((3,), 2.0), None
        if self.training:
            self.calls += len(x)
            self.sizes = [*(self.sizes or ()), len(x)]
            self.total = self.total + len(x)
        y = super().forward(x) * self.temperature
        return y.tanh() if self.training else y.sin()


class Changes(Small):
    """Flips modes, ``requires_grad`` and attributes of layers between passes of the same step."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(Moody(), *small_layers()[:5], Moody())

    def forward(self, x: Tensor) -> Tensor:
        return self.sequential_module(x)[:, :2]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        first, last = self.sequential_module[0], self.sequential_module[-1]
        first.temperature = 1.0 + 0.1 * batch_idx
        output = self(batch[0])
        self.sequential_module.eval()
        with torch.no_grad():
            teacher = self(batch[0])
        self.sequential_module.train()
        first.weight.requires_grad_(False)
        first.temperature, last.temperature = 2.0, 3.0
        other = self(batch[0] * 2).mean()
        first.temperature, last.temperature = 1.0 + 0.1 * batch_idx, 1.0
        first.weight.requires_grad_(True)
        loss = mse_loss(output, batch[1]) + 0.1 * other + mse_loss(output, teacher)
        self.losses.append(loss.item())
        return loss


def changes() -> list[dict[str, Any]]:
    found = []
    for options in ({"checkpoint": "never"}, {"checkpoint": "always"}):
        for outcome in check(Changes, strategy=options, stages=(2,)):
            layer = outcome.model.sequential_module[0]
            assert layer.calls == sum(layer.sizes) == layer.total
            found.append({"calls": layer.calls, "temperature": layer.temperature, "early": layer.early})
    return found


class Optimizers(Small):
    """Saves and restores the optimizer's state by hand, and clears gradients of a part that holds the pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"layers": self.sequential_module})
        del self.sequential_module

    def forward(self, x: Tensor) -> Tensor:
        return self.net["layers"](x)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.net.zero_grad(set_to_none=batch_idx == 0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        if batch_idx == 1:
            self.saved = copy.deepcopy(optimizer.state_dict())  # in one process it is the live one
            assert len(self.saved["state"]) == len(list(self.parameters()))
        elif batch_idx == 3:
            optimizer.load_state_dict(self.saved)


class Slow(nn.Module):
    """The identity; takes a while for a while."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(1.2)
        return x


class Fails(Small):
    """Fails on the driver while the worker still computes the micro-batches ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(small_layers()[0], Slow(), nn.Linear(WIDTH, 2), FailsAt(7))


class FailsAt(nn.Module):
    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        self.limit -= 1
        if not self.limit:
            raise ValueError("the driver's layer fails")
        return x


def weights_after_a_failure() -> list[bool]:
    kept: list[Small] = []

    def make() -> Small:
        kept.append(Fails())
        return kept[-1]

    with pytest.raises(ValueError, match="the driver's layer fails"):
        fit(make, RPCSequentialStrategy([2, 2], microbatches=6, checkpoint="never"), 2, train=partial(batches, (6, 6)))
    return [parameter.is_meta for parameter in kept[0].parameters()]


class Refused(Small):
    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.change = change

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.change(self.sequential_module)


def replace_layer(layers: Any) -> None:
    layers[1] = nn.ReLU()


def replace_parameter(layers: Any) -> None:
    layers[0].weight = nn.Parameter(torch.ones(WIDTH, WIDTH))


REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (replace_layer, "the layers of the pipelined module are not those .*Change the model before fit"),
    (replace_parameter, "stage 0 .* has another layer, parameter, buffer or hook"),
    (lambda layers: layers[0].register_forward_hook(print), "stage 0 .* has another layer, parameter, buffer or"),
    (copy.deepcopy, "a module whose layers live in several processes cannot be copied .*state_dict"),
]


def refused() -> list[str]:
    messages = []
    for change, _ in REFUSED:
        with pytest.raises(RuntimeError) as error:
            fit(partial(Refused, change), RPCSequentialStrategy([3, 3], microbatches=2), 2)
        messages.append(str(error.value))
    return messages


def everything() -> dict[str, Any]:
    check(Optimizers, stages=(2,), strategy={"module": "net.layers", "balance": [3, 3]})
    return {"changed": changes(), "lost": weights_after_a_failure(), "refused": refused()}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run(everything, timeout_seconds=175)


@pytest.mark.slow
def test_modes_flags_and_attributes(found: dict[str, Any]) -> None:
    """A recomputed micro-batch has those of its own forward pass, and the layer's own attributes come back."""
    single, never, _, always = found["changed"]
    assert single == never == {"calls": 2 * 2 * (8 + 8 + 8 + 5), "temperature": 1.0 + 0.1 * 3, "early": None}
    assert always["calls"] == 2 * single["calls"]


@pytest.mark.slow
def test_weights_come_back_from_a_stage_that_is_busy(found: dict[str, Any]) -> None:
    """For longer than a moment."""
    assert not any(found["lost"])


@pytest.mark.slow
def test_what_cannot_be_carried(found: dict[str, Any]) -> None:
    for (_, pattern), message in zip(REFUSED, found["refused"], strict=True):
        with pytest.raises(RuntimeError, match=pattern):
            raise RuntimeError(message)


class Tempered(nn.Linear):
    """Depends on a plain attribute and on its mode."""

    def __init__(self, width: int) -> None:
        super().__init__(WIDTH, width)
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * self.temperature
        return y.tanh() if self.training else y.sin()


class SetsAttributes(Small):
    """Sets attributes before its call of the layers and reads them after it; and attributes and modes of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(Tempered(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), Tempered(2))
        self.kept: dict[str, Tensor] = {}
        self.sequential_module[-1].register_forward_hook(self.keep)
        self.register_buffer("mean", torch.zeros(()))
        self.num_batches = 0

    def keep(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.kept["last"] = output.detach()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        self.kept["last"] = torch.zeros_like(y)
        self.scale, self.kept["shift"], self.mean = x.abs().mean(1, keepdim=True), y.mean(1, keepdim=True), x[:, :1]
        for layer in (self.sequential_module[0], self.sequential_module[-1]):
            layer.temperature = 1.0 + 0.1 * batch_idx
            layer.train(batch_idx % 2 == 0)
        output = self(x) * self.scale
        loss = mse_loss(output, y + self.kept["shift"] + self.mean + self.kept["last"].abs())
        self.scale, self.mean = None, torch.zeros(())
        self.num_batches += 1
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())


class ChangesLate(Small):
    """Uses its layers in another mode than the one that it leaves behind."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.sequential_module.eval()
        loss = self.loss(batch)
        self.sequential_module.train()
        return loss


def attributes_of_micro_batches() -> None:
    for schedule in ("1f1b", "zb-h1"):
        outcomes = check(SetsAttributes, strategy={"schedule": schedule})
        counts = [outcome.model.num_batches for outcome in outcomes]
        assert counts == [8, 24, 24]  # training_step runs once per micro-batch
        with pytest.raises(RuntimeError, match=r"changed a mode, .* of layers of stage 0 .* in on_train_batch_start"):
            fit(ChangesLate, RPCSequentialStrategy([3, 3], microbatches=3, schedule=schedule), 2)


def test_attributes_that_training_step_sets_are_those_of_its_micro_batch() -> None:
    run(attributes_of_micro_batches, timeout_seconds=150)
