"""Fingerprints of values, and marks of a run that notice what no step has done."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from strategies.lightning.recovery.marks import Marks, fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8])
@pytest.mark.parametrize("shape", [(), (3,), (100, 90), (3000, 7)])
def test_a_fingerprint_tells_values_and_their_places(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensor = (30 * torch.randn(shape)).to(dtype)
    assert fingerprint(tensor) == fingerprint(tensor.clone())
    assert fingerprint(tensor) != fingerprint(tensor.unsqueeze(0))
    flat = tensor.flatten()
    for place in range(0, flat.numel(), 97):
        other = flat.clone()
        other[place] += 1
        assert fingerprint(other.view(shape)) != fingerprint(tensor)
    if flat.numel() > 3:
        for other in (flat.flip(0), flat.roll(1), flat.roll(512), flat.roll(1024)):
            assert fingerprint(other.view(shape)) != fingerprint(tensor)


def test_fingerprints_of_parts_of_a_storage() -> None:
    storage = torch.randn(9001)
    odd, across = storage[1:], storage[:9000].view(100, 90).t()
    assert fingerprint(odd) == fingerprint(odd.clone()) and fingerprint(across) == fingerprint(across.contiguous())
    assert fingerprint(torch.empty(3, device="meta")) is None
    for dtype in (torch.bool, torch.float8_e4m3fn, torch.complex64):
        assert fingerprint(torch.ones(5).to(dtype)) != fingerprint(torch.zeros(5).to(dtype))


class Counted(nn.Module):
    """A layer with attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(70, 70)
        self.register_buffer("mean", torch.zeros(3))
        self.rate, self.total, self.seen = 0.5, torch.zeros(2), [torch.zeros(1)]
        self.table = {"a": [1]}


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Counted())
        self.head = nn.Linear(70, 1)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def marks_of(model: Model) -> tuple[Marks, torch.optim.Optimizer]:
    """Marks of a model after a step."""
    optimizer = torch.optim.AdamW(model.parameters())
    pipeline = SimpleNamespace(
        module=model.layers,
        stages=[model.layers],
        optimizers=SimpleNamespace(optimizers=[optimizer]),
        num_updates=0,
        balance=[1],
        remotes=[],
        parameters_here=lambda: list(model.parameters()),
    )
    model.head(model.layers[0].linear(torch.randn(4, 70))).square().mean().backward()
    optimizer.step()
    return Marks(model, cast(Any, pipeline)), optimizer


def _exp_avg(model: Any, optimizer: Any) -> Tensor:
    return cast(Tensor, optimizer.state[model.head.weight]["exp_avg"])


COUNTED: dict[str, Callable[[Any, Any], Any]] = {
    "a weight": lambda model, optimizer: nn.init.zeros_(model.head.weight),
    "a weight that is another tensor": lambda model, _: setattr(model.head.weight, "data", torch.zeros(1, 70)),
    "a buffer": lambda model, _: model.layers[0].mean.add_(1),
    "a buffer that is another tensor": lambda model, _: setattr(model.layers[0], "mean", torch.zeros(3)),
    "a state": lambda model, optimizer: _exp_avg(model, optimizer).zero_(),
    "no states": lambda model, optimizer: optimizer.state.clear(),
    "a number of a layer": lambda model, _: setattr(model.layers[0], "rate", 0.25),
    "a tensor of a layer": lambda model, _: model.layers[0].total.add_(1),
}
"""Changes that torch counts."""

READ: dict[str, Callable[[Any, Any], Any]] = {
    "a weight": lambda model, _: model.head.weight.data.clamp_(-0.01, 0.01),
    "a weight in NumPy": lambda model, _: model.head.weight.detach().numpy().fill(0),
    "a buffer": lambda model, _: model.layers[0].mean.data.add_(1),
    "a state": lambda model, optimizer: _exp_avg(model, optimizer).data.zero_(),
    "places": lambda model, _: model.layers[0].linear.weight.data.copy_(model.layers[0].linear.weight.data.flip(0)),
    "a list of a layer": lambda model, _: model.layers[0].seen.append(1),
    "a tensor in a list of a layer": lambda model, _: model.layers[0].seen[0].add_(1),
    "a dict of a layer": lambda model, _: model.layers[0].table["a"].append(2),
}
"""Changes that only reading the values tells."""


@pytest.mark.parametrize("reads_values", [False, True])
@pytest.mark.parametrize("name", COUNTED)
def test_what_torch_counts(model: Model, name: str, reads_values: bool) -> None:
    marks, optimizer = marks_of(model)
    before = marks.now(reads_values=reads_values)
    assert before.equals(marks.now(reads_values=reads_values), with_gradients=True)
    with torch.no_grad():
        COUNTED[name](model, optimizer)
    assert not before.equals(marks.now(reads_values=reads_values), with_gradients=False)


@pytest.mark.parametrize("name", READ)
def test_what_only_reading_tells(model: Model, name: str) -> None:
    marks, optimizer = marks_of(model)
    before = marks.now(reads_values=True)
    READ[name](model, optimizer)
    assert not before.equals(marks.now(reads_values=True), with_gradients=False)


def test_results_that_a_layer_keeps_do_not_count(model: Model) -> None:
    """Such as its last output, which a validation step replaces."""
    layer: Any = model.layers[0]
    layer.last, layer.outputs = layer.linear(torch.ones(70)), {"last": layer.linear(torch.ones(70))}
    marks, _ = marks_of(model)
    before = marks.now(reads_values=True)
    with torch.inference_mode():
        layer.last, layer.outputs["last"] = layer.linear(torch.ones(70)), layer.linear(torch.zeros(70))
    assert before.equals(marks.now(reads_values=True), with_gradients=False)


def test_gradients_count_where_they_are_used(model: Model) -> None:
    marks, _ = marks_of(model)
    before = marks.now(reads_values=True)
    model.head.weight.grad.data.mul_(2)
    after = marks.now(reads_values=True)
    assert before.equals(after, with_gradients=False) and not before.equals(after, with_gradients=True)
    model.head.weight.grad = None
    assert not after.equals(marks.now(reads_values=False), with_gradients=True)


def test_sums_of_changes_do_not_hide_a_change(model: Model) -> None:
    """One tensor counts one change more, and one that is replaced by another one counts one less."""
    model.layers[0].mean.add_(1)
    marks, _ = marks_of(model)
    before = marks.now(reads_values=False)
    cast(Any, model.layers[0]).mean = torch.zeros(3)
    cast(Any, model.layers[0]).total.add_(1)
    assert not before.equals(marks.now(reads_values=False), with_gradients=False)
