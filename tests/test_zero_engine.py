"""What can be divided, who gets what, and what that comes to: without processes."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Optimizer

from strategies.sharding.partition import assign_owners, form_buckets
from strategies.sharding.trial import check_divisible

SIZES = st.lists(st.integers(1, 1000), max_size=40)


@given(SIZES, st.integers(1, 8))
def test_ranks_differ_by_one_item_at_most(sizes: list[int], ranks: int) -> None:
    owners = assign_owners(sizes, [0] * ranks)
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_loads_that_are_there_count() -> None:
    assert assign_owners([5, 1, 1], [0, 4]) == [0, 1, 0]
    assert assign_owners([5, 1, 1], [9, 0]) == [1, 1, 1]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_state_of_a_transformer_is_divided_evenly(ranks: int) -> None:
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
        model = nn.Sequential(nn.Embedding(5000, 512), nn.TransformerEncoder(layer, 12))
    sizes = [p.nbytes for p in model.parameters()]
    owners = assign_owners(sizes, [0] * ranks)
    largest = max(sum(s for s, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks))
    assert largest / sum(sizes) <= 1 / ranks + 0.02


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=30), st.integers(1, 30))
def test_buckets(items: list[tuple[str, int]], cap: int) -> None:
    kinds, sizes = [kind for kind, _ in items], [size for _, size in items]
    buckets = form_buckets(kinds, sizes, cap)
    assert sorted(item for bucket in buckets for item in bucket) == list(range(len(items)))
    assert all(len({kinds[item] for item in bucket}) == 1 for bucket in buckets)
    assert all(bucket == sorted(bucket) and sum(sizes[i] for i in bucket[:-1]) < cap for bucket in buckets)
    # A bucket is complete with its last item, and none comes before one that is complete earlier.
    assert [bucket[-1] for bucket in buckets] == sorted(bucket[-1] for bucket in buckets)
    for kind in set(kinds):
        full = [sum(sizes[i] for i in bucket) >= cap for bucket in buckets if kinds[bucket[0]] == kind]
        assert all(full[:-1])


class NormalisedTogether(SGD):
    """Divides all gradients by their common norm."""

    def step(self, closure: Any = None) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad.div_(norm)
        super().step()


class Noisy(SGD):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(torch.randn_like(p))
        super().step()


class Around(Optimizer):
    """As Lookahead is written: an optimizer that steps another one."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner


class NeedsClosure(SGD):
    def step(self, closure: Any) -> None:
        closure()


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((5, 7), (7,), (4, 4), (1,))]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.optim.LBFGS, "LBFGS needs all parameters at once and evaluates the loss several times"),
        (
            NormalisedTogether,
            "NormalisedTogether cannot be divided: what it does to one parameter depends on the others",
        ),
        (Noisy, r"Noisy cannot be divided: .*random numbers"),
        (lambda p: Around(SGD(p)), r"Around steps another optimizer \(SGD\) within its own step"),
        (NeedsClosure, "NeedsClosure cannot be divided: it does not step a part .* without a closure .*TypeError"),
        (lambda p: SGD([{"params": []}]), "SGD has no parameters"),
    ],
)
def test_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_divisible(make(parameters()))


@pytest.mark.parametrize(
    "make",
    [
        *[getattr(torch.optim, name) for name in ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta")],
        *[getattr(torch.optim, name) for name in ("RMSprop", "Rprop", "ASGD", "Adafactor", "SGD")],
        lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)),
        lambda p: SGD([{"params": p[:2], "lr": 0.1}, {"params": p[2:]}, {"params": []}], momentum=0.9, nesterov=True),
        lambda p: torch.optim.Muon([p[0], p[2]]),
    ],
)
def test_divisible_and_left_as_it_was(make: Any) -> None:
    own = parameters()
    optimizer = make(own)
    for p in own:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before, values, random = str(optimizer.state_dict()), [p.clone() for p in own], torch.get_rng_state()
    check_divisible(optimizer)
    assert str(optimizer.state_dict()) == before
    assert all(torch.equal(p, value) for p, value in zip(own, values, strict=True))
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in own)
    assert torch.equal(torch.get_rng_state(), random)
