"""The order of a loader's batches: what decides it, and that it can be kept."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from strategies.lightning.compat import shutdown_workers_and_reset_iterator
from strategies.lightning.loader_order import kept_order

NUMBERS = range(20)


class Shuffles(Sampler[int]):
    """Shuffles a list in place, with generators of three libraries, and counts its passes."""

    def __init__(self) -> None:
        self.order, self.epoch = [*NUMBERS], 0
        self.python, self.numpy, self.torch = random.Random(1), numpy.random.default_rng(1), torch.Generator()

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        self.python.shuffle(self.order)
        self.numpy.shuffle(self.order)
        yield from (self.order[k] for k in torch.randperm(len(NUMBERS), generator=self.torch))


class Stream(IterableDataset[int]):
    def __init__(self) -> None:
        self.python = random.Random(1)

    def __iter__(self) -> Iterator[int]:
        yield from self.python.sample(NUMBERS, len(NUMBERS))


LOADERS: dict[str, Callable[[], Any]] = {
    "generator": lambda: DataLoader(NUMBERS, shuffle=True, generator=torch.Generator()),
    "workers": lambda: DataLoader(
        NUMBERS, shuffle=True, generator=torch.Generator(), num_workers=1, persistent_workers=True
    ),
    "sampler": lambda: DataLoader(NUMBERS, sampler=Shuffles()),
    "batch sampler": lambda: DataLoader(NUMBERS, batch_sampler=BatchSampler(Shuffles(), 4, drop_last=False)),
    "stream": lambda: DataLoader(Stream()),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_has_the_same_order_after_a_kept_one(kind: str) -> None:
    loader, other = LOADERS[kind](), LOADERS[kind]()
    with kept_order([loader]):
        next(iter(loader))
    assert [*map(str, loader)] == [*map(str, other)]
    assert [*map(str, loader)] == [*map(str, other)]


def test_workers_that_have_run_before_may_end_within_it() -> None:
    loader = LOADERS["workers"]()
    next(iter(loader))
    with kept_order([loader]):
        shutdown_workers_and_reset_iterator(loader)
    assert sorted(map(int, loader)) == [*NUMBERS]
