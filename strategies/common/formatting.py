"""Descriptions of stages, parameters and ended processes, for messages."""

from collections.abc import Sequence

from torch import Tensor, nn


def describe(index: int, layers: nn.Sequential, first_layer: int) -> str:
    """Return a description such as ``stage 1 (layers 3 to 5: Block, Block, Linear)``."""
    kinds = ", ".join(type(layer).__name__ for layer in layers)
    return f"stage {index} (layers {first_layer} to {first_layer + len(layers) - 1}: {kinds})"


def ending(status: int) -> str:
    """Return how a process ended, given its exit status as :mod:`subprocess` reports it."""
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


def locate(stages: Sequence[nn.Sequential], model: nn.Module | None, parameter: Tensor) -> str:
    """Return a description of a parameter with its stage, or with its name in the model."""
    first_layer = 0
    for i, stage in enumerate(stages):
        for name, own in stage.named_parameters():
            if own is parameter:
                return f"parameter {name} of {describe(i, stage, first_layer)}"
        first_layer += len(stage)
    named = model.named_parameters() if model is not None else ()
    return next((f"parameter {name}" for name, own in named if own is parameter), "a parameter")
