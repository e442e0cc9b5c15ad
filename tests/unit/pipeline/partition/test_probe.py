"""What a module gets from the model around it, found without leaving a trace."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from strategies.pipeline.partition.probe import calls_last_first, input_of


class Probed(nn.Module):
    """Something before the Sequential, something behind it, and a trap for whoever goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.5)
        self.layers = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
        self.num_runs = 0
        self.layers.register_forward_hook(self._run)
        self.dropout.eval()

    def _run(self, *args: Any) -> None:
        self.num_runs += 1

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        torch.rand(1)
        output = self.layers(self.dropout(self.norm(x)) * scale)
        raise AssertionError("nothing behind the module may run")
        return output


@pytest.mark.parametrize(
    ("example", "scale"),
    [
        (torch.ones(4, 3), 1.0),
        ((torch.ones(4, 3),), 1.0),
        ((torch.ones(4, 3), 2.0), 2.0),
        ({"x": torch.ones(4, 3), "scale": 3.0}, 3.0),
    ],
)
def test_what_the_sequential_gets(example: Any, scale: float) -> None:
    model = Probed()
    modes = [module.training for module in model.modules()]
    buffers, state = [b.clone() for b in model.buffers()], torch.get_rng_state()
    found = input_of(model.layers, model, example)
    # In evaluation mode: means 0 and variances 1 (to which the norm adds 1e-5), no dropout.
    torch.testing.assert_close(found, torch.full((4, 3), scale), rtol=1e-5, atol=0)
    assert not found.requires_grad
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert "forward" not in vars(model.layers) and model.num_runs == 0
    assert all(p.grad is None for p in model.parameters())


def test_nested_inputs_are_found() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layers = nn.Linear(2, 2), nn.Sequential(nn.Identity())

        def forward(self, x: Tensor) -> Any:
            return self.layers({"x": (self.first(x), None), "kind": "word"})

    model = Nested()
    found = input_of(model.layers, model, torch.ones(1, 2))
    assert found["kind"] == "word" and found["x"][1] is None
    assert torch.equal(found["x"][0], model.first(torch.ones(1, 2)))
    assert not found["x"][0].requires_grad


def test_a_model_without_forward_or_that_never_calls_the_module() -> None:
    example = torch.ones(2)
    model = nn.Module()  # has no forward
    model.layers = nn.Sequential(nn.Linear(3, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert input_of(model.layers, model, example) is example
    assert model.training
    assert input_of(model.layers, model, ((example, 1),)) == (example, 1)  # one argument
    assert input_of(model.layers, model, (example, 1)) == (example, 1)

    unused = nn.Sequential(nn.Linear(2, 2))
    unused.add_module("other", nn.Identity())
    unused.forward = lambda x: x
    assert input_of(unused[0], unused, example) is example
    assert "forward" not in vars(unused[0])


def test_an_error_in_front_of_the_module_is_the_users() -> None:
    model = Probed()
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        input_of(model.layers, model, torch.ones(3))
    assert model.training and not model.dropout.training
    assert "forward" not in vars(model.layers)


def test_a_forward_of_the_instance_is_kept() -> None:
    layers = nn.Sequential(nn.Linear(2, 2))
    patched = layers.forward
    layers.forward = patched
    model = nn.Sequential(layers)
    input_of(layers, model, torch.ones(1, 2))
    assert vars(layers)["forward"] is patched


class Traced(nn.Module):
    """Code before the layers that changes whatever a model can change."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 3, max_norm=0.1)
        self.register_buffer("num_rows", torch.zeros(()))
        self.layers, self.blocks = nn.Sequential(nn.Linear(3, 3)), nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.seen, self.kept = 0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.kept.append(len(x))
        self.num_rows += len(x)
        random.random(), numpy.random.rand(), torch.rand(())
        hidden = self.layers(self.words(x))
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def state(self) -> list[Any]:
        tensors = [tensor.tolist() for tensor in self.state_dict().values()]
        states = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        return [*tensors, self.seen, [*self.kept], *states, *[module.training for module in self.modules()]]


PROBES = pytest.mark.parametrize(
    "probe",
    [
        lambda model, example: input_of(model.layers, model, example),
        lambda model, example: calls_last_first(model.blocks, model, example),
    ],
    ids=["input", "order"],
)


@PROBES
def test_what_runs_before_the_module_leaves_no_trace(probe: Callable[[nn.Module, Tensor], Any]) -> None:
    model = Traced()
    model.words.eval()
    before = model.state()
    probe(model, torch.arange(4))
    assert model.state() == before


class Lazy(nn.Module):
    """A lazy layer and one with inference tensors before the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(3)
        with torch.inference_mode():
            self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.layers, self.blocks = nn.Sequential(nn.Linear(3, 3)), nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.frozen(self.lazy(x))
        hidden = self.layers(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


@PROBES
def test_lazy_layers_and_inference_tensors_before_the_module(probe: Callable[[nn.Module, Tensor], Any]) -> None:
    model, example = Lazy(), torch.ones(2, 4)
    probe(model, example)
    probe(model, example)
    assert model(example).shape == (2, 3)
    assert model.lazy.training


@pytest.mark.parametrize(("order", "found"), [([0, 1, 2], False), ([2, 1, 0], True), ([1, 2, 0], False)])
def test_the_order_of_blocks(order: list[int], found: bool) -> None:
    class Ordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Identity() for _ in order)

        def forward(self, x: Tensor) -> Tensor:
            for number in order:
                x = self.blocks[number](x)
            return x

    model = Ordered()
    assert calls_last_first(model.blocks, model, torch.ones(1)) is found
