"""The copies of a model in which Lightning's callbacks keep averages of weights."""

from operator import attrgetter
from typing import Any

import torch
from torch import nn

from strategies.lightning.compat import (
    MisconfigurationException,
    StochasticWeightAveraging,
    TrainerFn,
    WeightAveraging,
    averaged_model,
)
from strategies.pipeline.driver import ModelCopy
from strategies.pipeline.partition.sequential import Pipelined


def find_copies(trainer: Any, module: Pipelined, path: str) -> list[ModelCopy]:
    """Return the copies of the model in which callbacks keep averages.

    Args:
        trainer: The Trainer with the callbacks.
        module: The pipelined part of the model.
        path: The dotted path of ``module`` in the model.

    Raises:
        MisconfigurationException: If a copy is not a copy of this model.
    """
    copies = []
    for callback in averaging_callbacks(trainer):
        model = averaged_model(callback)
        assert model is not None
        try:
            copied = attrgetter(path)(model)
        except AttributeError:
            copied = None
        if not isinstance(copied, Pipelined) or _layout(copied) != _layout(module):
            raise MisconfigurationException(
                f"{type(callback).__name__} holds the average of another model than the one that is run: its {path} "
                f"is {copied!r:.200}. Use a new {type(callback).__name__} for each model."
            )
        copies.append(ModelCopy(model, copied))
    return copies


def averaging_callbacks(trainer: Any) -> list[WeightAveraging | StochasticWeightAveraging]:
    """Return the callbacks that hold an average in this run; ``StochasticWeightAveraging`` does so only in ``fit``."""
    kinds = (
        (WeightAveraging, StochasticWeightAveraging) if trainer.state.fn == TrainerFn.FITTING else (WeightAveraging,)
    )
    return [own for own in trainer.callbacks if isinstance(own, kinds) and averaged_model(own) is not None]


def _layout(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module.named_parameters(remove_duplicate=False)}
