"""What one of the ranks that divide layers or parameters computes, measured without the other ranks."""

import copy
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.sharding.divided_layers import tensor_group
from strategies.sharding.single_rank import (
    GroupSeconds,
    LinearSeconds,
    SingleRank,
    SingleReplica,
    as_single_rank,
    as_single_replica,
)

PLAN = {"table": "embedding_rowwise", "up": "colwise", "norm": "replicated_with_grad_allreduce", "down": "rowwise"}


class Net(nn.Module):
    """Layers of every kind; the norm lies between two divided layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.norm, self.down = (
            nn.Embedding(6, 4, padding_idx=1),
            nn.Linear(4, 8),
            nn.LayerNorm(2),
            nn.Linear(8, 4),
        )
        self.head = nn.Linear(4, 6)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.up(self.table(ids)).unflatten(-1, (-1, 2))
        out: Tensor = self.head(self.down(self.norm(hidden).flatten(-2)))
        return out


def test_a_rank_has_its_part_and_the_model_is_unchanged_afterwards() -> None:
    model, ids = Net(), torch.tensor([[0, 5]])
    model(ids).sum().backward()
    before = {name: (p, p.data, p.data.clone(), p.grad) for name, p in model.named_parameters()}
    expected = model(ids).detach()
    with as_single_rank(model, {**PLAN, "head": "colwise_gather_output"}, 2):
        assert [list(layer.weight.shape) for layer in (model.table, model.up, model.down)] == [[3, 4], [4, 4], [4, 4]]
        out = model(ids)
        assert out.shape == expected.shape
        assert out[..., :3].all() and not out[..., 3:].any()  # the words of the absent rank
        out.sum().backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    for name, parameter in model.named_parameters():
        same, data, values, grad = before[name]
        assert parameter is same and parameter.grad is grad
        assert parameter.data_ptr() == data.data_ptr() and torch.equal(parameter, values)
    assert torch.equal(model(ids), expected) and model.up.out_features == 8 and model.table.padding_idx == 1
    with pytest.raises(RuntimeError, match="only together with the other ranks"):
        tensor_group()


def test_a_plan_that_does_not_fit_changes_nothing() -> None:
    model = Net()
    shapes = [parameter.shape for parameter in model.parameters()]
    with pytest.raises(ValueError, match=r"cannot divide table\.weight"), as_single_rank(model, PLAN, 4):
        pass
    assert [parameter.shape for parameter in model.parameters()] == shapes


def test_a_replica_has_its_part_and_the_model_is_unchanged_afterwards() -> None:
    model, ids = Net(), torch.tensor([[0, 5]])
    model(ids).sum().backward()
    before = {name: (p, p.data, p.data.clone(), p.grad) for name, p in model.named_parameters()}
    expected = model(ids).detach()
    with as_single_replica(model, [model.up, model.norm, model.down], 2):
        assert [tuple(layer.weight.shape) for layer in (model.table, model.up, model.norm)] == [(12,), (16,), (2,)]
        copy.deepcopy(model.up)(torch.ones(4)).sum().backward()
        out = model(ids)
        assert out.shape == expected.shape
        assert not torch.equal(out, expected)  # half of each weight is absent
        out.sum().backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    for name, parameter in model.named_parameters():
        same, data, values, grad = before[name]
        assert parameter is same and type(parameter) is nn.Parameter and parameter.grad is grad
        assert parameter.data_ptr() == data.data_ptr() and torch.equal(parameter, values)
    assert torch.equal(model(ids), expected)
    with pytest.raises(RuntimeError, match="only together with the other ranks"):
        tensor_group()


def test_every_call_of_replicas_waits_as_long_as_they_take() -> None:
    group = SingleReplica(3, GroupSeconds(LinearSeconds(0.01, 1e-6), LinearSeconds(0.0, 2e-5)))
    message = torch.ones(600)
    for call, expected in ((group.sum_of_part, 0.0124), (group.joined, 0.048), (group.told, 0.048)):
        begin = time.perf_counter()
        call(message)
        assert time.perf_counter() - begin >= expected
    assert group.joined(message).sum() == 600 and len(group.joined(message)) == 1800
    assert torch.equal(group.sum_of_part(message), torch.ones(200))


def test_every_call_waits_as_long_as_the_ranks_take() -> None:
    seconds = GroupSeconds(LinearSeconds(0.01, 1e-5), LinearSeconds(0.0, 2e-5))
    group, message = SingleRank(3, seconds), torch.ones(500)
    for call, expected in ((group.sum, 0.03), (group.of_first, 0.03), (group.parts, 0.04)):
        begin = time.perf_counter()
        call(message)
        assert time.perf_counter() - begin >= expected
    assert [part.sum().item() for part in group.parts(message)] == [500.0, 0.0, 0.0]


@pytest.mark.parametrize("kind, size", [(SingleRank, 2), (SingleReplica, 2), (SingleReplica, 3)])
def test_the_time_of_a_group_is_a_line_through_two_sizes(kind: Any, size: int) -> None:
    waiting = GroupSeconds(LinearSeconds(0.002, 4e-9), LinearSeconds(0.004, 2e-9))
    found = GroupSeconds.measured(kind(size, waiting))
    for measured, given in ((found.sum, waiting.sum), (found.parts, waiting.parts)):
        for num_bytes in (2**10, 2**22):
            message = torch.empty(num_bytes, dtype=torch.uint8)
            assert measured.of(message) >= given.of(message)
