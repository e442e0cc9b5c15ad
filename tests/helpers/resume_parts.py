"""Data whose order and noise are drawn at random, in as many ways as there are; for the tests of resuming."""

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info


class Rows(Dataset):
    """Rows with their number, and with noise out of all three generators."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = (torch.randn(number, width, generator=generator).double() for width in (4, 1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        noise = torch.rand(4).double() + random.random() + np.random.rand()
        return self.x[index] + 0.1 * noise, self.y[index], index


class Stream(IterableDataset):
    """Shuffled rows, a share of them in each worker."""

    def __init__(self, number: int) -> None:
        self.rows = Rows(number)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        share, shares = (0, 1) if info is None else (info.id, info.num_workers)
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(torch.initial_seed()))
        for index in order[share::shares].tolist():
            yield self.rows[index]


class StatefulStream(IterableDataset):
    """Rows in a custom order, from the current position; counts the rows that it has read."""

    def __init__(self, number: int) -> None:
        self.rows, self.epoch, self.place, self.num_read = Rows(number), 0, 0, 0

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.place < len(order):
            self.place += 1
            self.num_read += 1
            yield self.rows[order[self.place - 1]]
        self.epoch, self.place = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]


class StatefulLoader:
    """No DataLoader, without a length, and says where it is."""

    def __init__(self, number: int) -> None:
        self.rows, self.place = Rows(number), 0

    def __iter__(self) -> Iterator[Any]:
        self.place = self.place if self.place < len(self.rows) else 0
        while self.place < len(self.rows):
            self.place += 4
            rows = [self.rows[index] for index in range(self.place - 4, min(self.place, len(self.rows)))]
            yield torch.utils.data.default_collate(rows)

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Draws(Sampler):
    """A sampler with a separate generator, which it uses when the pass begins."""

    def __init__(self, number: int) -> None:
        self.number, self.own = number, np.random.default_rng(3)

    def __iter__(self) -> Iterator[int]:
        return iter(self.own.permutation(self.number).tolist())

    def __len__(self) -> int:
        return self.number


class DrawsBatches:
    """A batch sampler that is no ``BatchSampler``; it draws while it goes, and counts its passes."""

    def __init__(self, number: int) -> None:
        self.number, self.own, self.passes = number, random.Random(3), 0

    def __iter__(self) -> Iterator[list[int]]:
        self.passes += 1
        left = list(range(self.passes % 2, self.number))
        while left:
            yield [left.pop(self.own.randrange(len(left))) for _ in range(min(4, len(left)))]

    def __len__(self) -> int:
        return -(-self.number // 4)


class ShufflesInPlace(Draws):
    """Keeps its order in a list, or those of buckets in lists of a list."""

    def __init__(self, number: int, *, buckets: bool) -> None:
        super().__init__(number)
        self.order: list[Any] = [[i, i + 1] for i in range(0, number, 2)] if buckets else list(range(number))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter(chain.from_iterable(self.order) if type(self.order[0]) is list else self.order)


class RestartsWhereLoaded(IterableDataset):
    """As those of Hugging Face: begins every pass at the state that it was loaded with."""

    def __init__(self, number: int) -> None:
        self.rows = Rows(number)
        self.begins: dict[str, int] = {"place": 0}
        self.now = {"place": 0}

    def __iter__(self) -> Iterator[Any]:
        self.now["place"] = self.begins["place"]
        for index in range(self.now["place"], len(self.rows)):
            self.now["place"] = index + 1
            yield self.rows[index]

    def state_dict(self) -> dict[str, int]:
        return self.now

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begins = dict(state)


class CountsWhereLoaded(RestartsWhereLoaded):
    """The same with plain numbers."""

    def __init__(self, number: int) -> None:
        self.rows, self.begin, self.place = Rows(number), 0, 0

    def __iter__(self) -> Iterator[Any]:
        self.place = self.begin
        while self.place < len(self.rows):
            self.place += 1
            yield self.rows[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["place"]


class CountsEpochs(RestartsWhereLoaded):
    """The same with an order that depends on the epoch, a plain number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.now["place"] = self.begins["place"]
        for index in range(self.now["place"], len(self.rows)):
            self.now["place"] = index + 1
            yield self.rows[(index + self.epoch) % len(self.rows)]
        self.epoch += 1

    def state_dict(self) -> dict[str, int]:
        return {**self.now, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begins, self.epoch = {"place": state["place"]}, state["epoch"]


class Counting(IterableDataset):
    """Begins every pass at its start, except for the pass after a state has been loaded."""

    def __init__(self, number: int) -> None:
        self.rows, self.place, self.is_loaded = Rows(number), 0, False

    def __iter__(self) -> Iterator[Any]:
        self.place = self.place if self.is_loaded else 0
        self.is_loaded = False
        while self.place < len(self.rows):
            self.place += 1
            yield self.rows[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.is_loaded = state["place"], True


class Inside:
    """Keeps its numbers in a dict, so that only ``load_state_dict`` sets them."""

    inside: dict[str, Any]

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, int):
            vars(self).setdefault("inside", {})[name] = value
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in vars(self).get("inside", {}):
            raise AttributeError(name)
        return self.inside[name]


class CountingInside(Inside, Counting):
    pass


class StatefulStreamInside(Inside, StatefulStream):
    pass


class StateForAnother(Stream):
    """Its state is for a loader of its own."""

    def state_dict(self, num_samples: int, num_workers: int) -> dict[str, int]:
        raise AssertionError("is not for this loader")

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError("is not for this loader")
