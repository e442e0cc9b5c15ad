"""Layers that tell on the loop: in which mode they ran, or that there was too much. Workers import this: torch only."""

from typing import Any

import torch
from procfs import own_memory_bytes
from torch import Tensor, nn
from torch.nn.functional import linear


class Noting(nn.Module):
    """Counts the rows that it saw, ``rows = [in evaluation, in training]``; its output depends on the mode too."""

    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(2, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.rows[int(self.training)] += len(x)
        return x.tanh() if self.training else x.sin()


class Limited(nn.Module):
    """The identity for up to ``limit`` rows, and an error for more."""

    def __init__(self, limit: int, message: str = "too many rows") -> None:
        super().__init__()
        self.limit, self.message = limit, message

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.limit:
            raise RuntimeError(self.message)
        return x


class Unembed(nn.Module):
    """An output layer that has the embedding's weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class MeasuresMemory(nn.Module):
    """The identity; measures how much more memory its process holds from the first ``rows`` rows on.

    Attributes:
        growth: The most bytes that the process has held, over what it held before; known after ``fit``.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.held_before, self.growth = rows, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == self.rows and not self.held_before:
            self.held_before = own_memory_bytes("VmRSS")
        return x.clone()

    def get_extra_state(self) -> int:
        """Asked for when the worker gives back its layers."""
        return own_memory_bytes("VmHWM") - self.held_before

    def set_extra_state(self, state: int) -> None:
        self.growth = state


class NotesMemory(nn.Module):
    """The identity; notes how much memory its process holds in its last backward pass.

    Attributes:
        noted: The bytes, known after ``fit``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.noted = 0

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        if x.requires_grad:
            x.register_hook(self.note)
        return x

    def note(self, grad: Tensor) -> None:
        self.noted = own_memory_bytes("RssAnon")

    def get_extra_state(self) -> int:
        """Asked for when the worker gives back its layers."""
        return self.noted

    def set_extra_state(self, state: int) -> None:
        self.noted = state


class Migrates(nn.Linear):
    """Before its second version, its weight was transposed, and called ``matrix``."""

    _version = 2

    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            name = prefix + ("matrix" if f"{prefix}matrix" in state_dict else "weight")
            state_dict[f"{prefix}weight"] = state_dict.pop(name).t()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
