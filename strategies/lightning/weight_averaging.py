"""Lightning's callbacks that average weights: each stage holds the average of its own layers.

The callbacks run unchanged on the driver. Their copy of the model is spread over the stages as the model is, so what
they compute between the two (averages, swaps, copies) is computed where both are.
"""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from pytorch_lightning.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim.swa_utils import AveragedModel

from strategies.common.patching import replaced
from strategies.pipeline.driver import ModelCopy
from strategies.pipeline.state.remote_operations import OnStages

_HOOKS = [
    name
    for name in vars(Callback)
    if name.startswith("on_") and name not in ("on_save_checkpoint", "on_load_checkpoint", "on_exception")
]
"""Those in which a callback may change weights; checkpoints gather the values of every stage by themselves."""


def find_copies(trainer: Any, module: nn.Sequential, path: str) -> list[ModelCopy]:
    """The averages that callbacks of ``trainer`` keep of the model whose ``nn.Sequential`` at ``path`` is ``module``.

    Raises:
        MisconfigurationException: If one is not a copy of this model.
    """
    copies = []
    for callback in _averaging(trainer):
        model = _average_of(callback)
        assert model is not None
        try:
            copied = attrgetter(path)(model)
        except AttributeError:
            copied = None
        if not isinstance(copied, nn.Sequential) or _layout(copied) != _layout(module):
            raise MisconfigurationException(
                f"{type(callback).__name__} holds the average of another model than the one that is run: its {path} "
                f"is {copied!r:.200}. Use a new {type(callback).__name__} for each model."
            )
        copies.append(ModelCopy(model, copied))
    return copies


def average_on_stages(trainer: Any) -> list[Callable[[], None]]:
    """Lets what the callbacks do in their hooks be done by the stages.

    Returns:
        Functions that end this.
    """
    undo = []
    for callback in _averaging(trainer):
        for name in _HOOKS:
            if getattr(type(callback), name) is not getattr(Callback, name):
                undo.append(replaced(callback, name, partial(_on_stages, getattr(callback, name))))
    return undo


def _on_stages(hook: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    with OnStages():
        hook(*args, **kwargs)


def averages_weights(trainer: Any) -> bool:
    """Whether a checkpoint has two sets of weights: ``WeightAveraging`` saves the average as ``state_dict``."""
    return any(isinstance(own, WeightAveraging) and _average_of(own) is not None for own in trainer.callbacks)


def _averaging(trainer: Any) -> list[WeightAveraging | StochasticWeightAveraging]:
    """The callbacks that use their average in this run; that of ``StochasticWeightAveraging`` is for training only."""
    kinds = (
        (WeightAveraging, StochasticWeightAveraging) if trainer.state.fn == TrainerFn.FITTING else (WeightAveraging,)
    )
    return [own for own in trainer.callbacks if isinstance(own, kinds) and _average_of(own) is not None]


def _average_of(callback: WeightAveraging | StochasticWeightAveraging) -> nn.Module | None:
    average = callback._average_model
    return average.module if isinstance(average, AveragedModel) else average


def _layout(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module.named_parameters(remove_duplicate=False)}
