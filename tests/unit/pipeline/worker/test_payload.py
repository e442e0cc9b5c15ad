"""What is shipped to a worker."""

import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.pipeline.worker.payload import pickled


class Scaled(nn.Module):
    """A layer that calls something it was given."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Model(nn.Module):
    def scale(self, x: Tensor) -> Tensor:
        return 2 * x


def test_layers_go_with_functions_of_scripts() -> None:
    layers, factor = nn.Sequential(Scaled(lambda x: factor * x)), 3
    arrived = pickle.loads(pickled(layers, layers, Model()))
    assert arrived(torch.ones(2)).tolist() == [3, 3]


def pickle_layer(layer: nn.Module, model: nn.Module) -> bytes:
    layers = nn.Sequential(nn.ReLU(), layer)
    return pickled({"layers": layers}, layers, model)


def test_a_layer_that_refers_to_the_whole_model() -> None:
    model = Model()
    message = r"refers to the whole model \(Model\), for example by a bound method .*let the layer hold only what it"
    with pytest.raises(ValueError, match=message):
        pickle_layer(Scaled(model.scale), model)
    with pytest.raises(ValueError, match=message):
        pickle_layer(Scaled(lambda x: model.scale(x)), model)
    assert pickle_layer(Scaled(Model().scale), model)  # some other object's method may go along


def test_a_layer_that_cannot_be_pickled_is_named() -> None:
    message = r"layer 1, a Scaled, cannot be sent to another process \(TypeError: cannot pickle '_thread.lock'"
    layers = nn.Sequential(Scaled(threading.Lock()), Scaled(threading.Lock()))
    with pytest.raises(ValueError, match=r"^layer 0, a Scaled, and layer 1, a Scaled, cannot be sent"):
        pickled(layers, layers, Model())
    with pytest.raises(ValueError, match=message):
        pickle_layer(Scaled(threading.Lock()), Model())
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"layer 1, a ParametrizedLinear, cannot be sent .*only supported through"):
        pickle_layer(parametrized, Model())
    with pytest.raises(ValueError, match=r"an optimizer cannot be sent to another process \(TypeError: "):
        pickled([threading.Lock()], nn.Sequential(nn.ReLU()), Model())


def test_a_layer_that_was_compiled_in_place() -> None:
    layer = nn.Linear(2, 2)
    layer.compile(backend="eager")
    with pytest.warns(
        UserWarning, match=r"layer 1 was compiled by \.compile\(\), .*Put torch\.compile\(layer\) in its"
    ):
        pickle_layer(layer, Model())


def test_hooks_of_parameters_cannot_follow() -> None:
    message = r"parameter 1\.weight has a hook \(register_hook\), .*register hooks on the output of a layer instead"
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        linear = nn.Linear(2, 2)
        getattr(linear.weight, register)(lambda *args: None)
        with pytest.raises(ValueError, match=message):
            pickle_layer(linear, Model())
