"""Modules that code may change for a while."""

import random

import numpy
import torch
from torch import nn

from strategies.common.patching import unchanged


class Counts(nn.Module):
    """Changes everything that a forward pass may change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.number = nn.BatchNorm1d(2), 0
        self.kept, self.nested, self.total = [1], {"a": [1]}, torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number += 1
        self.kept.append(2)
        self.nested["a"].append(2)
        self.total += 1
        self.late = x
        return self.norm(x)


def test_what_a_forward_pass_changes_is_restored() -> None:
    module = Counts()
    kept, total, mean = module.kept, module.total, module.norm.running_mean
    with unchanged(module.modules()):
        module(torch.arange(4.0).reshape(2, 2))
        assert module.number == 1 and module.norm.num_batches_tracked == 1
    assert (module.number, module.kept, module.nested) == (0, [1], {"a": [1]}) and module.kept is kept
    assert module.total is total and torch.equal(total, torch.zeros(2)) and not hasattr(module, "late")
    assert module.norm.running_mean is mean and torch.equal(mean, torch.zeros(2))
    assert module.norm.num_batches_tracked == 0


def test_generators_of_random_numbers_are_restored() -> None:
    module = nn.Module()
    module.torchs, module.python = torch.Generator(), random.Random(0)
    module.numpys, module.older = numpy.random.default_rng(0), numpy.random.RandomState(0)

    def draw() -> tuple[float, ...]:
        of_torch = torch.rand((), generator=module.torchs).item()
        return of_torch, module.python.random(), float(module.numpys.random()), float(module.older.rand())

    with unchanged([module]):
        drawn = draw()
    assert draw() == drawn
