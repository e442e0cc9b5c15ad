"""Balance: the exact split against every other one, and what the two balancers make of simple modules."""

import itertools
import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skip_nets import u_net
from sleep_layer import Sleep, only_sleep_takes_time
from torch import nn

from strategies.pipeline import NoChunk
from strategies.pipeline.partition.balance import balance_by_size, balance_by_time, partition_costs, partition_lists
from strategies.pipeline.stage.calling import call_with_one


def every_balance(num_layers, partitions):
    for cuts in itertools.combinations(range(1, num_layers), partitions - 1):
        edges = [0, *cuts, num_layers]
        yield [after - before for before, after in itertools.pairwise(edges)]


def quality(costs, balance):
    """Smaller is better, in the order that `partition_costs` documents."""
    rest = iter(costs)
    parts = [sum(itertools.islice(rest, length)) for length in balance]
    return max(parts), sum(p * p for p in parts), sum(n * n for n in balance), [-n for n in balance]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=10), st.data())
def test_no_split_is_better(costs, data):
    partitions = data.draw(st.integers(1, len(costs)))
    best = min(every_balance(len(costs), partitions), key=lambda balance: quality(costs, balance))
    assert partition_costs(costs, partitions) == best


def test_no_split_of_floats_is_better():
    generator = random.Random(0)
    for _ in range(200):
        costs = [generator.lognormvariate(0, 1) for _ in range(generator.randint(1, 9))]
        partitions = generator.randint(1, len(costs))
        maximum = quality(costs, partition_costs(costs, partitions))[0]
        assert maximum == pytest.approx(min(quality(costs, b)[0] for b in every_balance(len(costs), partitions)))


@pytest.mark.parametrize(
    ("costs", "partitions", "balance"),
    [
        ([1, 2, 3, 4, 5, 6], 2, [4, 2]),
        ([6, 5, 4, 3, 2, 1], 2, [2, 4]),
        ([9, 1, 1, 1], 3, [1, 2, 1]),  # any split has a maximum of 9; this one is the most even below it
        ([0, 0, 0, 0, 0], 2, [3, 2]),
        ([0.1] * 5, 2, [3, 2]),  # equal costs stay equal, although 0.1 + 0.1 + 0.1 is not 0.3
        ([7], 1, [1]),
        ([1e-9, 1e9, 1e-9], 3, [1, 1, 1]),
    ],
)
def test_split(costs, partitions, balance):
    assert partition_costs(costs, partitions) == balance


def test_what_the_last_part_costs_beside_its_layers():
    generator = random.Random(1)
    for _ in range(100):
        costs = [generator.randint(0, 9) for _ in range(generator.randint(1, 9))]
        last, partitions = generator.choice([0, 3, 0.5, 40]), generator.randint(1, len(costs))
        best = min(every_balance(len(costs), partitions), key=lambda b: quality([*costs[:-1], costs[-1] + last], b))
        assert partition_costs(costs, partitions, last=last) == best
    assert partition_costs([1] * 8, 2, last=2.1) == [5, 3]
    assert partition_costs([1] * 8, 2, last=100) == [7, 1]
    with pytest.raises(ValueError, match="cost of the last part must be finite and not negative, got -1"):
        partition_costs([1, 1], 2, last=-1)


def test_layers_that_cost_less_in_some_parts():
    generator = random.Random(2)
    for _ in range(100):
        layers = [generator.randint(1, 9) for _ in range(generator.randint(2, 9))]
        parts = [[generator.choice([0.5, 1, 1.5]) * cost for cost in layers] for _ in range(generator.randint(1, 3))]
        parts = parts[: len(layers)]

        def most(balance, parts=parts):
            ends = itertools.accumulate(balance)
            return max(sum(own[end - size : end]) for own, size, end in zip(parts, balance, ends, strict=True))

        best = min(map(most, every_balance(len(layers), len(parts))))
        assert most(partition_lists(parts, [len(layers)], driver=0)) == best
    recomputed, kept = [3] * 10, [2] * 10
    assert partition_lists([recomputed, kept], [10], driver=0) == [4, 6]
    assert partition_lists([recomputed, kept] * 2, [5, 5], driver=0) == [2, 3] * 2


def test_split_of_many_layers_is_quick():
    generator = random.Random(0)
    costs = [generator.random() for _ in range(1000)]
    start = time.process_time()
    assert sum(partition_costs(costs, 16)) == 1000
    assert time.process_time() - start < 10  # 0.2 s on an idle machine; trying every end of every part takes minutes


def test_split_refuses():
    with pytest.raises(ValueError, match="partitions must be at least 1, got 0"):
        partition_costs([1, 2], 0)
    with pytest.raises(ValueError, match="2 layers cannot be split into 3 stages"):
        partition_costs([1, 2], 3)
    for bad in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"costs must be finite and not negative, got \[1, "):
            partition_costs([1, bad], 1)


class Multiply(nn.Module):
    """Keeps an activation and a random factor for each time."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def forward(self, value):
        for _ in range(self.times):
            value = value * torch.rand_like(value, requires_grad=True)
        return value


def test_layers_that_sleep(monkeypatch):
    only_sleep_takes_time(monkeypatch)
    module = nn.Sequential(*(Sleep(units / 250) for units in range(1, 7)))
    assert balance_by_time(2, module, torch.rand(1), timeout=0.1) == [4, 2]
    assert balance_by_time(2, module[::-1], torch.rand(1), timeout=0.1) == [2, 4]


def test_size_of_activations_decides():
    module = nn.Sequential(*(Multiply(times) for times in range(1, 7)))
    assert balance_by_size(2, module, torch.rand(10, 100)) == [4, 2]
    assert balance_by_size(2, module[::-1], torch.rand(10, 100)) == [2, 4]


def test_param_scale_decides():
    module = nn.Sequential(*(nn.Linear(i + 1, i + 2) for i in range(6)))
    assert balance_by_size(2, module, torch.rand(7, 1), param_scale=100) == [4, 2]
    module = nn.Sequential(*(nn.Linear(i + 2, i + 1) for i in reversed(range(6))))
    assert balance_by_size(2, module, torch.rand(1, 7), param_scale=100) == [2, 4]


class Twice(nn.Module):
    def forward(self, value):
        return value, value.detach()


class Adds(nn.Module):
    def forward(self, a, b, whole=None):
        return a.repeat(2, 1)[: len(b)] + b if whole is None else a + b * whole.sum()


class AddsPair(nn.Module):
    def forward(self, pair):
        return pair[0] + pair[1]


@pytest.mark.parametrize("balance", [balance_by_size, balance_by_time])
def test_measures_what_pipe_accepts(balance):
    x, whole = torch.rand(6, 3, requires_grad=True), torch.rand(1, 5)
    cases = [
        (nn.Sequential(Twice(), Adds()), x),
        (nn.Sequential(Twice(), AddsPair()), x),
        (nn.Sequential(nn.Sequential(Twice(), Adds()), nn.Linear(3, 3)), x),
        (nn.Sequential(Adds(), nn.Linear(3, 3)), (x, x, NoChunk(whole))),
        (nn.Sequential(Adds(), nn.Linear(3, 3)), (x[:3], x)),
        (u_net(), torch.rand(6, 2, 8)),
    ]
    for module, sample in cases:
        settings = {"chunks": 3} if balance is balance_by_size else {"timeout": 0.01}
        assert sum(balance(2, module, sample, **settings)) == len(module)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):  # as nn.Sequential would call it
        balance(2, cases[0][0], x, call=call_with_one)


@pytest.mark.parametrize("balance", [balance_by_size, balance_by_time])
def test_refuses(balance):
    module, sample = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.rand(4, 3)
    with pytest.raises(TypeError, match=r"module must be an nn\.Sequential, got Linear"):
        balance(1, module[0], sample)
    with pytest.raises(ValueError, match="partitions must be at least 1, got 0"):
        balance(0, module, sample)
    with pytest.raises(ValueError, match="2 layers cannot be split into 3 stages"):
        balance(3, module, sample)
    module(sample).sum().backward()
    with pytest.raises(ValueError, match=r"parameter 0\.weight already has a gradient"):
        balance(2, module, sample)


def test_refuses_bad_settings():
    module, sample = nn.Sequential(nn.Linear(3, 3)), torch.rand(4, 3)
    with pytest.raises(ValueError, match=r"timeout must be positive, got 0"):
        balance_by_time(1, module, sample, timeout=0)
    with pytest.raises(ValueError, match="chunks must be at least 1, got 0"):
        balance_by_size(1, module, sample, chunks=0)
    with pytest.raises(ValueError, match=r"param_scale must not be negative, got -1"):
        balance_by_size(1, module, sample, param_scale=-1)
