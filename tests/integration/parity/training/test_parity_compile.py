"""Layers that the user wraps in ``torch.compile`` are compiled where they live, and train the same."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import run
from parity import WIDTH, Small, check
from torch import Tensor, nn


class Gated(nn.Module):
    """Computes something else when it is compiled, so that a layer that is not cannot pass for one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        return hidden * hidden.sigmoid() + (0.5 if torch.compiler.is_compiling() else 0.0)


class Gates(Small):
    def __init__(self, around: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(around(Gated(WIDTH)), nn.Tanh(), around(Gated(2)))


def compiled_and_not() -> list[list[float]]:
    compiled = partial(torch.compile, backend="aot_eager", dynamic=True)  # inductor would need a C++ compiler
    makes = [partial(Gates, compiled), partial(Gates, nn.Sequential)]
    return [check(make, stages=(2,), strategy={"checkpoint": "always"})[-1].losses for make in makes]


@pytest.mark.slow
def test_compiled_layers() -> None:
    compiled, eager = run(compiled_and_not)
    assert abs(compiled[0] - eager[0]) > 1e-3
