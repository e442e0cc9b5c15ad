"""How large the states of optimizers are, found by a step of small copies, compared with real steps."""

from collections.abc import Callable
from typing import Any

import prodigyopt
import pytest
import schedulefree
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from transformers import Adafactor

from strategies.optim.costs import state_bytes


def stepped(make: Callable[[Any], Optimizer], parameters: list[nn.Parameter]) -> dict[Tensor, int]:
    """The bytes of the tensors with as many elements as their parameter, after a real step."""
    optimizer = make(parameters)
    if hasattr(optimizer, "train"):
        optimizer.train()
    for p in parameters:
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    return {
        p: sum(v.nbytes for v in optimizer.state[p].values() if isinstance(v, Tensor) and v.numel() == p.numel())
        for p in parameters
        if p.requires_grad
    }


@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        (lambda p: optim.SGD(p, lr=0.1), 0),
        (lambda p: optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: optim.Adam(p), 2),
        (lambda p: optim.AdamW(p, amsgrad=True), 3),
        (lambda p: optim.Adagrad(p), 1),
        (lambda p: schedulefree.AdamWScheduleFree(p), 2),
        (lambda p: prodigyopt.Prodigy(p, slice_p=1), None),
    ],
)
def test_as_large_as_after_a_real_step(make: Callable[[Any], Optimizer], numbers: int | None) -> None:
    parameters = [nn.Parameter(torch.ones(300, 500)), nn.Parameter(torch.ones(500)), nn.Parameter(torch.ones(7, 5, 3))]
    parameters.append(nn.Parameter(torch.ones(20, 20), requires_grad=False))
    found = state_bytes(make(parameters))
    assert found == stepped(make, parameters)
    if numbers is not None:
        assert found == {p: 4 * numbers * p.numel() for p in parameters[:3]}


def test_parameters_without_values_count() -> None:
    parameter = nn.Parameter(torch.empty(10_000, 10_000, device="meta", dtype=torch.bfloat16))
    assert state_bytes(optim.AdamW([parameter])) == {parameter: 2 * 2 * 10**8}


def test_states_with_fewer_elements_do_not_count() -> None:
    matrix, vector = nn.Parameter(torch.ones(300, 300)), nn.Parameter(torch.ones(300))
    assert state_bytes(Adafactor([matrix, vector])) == {matrix: 0, vector: 1200}


class EightBits(Optimizer):
    """Keeps one byte for each element of a large parameter, as bitsandbytes does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                dtype = torch.uint8 if p.numel() >= 4096 else torch.float32
                self.state[p].setdefault("kept", torch.zeros_like(p, dtype=dtype))


class NeedsMore(optim.SGD):
    """Cannot be stepped like this."""

    def step(self, closure: Any = None) -> None:
        raise RuntimeError("needs gradients of its own kind")


def test_states_of_large_parameters_may_be_smaller() -> None:
    large, small = nn.Parameter(torch.ones(100_000)), nn.Parameter(torch.ones(10, 10))
    assert state_bytes(EightBits([large, small])) == {large: 100_000, small: 400}


def test_what_cannot_be_tried_is_not_counted_and_nothing_changes() -> None:
    parameter = nn.Parameter(torch.ones(10))
    assert state_bytes(NeedsMore([parameter], lr=0.1)) == {parameter: 0}
    torch.manual_seed(0)
    before = torch.get_rng_state()
    optimizer = optim.AdamW([parameter])
    state_bytes(optimizer)
    assert torch.equal(torch.get_rng_state(), before)
    assert not optimizer.state and parameter.grad is None and torch.equal(parameter, torch.ones(10))


def test_sparse_gradients() -> None:
    parameter = nn.Parameter(torch.ones(50, 8))
    assert state_bytes(optim.SparseAdam([parameter])) == {parameter: 2 * parameter.nbytes}
