"""Skip connections: the rules, and a ``Pipe`` in one process against a plain ``nn.Sequential``."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from skip_nets import Down, u_net
from torch import Tensor, nn

from strategies.pipeline import Namespace, Pipe, pop, skippable, stash, verify_skippables
from strategies.pipeline.stage.layers import RECOMPUTE_MODES as MODES

pytestmark = pytest.mark.usefixtures("float64")


@skippable(stash=["1to3"])
class Layer1(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("1to3", x * 2)
        return x + 1


class Layer2(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 3


@skippable(pop=["1to3"])
class Layer3(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("1to3"))


@pytest.mark.parametrize("mode", MODES)
def test_u_net_trains_as_one_process(mode):
    plain = u_net()
    plain[3] = nn.GroupNorm(2, 12)  # BatchNorm sees micro-batches
    pipe = Pipe(copy.deepcopy(plain), chunks=3, checkpoint=mode)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (pipe, plain)]
    for _ in range(2):
        x = torch.rand(5, 2, 8)
        losses = [pipe(x).local_value().square().mean(), plain(x).square().mean()]
        torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-9)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for (name, own), (same_name, other) in zip(pipe.named_parameters(), plain.named_parameters(), strict=True):
        assert name == same_name
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)


def test_freed_at_the_pop():
    stashed: list[weakref.ref[Tensor]] = []
    alive: list[list[bool]] = []

    @skippable(stash=["x"])
    class Stashes(nn.Module):
        def forward(self, x: Tensor) -> Any:
            skip = x * 2
            stashed.append(weakref.ref(skip.untyped_storage()))
            yield stash("x", skip)
            del skip
            return x + 1

    class Watches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            alive.append([reference() is not None for reference in stashed])
            return x + 1

    @skippable(pop=["x"])
    class Pops(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x + (yield pop("x"))  # keeps neither for its backward pass

    pipe = Pipe(nn.Sequential(Stashes(), Watches(), Pops(), Watches()), chunks=1, checkpoint="never")
    output = pipe(torch.rand(3, requires_grad=True)).local_value()
    assert alive == [[True], [False]]
    output.sum().backward()
    assert [reference() for reference in stashed] == [None]


def test_only_what_is_alive_reaches_the_pop():
    """Every micro-batch pops its own skip; ``None`` can be stashed; a layer may return without a yield."""

    @skippable(stash=["a", "b"])
    class Two(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield stash("b", None)
            yield stash("a", x)
            return x * 0

    @skippable(pop=["a", "b"])
    class Both(nn.Module):
        def forward(self, x: Tensor) -> Any:
            assert (yield pop("b")) is None
            return x + (yield pop("a"))

    x = torch.rand(7, 2)
    for mode in MODES:
        assert torch.equal(Pipe(nn.Sequential(Two(), Layer2(), Both()), 4, mode)(x).local_value(), x)
    nested = nn.Sequential(nn.Sequential(Two(), Layer2()), nn.Sequential(Both()), Layer1(), Layer3())
    assert torch.equal(Pipe(nested, 2)(x).local_value(), nested(x))


def test_the_class_stays_what_it_is():
    down = Down(2)
    assert list(down.state_dict()) == ["conv.weight", "conv.bias"]
    space = Namespace()
    for twin in (copy.deepcopy(down.isolate(space)), pickle.loads(pickle.dumps(down))):
        net = nn.Sequential(twin, nn.Identity())
        with pytest.raises(TypeError, match="'skip' is stashed, but no layer after that pops it"):
            verify_skippables(net)
    assert pickle.loads(pickle.dumps(space)) == space != Namespace()


def test_isolated_in_parts():
    @skippable(stash=["a", "b"])
    class Two(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield stash("a", x)
            yield stash("b", 2 * x)
            return x

    @skippable(pop=["a"])
    class A(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x - (yield pop("a"))

    @skippable(pop=["b"])
    class B(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x + (yield pop("b"))

    one, two = Namespace(), Namespace()
    net = nn.Sequential(
        Two().isolate(one, only=["a"]).isolate(two, only=["b"]), Two(), A().isolate(one), B(), A(), B().isolate(two)
    )
    verify_skippables(net)
    x = torch.rand(4)
    torch.testing.assert_close(net(x), x - x + 2 * x - x + 2 * x)
    with pytest.raises(ValueError, match=r"A neither stashes nor pops \['b'\], only \['a'\]"):
        A().isolate(one, only=["b"])
    with pytest.raises(TypeError, match="only takes a list of names"):
        A().isolate(one, only="a")


def test_unmatched():
    for layers, message in [
        ([Layer1(), Layer2()], "'1to3' is stashed, but no layer after that pops it"),
        ([Layer2(), Layer3()], "layer 1 pops '1to3', which no layer before it stashes"),
        ([Layer3(), Layer1()], "layer 0 pops '1to3', which no layer before it stashes"),
        ([Layer1(), Layer2(), Layer3(), Layer3()], "layer 3 pops '1to3', which a layer before it has popped"),
        ([Layer1(), Layer1(), Layer2(), Layer3()], "layer 1 stashes '1to3', which a layer before it has stashed"),
        ([Layer1().isolate(Namespace()), Layer3()], "layer 1 pops '1to3', which no layer before it stashes"),
    ]:
        with pytest.raises(TypeError, match=message):
            verify_skippables(nn.Sequential(*layers))
        with pytest.raises(TypeError, match=message):
            Pipe(nn.Sequential(*layers))
    one, two = Namespace(), Namespace()
    pairs = [Layer1().isolate(one), Layer3().isolate(one), Layer1().isolate(two), Layer3().isolate(two)]
    verify_skippables(nn.Sequential(*pairs, Layer1(), Layer3()))


def test_what_layers_may_not_do():
    def layer(asks: Any, **names: Any) -> nn.Module:
        class Custom(nn.Module):
            def forward(self, x: Tensor) -> Any:
                yield from asks
                return x

        return skippable(**names)(Custom)()

    x = torch.rand(2)
    for asks, names, kind, message in [
        ([stash("b", x)], {"stash": ["a"]}, RuntimeError, r"stash\('b'\), which it has done before or which is not in"),
        ([pop("a")], {"stash": ["a"]}, RuntimeError, r"pop\('a'\), which it has done before or which is not in"),
        ([stash("a", x)] * 2, {"stash": ["a"]}, RuntimeError, r"stash\('a'\), which it has done before"),
        ([], {"stash": ["b", "a"]}, RuntimeError, r"returned without stashing \['a', 'b'\]"),
        ([pop("c")], {"pop": ["c"]}, RuntimeError, "pops 'c', which has not been stashed"),
        ([x], {"stash": ["a"]}, TypeError, "has yielded Tensor; skippable layers yield"),
        ([stash("a", 3)], {"stash": ["a"]}, TypeError, "stashes int as 'a'"),
    ]:
        with pytest.raises(kind, match=message):
            layer(asks, **names)(x)
    with pytest.raises(TypeError, match="stash takes a list of names, got 'alice'"):
        skippable(stash="alice")
    with pytest.raises(TypeError, match="cannot take Identity: decorate a subclass"):
        skippable(stash=["a"])(nn.Identity)
    with pytest.raises(TypeError, match="layer 0 both stashes and pops 'a'"):
        verify_skippables(nn.Sequential(layer([], stash=["a"], pop=["a"])))
    gc.collect()
