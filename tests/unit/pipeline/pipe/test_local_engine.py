"""Copies to the devices of a Pipe in one process."""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from strategies.pipeline import NoChunk, Pipe
from strategies.pipeline.pipe.local_engine import _on


class Counter:
    def __init__(self) -> None:
        self.seen = torch.zeros(())


class Counts(nn.Module):
    """Changes its inputs in place."""

    def forward(self, x: Tensor, mask: Tensor, counter: Counter) -> Tensor:
        mask.sub_(1)
        counter.seen.add_(1)
        return x + mask + counter.seen


@pytest.mark.parametrize("grad", [False, True])
def test_micro_batches_do_not_share_inputs_that_a_layer_changes(grad: bool) -> None:
    pipe, counter, mask = Pipe(nn.Sequential(Counts()), chunks=2), Counter(), torch.ones(4)
    with torch.set_grad_enabled(grad):
        output = pipe(torch.zeros(4, 4), NoChunk(mask), counter).local_value()
    assert output.eq(1).all() and mask.eq(1).all() and not counter.seen


class Noting(Tensor):
    """Notes how it is copied, and is not."""

    copies: ClassVar[list[dict[str, Any]]] = []

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        self.copies.append(kwargs)
        return self


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_the_host_waits_for_copies_of_its_memory(device: str) -> None:
    """The user may have pinned it, and fill it anew after the call."""
    Noting.copies.clear()
    _on(torch.device(device), [torch.zeros(2).as_subclass(Noting)])
    assert Noting.copies == [{"non_blocking": False}]
