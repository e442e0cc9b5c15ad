"""How parameters are divided among replicas and gathered in layers; ``test_divided_parameters_runs.py`` trains so."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from strategies.sharding.divided_layers import connect
from strategies.sharding.gathered_layers import (
    AbsentReplicas,
    Event,
    FlatPart,
    GatheredModel,
    PartOfParameter,
    agree,
    alone,
)


@pytest.fixture(autouse=True)
def disconnected() -> Iterator[None]:
    yield
    connect(None)


class Net(nn.Module):
    """A model whose layers lie in ``blocks``."""

    def __init__(self, *blocks: nn.Module, outside: nn.Module | None = None) -> None:
        super().__init__()
        self.outside = outside or nn.Identity()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.outside(x)
        for block in self.blocks:
            x = block(x)
        return x


def divided(model: Net, size: int = 1, rank: int = 0) -> GatheredModel:
    """Divide a model; the other replicas are absent. The only replica of one has the whole values in its parts."""
    connect(AbsentReplicas(rank, size))
    return GatheredModel(model, model.blocks, rank, size)


@pytest.mark.parametrize("shape", [(3, 5), (4, 4), (1, 2), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_parts_make_the_whole(shape: tuple[int, ...], size: int) -> None:
    whole, part = torch.randn(shape), FlatPart(torch.Size(shape))
    parts = [part.of(whole, rank, size) for rank in range(size)]
    assert len({one.shape for one in parts}) == 1 and parts[0].ndim == 1
    assert torch.equal(part.joined(parts), whole)
    assert part.whole_shape(parts[0].shape, size) == list(shape)


def test_each_replica_has_its_share_of_parameters_gradients_and_states() -> None:
    model = Net(*(nn.Sequential(nn.Linear(32, 33), nn.ReLU(), nn.Linear(33, 32)) for _ in range(2)))
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    divided(model, size=4, rank=1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 32)).sum().backward()
    optimizer.step()
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor) and v.ndim]
    grads = [parameter.grad for parameter in model.parameters()]
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *grads, *states) if tensor is not None)
    assert num_bytes < held < 4 * num_bytes / 4 * 1.15  # parameters, gradients and two states, a quarter of each


class OwnAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x)[0]


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.up, self.down, self.use_reentrant = nn.Linear(4, 6), nn.Linear(6, 4), use_reentrant

    def _inner(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).tanh())
        return out

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self._inner, x, use_reentrant=self.use_reentrant)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x).softmax(-1)
        return out


class TwoWeights(nn.Module):
    """Weights that are the module's own, one of them used twice and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.first).tanh() @ self.second + (x @ self.second.T) @ self.first.T


class Tied(Net):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4))
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(len(x) * x.shape[1]).view(x.shape[:2]) % 5
        out: Tensor = self.head(super().forward(x + self.table(ids)))
        return out


MODELS: dict[str, Callable[[], Net]] = {
    "linear": lambda: Net(nn.Linear(4, 4), nn.Linear(4, 4), outside=nn.Linear(4, 4)),
    "attention": lambda: Net(OwnAttention()),
    "encoder": lambda: Net(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)),
    "checkpointed": lambda: Net(Checkpointed(False)),
    "checkpointed, reentrant": lambda: Net(Checkpointed(True)),
    "convolved": lambda: Net(Convolved()),
    "two weights": lambda: Net(TwoWeights()),
    "tied": Tied,
    "normalised": lambda: Net(spectral_norm(nn.Linear(4, 4))),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_computes_what_it_computes_with_whole_weights(name: str) -> None:
    torch.manual_seed(0)
    plain = MODELS[name]().double()
    model = copy.deepcopy(plain)
    names = divided(model).parts
    assert {n for n, p in plain.named_parameters() if p.ndim > 1} <= names.keys()
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    for each in (plain, model):
        each(x.clone().requires_grad_()).square().sum().backward()
    for (n, own), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert own.grad is not None and other.grad is not None, n
        assert torch.allclose(own.grad.view(other.shape), other.grad, 1e-12, 1e-12), n
    with torch.no_grad():
        assert torch.allclose(model.eval()(x), plain.eval()(x), 1e-12, 1e-12)


def test_the_gradient_of_a_part_is_that_of_the_mean_over_the_replicas() -> None:
    layer = nn.Linear(4, 3)
    own = divided(Net(layer), size=2, rank=1)
    x = torch.randn(5, 4)
    layer(x).sum().backward()
    whole = torch.ones(5, 3).T @ x
    assert layer.weight.grad is not None
    assert torch.allclose(layer.weight.grad, own.parts["blocks.0.weight"].of(whole, 1, 2) / 2)


def test_no_whole_weight_is_kept_for_the_backward_pass() -> None:
    layer, kept = nn.Linear(4, 3), list[StorageWeakRef]()
    divided(Net(layer))
    layer.register_forward_pre_hook(lambda module, _: kept.append(StorageWeakRef(module.weight.untyped_storage())))
    out = layer(torch.randn(2, 4, requires_grad=True))
    assert kept[0].expired()
    out.sum().backward()


class Nested(nn.Linear):
    """Has a weight itself, and a layer with another one."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.inner(x).tanh())


def test_no_whole_weight_of_a_nested_layer_is_kept_for_the_backward_pass() -> None:
    layer, kept = Nested(), list[StorageWeakRef]()
    divided(Net(layer))
    for each in (layer, layer.inner):
        each.register_forward_pre_hook(lambda module, _: kept.append(StorageWeakRef(module.weight.untyped_storage())))
    out = layer(torch.randn(2, 4, requires_grad=True))
    assert [each.expired() for each in kept] == [True, True]
    out.sum().backward()


class ChangesActivation(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).sigmoid()
        return y.add_(1) * 2


def test_a_changed_activation_is_noticed() -> None:
    layer = ChangesActivation(4, 4)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        layer(torch.randn(2, 4)).sum().backward()
    divided(Net(layer))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        layer(torch.randn(2, 4)).sum().backward()


def test_outputs_that_autograd_keeps_are_freed() -> None:
    layer = Convolved()
    divided(Net(layer))
    out = layer(torch.randn(2, 3, 4))
    kept = StorageWeakRef(out.untyped_storage())
    del out
    assert kept.expired()


def shared() -> Net:
    block = nn.Linear(4, 4)
    return Net(block, nn.Sequential(block))


def hooked() -> Net:
    layer = nn.Linear(4, 4)
    layer.weight.register_hook(lambda grad: grad)
    return Net(layer)


def across() -> Net:
    model = Net(nn.Linear(4, 4), outside=nn.Linear(4, 4))
    assert isinstance(model.outside, nn.Linear) and isinstance(model.blocks[0], nn.Linear)
    model.outside.weight = model.blocks[0].weight
    return model


class Positions(Net):
    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.positions = nn.Parameter(torch.randn(3, 4))


WHOLE: dict[str, Callable[[], Net]] = {
    "a layer that two stages may have": shared,
    "a parameter with a hook": hooked,
    "a parameter of a layer and of the driver": across,
    "a parameter of a module around the layers": Positions,
    "an embedding with sparse gradients": lambda: Net(nn.Embedding(4, 4, sparse=True)),
    "an embedding with rows of limited norm": lambda: Net(nn.Embedding(4, 4, max_norm=1.0)),
    "a recurrent layer": lambda: Net(nn.LSTM(4, 4)),
    "a list of parameters": lambda: Net(nn.ParameterList([torch.randn(4, 4)])),
    "norms and biases": lambda: Net(nn.LayerNorm(4)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_gathered_for_one_module_stays_whole(name: str) -> None:
    assert not divided(WHOLE[name](), size=2).parts


class Elsewhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.inner.weight)


def test_a_weight_that_is_used_outside_of_its_module_is_refused() -> None:
    model = Net(Elsewhere())
    divided(model, size=4)  # a part has four elements, which would fit
    with pytest.raises(RuntimeError, match=r"zero_stage=3: a weight is used outside of the forward function of its ow"):
        model(torch.randn(4))


def test_a_penalty_on_weights_is_refused() -> None:
    model = Net(nn.Linear(4, 4))
    divided(model, size=2)
    with pytest.raises(RuntimeError, match=r"or a penalty on weights in training_step"):
        sum(parameter.square().sum() for parameter in model.parameters())


class Changing(nn.Linear):
    def __init__(self, way: str) -> None:
        super().__init__(4, 4)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.way == "in place":
                self.weight.clamp_(-0.1, 0.1)
            elif self.way == "data in place":
                self.weight.data.clamp_(-0.1, 0.1)
            else:
                self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("way", ["in place", "data in place", "other data"])
def test_a_layer_that_changes_its_weights_is_refused(way: str) -> None:
    model = Net(Changing(way))
    divided(model, size=2)
    with pytest.raises(RuntimeError, match=r"blocks.0 changes its weights in its forward function"), torch.no_grad():
        model(torch.randn(2, 4))


def test_a_step_before_the_backward_pass_is_refused() -> None:
    model = Net(nn.Linear(4, 4), nn.Linear(4, 4))
    divided(model, size=2)
    loss = model(torch.randn(2, 4)).sum()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    with pytest.raises(RuntimeError, match=r"weight of shape \[4, 4\] has changed since the forward pass"):
        loss.backward()


def test_an_error_in_a_layer_leaves_its_parts_in_place() -> None:
    model = Net(nn.Linear(4, 4))
    divided(model, size=2)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.randn(2, 5))
    assert isinstance(model.blocks[0].weight, PartOfParameter)
    assert model(torch.randn(2, 4)).shape == (2, 4)


def test_layers_travel_with_their_hooks() -> None:
    model = Net(nn.Linear(4, 4))
    divided(model)
    layer = pickle.loads(pickle.dumps(model.blocks[0]))
    assert isinstance(layer.weight, PartOfParameter) and layer.weight.shape == (16,)
    x = torch.randn(2, 4)
    assert torch.equal(layer(x), model(x))


class Alone(AbsentReplicas):
    """One replica, which has all parts."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def parts(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]


def test_the_model_is_whole_again() -> None:
    model = Net(nn.Linear(4, 4))
    before = copy.deepcopy(model.state_dict())
    parameter = model.blocks[0].weight
    own = divided(model)
    own.restore(Alone())
    assert model.blocks[0].weight is parameter and type(parameter) is nn.Parameter
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    connect(None)
    assert model(torch.randn(2, 4)).shape == (2, 4)


class Differing(AbsentReplicas):
    def __init__(self, event: Event, value: float) -> None:
        super().__init__(0, 2)
        self._other = torch.tensor([event, value], dtype=torch.float64)

    def told(self, message: Tensor) -> list[Tensor]:
        return [message, self._other]


@pytest.mark.parametrize(
    "event, value, said",
    [
        (Event.PASS, 3.0, "this replica has 4 micro-batches where replica 1 has 3"),
        (Event.GATHER, 4.0, "this replica reached the next pass, while replica 1 reached the use of a layer"),
    ],
    ids=str,
)
def test_replicas_that_do_different_steps_are_refused(event: Event, value: float, said: str) -> None:
    connect(Differing(Event.PASS, 4.0))
    agree(Event.PASS, 4.0)
    connect(Differing(event, value))
    with pytest.raises(RuntimeError, match=f"all replicas must do the same steps, but {said}"):
        agree(Event.PASS, 4.0)


def test_a_replica_finds_shapes_without_the_others() -> None:
    model = Net(nn.Linear(4, 3))
    divided(model, size=2)
    connect(Differing(Event.PASS, 0.0))
    with alone():
        assert model(torch.randn(2, 4)).shape == (2, 3)
    with pytest.raises(RuntimeError, match="all replicas must do the same steps"):
        model(torch.randn(2, 4))
