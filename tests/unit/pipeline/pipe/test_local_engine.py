"""Copies to the devices of a Pipe in one process."""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from strategies.pipeline.pipe.local_engine import _on


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
