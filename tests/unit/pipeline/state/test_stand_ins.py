"""What stays on the driver of layers that live on workers, and how they become whole again."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.pipeline.state.remote_tensor import RemoteBuffer, RemoteParameter
from strategies.pipeline.state.stand_ins import check_layouts, move_from_meta, move_to_meta, without_layers


def test_without_layers() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    layers = list(module)
    with without_layers(module, ["0", "1"]):
        assert list(module) == layers[2:]
        assert list(dict(module.named_parameters())) == ["2.weight", "2.bias"]
        module.double()
    assert list(module) == layers and list(module._modules) == ["0", "1", "2"]
    assert [module[0].weight.dtype, module[2].weight.dtype] == [torch.float32, torch.float64]
    with pytest.raises(KeyError), without_layers(module, ["0", "1", "2"]):
        raise KeyError
    assert list(module) == layers


def with_ties() -> nn.Sequential:
    """Tied parameters, a buffer that is not saved, and one that two layers share."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False), nn.Identity())
    layers[2].weight = layers[0].weight
    layers[0].bias.requires_grad_(False)
    layers[2].register_buffer("mask", torch.ones(3), persistent=False)
    return layers


def tensors_of(layers: nn.Module) -> dict[str, Tensor]:
    named = [*layers.named_parameters(), *layers.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in named}


def test_to_meta_and_back() -> None:
    layers = with_ties()
    optimizer = torch.optim.SGD(layers.parameters(), 0.1)
    layers(torch.randn(4, 3)).sum().backward()
    layers.zero_grad()
    layers[0].weight.grad = torch.ones(3, 3)
    layers[0].weight.decays = False
    before, parameters, names = tensors_of(layers), list(layers.parameters()), list(layers.state_dict())
    flags, types = [p.requires_grad for p in parameters], [type(p) for p in parameters]

    move_to_meta(layers, layers, [optimizer])
    assert all(t.is_meta for t in (*layers.parameters(), *layers.buffers()))
    assert all(type(p) is RemoteParameter for p in layers.parameters())
    assert all(type(b) is RemoteBuffer for b in layers.buffers())
    assert layers[0].weight.decays is False  # as optimizers with groups by such marks want it
    named = [*layers.named_parameters(), *layers.named_buffers(remove_duplicate=False)]
    assert {name: t.shape for name, t in named} == {name: t.shape for name, t in before.items()}
    assert list(layers.state_dict()) == names

    move_from_meta(layers, layers, [optimizer], {name: tensor + 1 for name, tensor in before.items()})
    assert [id(p) for p in layers.parameters()] == [id(p) for p in parameters]
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in parameters]
    assert [p.requires_grad for p in layers.parameters()] == flags and [type(p) for p in parameters] == types
    assert layers[2].weight is layers[0].weight
    for name, tensor in tensors_of(layers).items():
        assert torch.equal(tensor, before[name] + 1), name
    assert layers[2].mask.tolist() == [2, 2, 2] and type(layers[2].mask) is Tensor
    assert vars(layers[0].weight) == {"decays": False}
    layers(torch.randn(4, 3)).sum().backward()
    optimizer.step()


def test_a_shared_buffer_stays_shared() -> None:
    layers = nn.Sequential(nn.Identity(), nn.Identity())
    layers[0].register_buffer("table", torch.arange(3.0))
    layers[1].register_buffer("table", layers[0].table)
    tensors = tensors_of(layers)
    move_to_meta(layers, layers, [])
    assert layers[1].table.is_meta
    move_from_meta(layers, layers, [], tensors)
    assert layers[1].table is layers[0].table


@pytest.mark.parametrize("hold", [lambda p: (p * 2).sum(), weakref.ref], ids=["graph", "weak reference"])
def test_a_parameter_that_something_holds_on_to(hold: Any) -> None:
    """As in a notebook, where the output of an earlier cell is still there. It is replaced wherever it counts."""
    layers = with_ties()
    optimizer = torch.optim.SGD(layers.parameters(), 0.1, momentum=0.9)
    layers(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    before, state = tensors_of(layers), optimizer.state[layers[0].weight]
    held = hold(layers[0].weight)

    move_to_meta(layers, layers, [optimizer])
    assert all(p.is_meta for p in layers.parameters())
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in layers.parameters()]
    assert optimizer.state[layers[0].weight] is state
    assert layers[2].weight is layers[0].weight

    move_from_meta(layers, layers, [optimizer], {name: tensor.clone() for name, tensor in before.items()})
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in layers.parameters()}
    assert optimizer.state[layers[0].weight] is state
    for name, tensor in tensors_of(layers).items():
        assert torch.equal(tensor, before[name]), name
    layers(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(layers[0].weight, before["0.weight"])
    del held


def test_parameters_that_another_part_of_the_model_uses() -> None:
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(2, 2)), "head": nn.Linear(2, 2), "last": nn.Linear(2, 2)})
    body, head = model["body"], model["head"]
    head.weight, head.bias = body[0].weight, body[0].bias
    held = weakref.ref(head.weight)  # so that it cannot become another one in place
    values = tensors_of(body)
    move_to_meta(body, model, [], keep=[head.bias])
    assert held() is not head.weight and head.weight is body[0].weight and head.weight.is_meta
    assert head.bias is body[0].bias and not head.bias.is_meta
    move_from_meta(body, model, [], {"0.weight": values["0.weight"] + 1, "0.bias": values["0.bias"] + 1})
    assert head.weight is body[0].weight and torch.equal(head.weight, values["0.weight"] + 1)
    assert torch.equal(head.bias, values["0.bias"])  # whoever kept it knows its value


@pytest.mark.parametrize(
    ("tensor", "layout"),
    [
        (torch.eye(3).to_sparse(), "sparse_coo"),
        (torch.eye(3).to_sparse_csr(), "sparse_csr"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    ],
)
def test_a_buffer_without_strides_is_refused_by_name(tensor: Tensor, layout: str) -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    check_layouts(layers)
    layers[1].register_buffer("table", tensor)
    with pytest.raises(ValueError, match=rf"buffer 1\.table .* is a {layout} tensor, .* Register the dense tensors"):
        check_layouts(layers)
