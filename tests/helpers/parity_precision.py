"""Layers that note the precision and numeric settings which they see, on whichever process they run."""

import os
from typing import Any

import torch
from parity import WIDTH, Small
from torch import Tensor, nn

SIZES = (8, 7, 2)


NUM_LAYERS, MICROBATCHES = 6, 3


def settings(device: str) -> dict[str, Any]:
    """What the calling thread sees, on devices of this type."""
    return {
        "autocast": torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        "default dtype": torch.get_default_dtype(),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "only warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "inference": torch.is_inference_mode_enabled(),
    }


class _Look(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "NotesSettings") -> Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.layer.note("backward", grad)
        return grad, None


class NotesSettings(nn.Module):
    """A linear layer that notes what it sees, and brings it home: a worker's layer has no other way to tell."""

    def __init__(self, width_out: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, width_out)
        self.seen: dict[str, list[Any]] = {"forward": [], "backward": [], "evaluation": []}
        self.process = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.tanh())
        self.note("forward" if self.training else "evaluation", x, y, self.linear.weight, torch.ones(1))
        return _Look.apply(y, self)

    def note(self, where: str, *tensors: Tensor) -> None:
        """Adds what is seen, if it has not been seen before."""
        now = {**settings(tensors[0].device.type), "dtypes": [tensor.dtype for tensor in tensors]}
        if where == "evaluation":
            now["grad"] = torch.is_grad_enabled()
        if now not in self.seen[where]:
            self.seen[where].append(now)

    def get_extra_state(self) -> Any:
        return self.seen, os.getpid()

    def set_extra_state(self, state: Any) -> None:
        self.seen, self.process = state


class Model(Small):
    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(*[NotesSettings() for _ in range(NUM_LAYERS - 1)], NotesSettings(2))

    @property
    def seen(self) -> list[dict[str, list[Any]]]:
        return [layer.seen for layer in self.sequential_module]


class InParts(Model):
    """For one process: the micro-batches one after another."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for part in x.tensor_split(min(MICROBATCHES, len(x))):
            torch.clear_autocast_cache()  # or else weights are cast once, and gradients added before they are cast back
            outputs.append(self.sequential_module(part))
        return torch.cat(outputs)
