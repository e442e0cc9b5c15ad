"""Attributes of layers that come back from a worker: those that differ, and no copy of modules or of their tensors."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from strategies.pipeline.state.objects import ObjectsAtStart, objects_of


class Keeps(nn.Module):
    """A layer with attributes of many kinds."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.config, self.seen, self.number = config, [1], 3
        self.average, self.alias = torch.zeros(2), self.linear.weight.detach()
        self.hidden, self.function = [self.linear], torch.relu

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_what_has_changed_comes_back() -> None:
    config = {"width": 2, "names": ["a", "b"]}
    here = nn.Sequential(Keeps(config), Keeps(config))
    there, at_start = copy.deepcopy(here), ObjectsAtStart(here)
    there[0].seen.append(2)
    there[1].extra = there[0].seen
    there[0].average += 1
    there[0].output = there[0].linear(torch.ones(2))
    there[0].number = 4
    there[0].hidden.append(nn.Linear(1, 1))
    at_start.take(*objects_of(there))
    assert here[0].seen == [1, 2] and here[1].seen == [1] and here[1].extra is here[0].seen
    assert here[0].config is here[1].config is config
    assert torch.equal(here[0].average, torch.ones(2)) and torch.equal(here[1].average, torch.zeros(2))
    assert here[0].hidden == [here[0].linear] and not hasattr(here[0], "output") and here[0].number == 3
    assert here[0].alias.data_ptr() == here[0].linear.weight.data_ptr() and here[0].function is torch.relu


def test_what_the_driver_has_changed_stays() -> None:
    here = nn.Sequential(Keeps({}))
    there, at_start = copy.deepcopy(here), ObjectsAtStart(here)
    here[0].seen.append(5)
    there[0].seen.append(2)
    here[0].average.add_(1)
    there[0].average += 2
    del here[0].config
    there[0].config["width"] = 2
    here[0].later, there[0].later = [1], [2]
    at_start.take(*objects_of(there))
    assert here[0].seen == [1, 5] and torch.equal(here[0].average, torch.ones(2))
    assert not hasattr(here[0], "config") and here[0].later == [1]


def test_a_number_can_become_an_object() -> None:
    here = nn.Sequential(Keeps({}), Keeps({}))
    there, at_start = copy.deepcopy(here), ObjectsAtStart(here)
    here[1].number = 7
    for layer in there:
        layer.number = [4]
    at_start.take(*objects_of(there))
    assert here[0].number == [4] and here[1].number == 7


class Releases:
    """Something that must be released once; counts how often an object of it has ended."""

    ended = 0

    def __del__(self) -> None:
        Releases.ended += 1


def test_what_releases_something_has_no_copy() -> None:
    here = nn.Sequential(Keeps({"held": [Releases()]}))
    there, at_start = copy.deepcopy(here), ObjectsAtStart(here)
    there[0].config["width"] = 3
    before = Releases.ended
    at_start.take(*objects_of(there))
    assert here[0].config.keys() == {"held"} and Releases.ended == before


def test_an_object_that_cannot_be_pickled_stays() -> None:
    here, there = nn.Sequential(Keeps({})), nn.Sequential(Keeps({}))
    at_start = ObjectsAtStart(here)
    vars(there[0])["seen"] = [i for i in range(2)], (i for i in range(2))
    at_start.take(*objects_of(there))
    assert here[0].seen == [1]
