"""What is shipped to a worker."""

import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.pipeline.construction.without_memory import SMALL_BYTES
from strategies.pipeline.state.carriers import Parcel, pickled, unpickled


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
    arrived = unpickled(pickled(layers, layers, Model()).blob)[0]
    assert arrived(torch.ones(2)).tolist() == [3, 3]


NOTHING = object()
"""A default that functions compare by identity."""


def test_a_plain_object_of_a_module_arrives_as_that_object() -> None:
    layers = nn.Sequential(Scaled(None))
    layers[0].function, layers[0].other = NOTHING, object()
    arrived = unpickled(pickled(layers, layers, Model()).blob)[0]
    assert arrived[0].function is NOTHING
    assert type(arrived[0].other) is object and arrived[0].other is not NOTHING


def pickle_layer(layer: nn.Module, model: nn.Module) -> Parcel:
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
        UserWarning, match=r"layer 1 was compiled by \.compile\(\), .*Replace it with torch\.compile\(layer\)"
    ):
        pickle_layer(layer, Model())


def test_hooks_of_parameters_cannot_follow() -> None:
    message = r"parameter 1\.weight has a hook \(register_hook\), .*register hooks on the output of a layer instead"
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        linear = nn.Linear(2, 2)
        getattr(linear.weight, register)(lambda *args: None)
        with pytest.raises(ValueError, match=message):
            pickle_layer(linear, Model())


def test_large_values_are_not_in_the_pickle() -> None:
    layers = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    layers[1].weight = layers[0].weight  # tied
    layers[0].register_buffer("rows", layers[0].weight.detach()[2:4])  # a view of the parameter
    parcel = pickled(layers, layers, Model())
    assert len(parcel.blob) < 20_000 and [storage.nbytes() for storage in parcel.storages] == [300 * 300 * 4]
    arrived, (storage,) = unpickled(parcel.blob)
    storage.copy_(parcel.storages[0])
    assert arrived[1].weight is arrived[0].weight and torch.equal(arrived[0].weight, layers[0].weight)
    assert torch.equal(arrived[1].bias, layers[1].bias)
    with torch.no_grad():
        arrived[0].weight[2] = 7
    assert arrived[0].rows[0].tolist() == [7] * 300

    in_one = pickled(layers, layers, Model(), small_bytes=sys.maxsize)
    assert not in_one.storages
    assert torch.equal(unpickled(in_one.blob)[0][0].weight, layers[0].weight)


@pytest.mark.parametrize("size", [3, 100_000])
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.complex32])
def test_dtypes_that_torch_pickles_without_a_typed_storage(dtype: torch.dtype, size: int) -> None:
    layers = nn.Sequential(nn.Linear(2, 2))
    layers[0].register_buffer("codes", torch.randint(3, (2, size)).to(dtype))
    layers[0].register_buffer("row", layers[0].codes[1])
    for small_bytes in (-1, SMALL_BYTES, sys.maxsize):
        parcel = pickled(layers, layers, Model(), small_bytes=small_bytes)
        arrived, storages = unpickled(parcel.blob)
        for storage, sent in zip(storages, parcel.storages, strict=True):
            storage.copy_(sent)
        for name, buffer in layers.named_buffers():
            got = arrived.get_buffer(name)
            assert got.dtype is dtype and torch.equal(got.view(torch.uint8), buffer.view(torch.uint8))
