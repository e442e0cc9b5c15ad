"""Who gets what, and what that comes to: without processes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from strategies.sharding.bucket import form_buckets
from strategies.sharding.divided_optimizers import Ownership, assign_owners

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


def test_owners_stay_when_other_parameters_are_trained() -> None:
    """Those of a snapshot: a process that takes it over has the states of its rank."""
    parameters = [nn.Parameter(torch.ones(size)) for size in (4, 3, 2, 1)]
    for frozen in parameters[:2]:
        frozen.requires_grad_(False)
    optimizer = torch.optim.SGD(parameters)
    before = Ownership([optimizer], rank=0, size=2)
    for parameter in parameters:
        parameter.requires_grad_(not parameter.requires_grad)
    assert Ownership([optimizer], rank=0, size=2).owners != before.owners
    for owned in before.owned(optimizer):
        optimizer.state[owned] = {"momentum_buffer": torch.zeros_like(owned)}
    again = Ownership([optimizer], 0, 2, before.owners)
    assert again.owners == before.owners and again.optimizer_of == before.optimizer_of
    assert set(optimizer.state) == set(before.owned(optimizer))
