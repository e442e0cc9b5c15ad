"""Objects in a value, taken apart into tensors and the rest and put together again."""

import copy
import threading
from typing import Any

import pytest
import torch
from stage_parts import Block, Cache, Last, pipelined
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from strategies.pipeline import NoChunk, Pipe
from strategies.pipeline.stage.layers import RECOMPUTE_MODES as MODES
from strategies.pipeline.stage.microbatch.split import pack_objects, unpack_objects

pytestmark = pytest.mark.usefixtures("float64")


class Holds:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def test_tensors_of_objects_become_those_of_the_value() -> None:
    a, b = torch.rand(2, requires_grad=True) * 1, torch.rand(3)
    inner = Holds(b=b, again=a, words=["x"])
    shared = Holds(a=a, inner=inner, count=3)
    value = {"x": b, "shared": shared, "twice": [shared, (None, 2, torch.float64)], "inner": inner}
    packed = pack_objects(value)
    assert [leaf for leaf in tree_leaves(packed) if isinstance(leaf, Tensor)] == [b, a, b, b, a]
    first, second = unpack_objects(packed), unpack_objects(packed)
    assert first["shared"] is first["twice"][0] is not shared and first["shared"] is not second["shared"]
    assert first["twice"][1] == (None, 2, torch.float64) and first["shared"].count == 3
    assert first["shared"].a is first["shared"].inner.again is a and first["shared"].inner.b is b
    first["shared"].inner.words.append("y")
    assert second["shared"].inner.words == inner.words == ["x"]


@pytest.mark.parametrize("value", [torch.ones(2), (torch.ones(2), {"a": [None, 3, "word", torch.float64, len]})])
def test_a_value_without_objects_is_left_alone(value: Any) -> None:
    assert pack_objects(value) is value


def test_what_cannot_be_pickled_stays() -> None:
    lock = Holds(lock=threading.Lock())
    packed = pack_objects((torch.ones(1), lock))
    assert packed[1] is lock and unpack_objects(packed)[1] is lock


def test_tensors_are_marked() -> None:
    packed = pack_objects([torch.ones(1), Holds(a=torch.ones(2))], NoChunk)
    assert [type(leaf) for leaf in tree_leaves(packed)] == [Tensor, NoChunk]


class Splits(nn.Module):
    """Gives what comes out of the layer before as several arguments, or takes them together."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *given: Any) -> Any:
        return self.layer(given)


@pytest.mark.parametrize("mode", MODES)
def test_caches_in_a_pipe(mode: str) -> None:
    """Each micro-batch fills a cache of its own, once."""
    plain = nn.Sequential(*(Block(number) for number in range(3)), Last())
    wrapped = nn.Sequential(*(Splits(layer) for layer in copy.deepcopy(plain)))
    pipe = Pipe(wrapped, chunks=3, checkpoint=mode)
    x = torch.rand(5, 3, 4)
    for _ in range(2):
        expected, output = plain((x, Cache())), pipe(x, Cache()).local_value()
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        for result in (expected, output):
            result.square().sum().backward()
        for own, other in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-10, atol=1e-10)


def test_one_micro_batch_fills_the_cache_that_it_was_given() -> None:
    cache = Cache()
    with torch.no_grad():
        Pipe(nn.Sequential(Splits(Block(0))))(torch.rand(2, 3, 4), cache)
    assert cache.updates == 1


class Prefix(nn.Module):
    """Uses what an object holds that the caller made."""

    def forward(self, given: tuple[Tensor, Holds]) -> tuple[Tensor, Holds]:
        return given[0] * given[1].scale + given[1].shift, given[1]


@pytest.mark.parametrize("mode", MODES)
def test_gradients_into_objects_are_summed(mode: str) -> None:
    layers = nn.Sequential(Prefix(), Prefix(), Prefix())
    grads = []
    for microbatches in (1, 3):
        x, scale, shift = (torch.linspace(1, 2, n).requires_grad_() for n in (5, 1, 1))
        with pipelined(nn.Sequential(*layers, nn.Sequential(Only())), microbatches, checkpoint=mode) as pipeline:
            pipeline.module((x[:, None], Holds(scale=scale * 1, shift=shift))).square().sum().backward()
        grads.append([tensor.grad for tensor in (x, scale, shift)])
    plain = x.detach().clone().requires_grad_()
    scale, shift = (torch.ones(1, requires_grad=True) for _ in range(2))
    nn.Sequential(*layers, Only())((plain[:, None], Holds(scale=scale, shift=shift))).square().sum().backward()
    for own in grads:
        torch.testing.assert_close(own, [plain.grad, scale.grad, shift.grad], rtol=1e-12, atol=1e-12)


class Only(nn.Module):
    def forward(self, given: Any) -> Any:
        return given[0]


def test_objects_in_the_output() -> None:
    """That of one micro-batch is returned, with gradients; those of several cannot be joined."""
    layers, x = nn.Sequential(Block(0)), torch.rand(4, 3, 4)
    expected, filled = layers((x, Cache()))
    with pipelined(layers, 1) as pipeline:
        output, cache = pipeline.module((x, Cache()))
        torch.testing.assert_close([output, cache.keys[0]], [expected, filled.keys[0]])
        (2 * cache.keys[0]).sum().backward()
        torch.testing.assert_close(layers[0].key.bias.grad, torch.full((4,), 2.0 * 12))
    message = r"a different Cache for each micro-batch.*use_cache=False"
    with pipelined(layers, 2) as pipeline, pytest.raises(ValueError, match=message):
        pipeline.module((x, Cache()))
