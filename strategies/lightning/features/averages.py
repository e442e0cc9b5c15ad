"""Lightning's callbacks that average weights, under a pipeline: each stage holds the averages of its layers.

The callbacks run unchanged on the driver. Their copy of the model is split into stages in the same way as the model.
Each operation between model and copy (average, swap, copy) runs on the stage that holds both. Callbacks that prune
weights are refused.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.optim import Optimizer

from strategies.common.joined_lists import JoinedLists
from strategies.lightning.compat import (
    Callback,
    MisconfigurationException,
    ModelPruning,
)
from strategies.lightning.features.feature import Feature, PipelineArguments
from strategies.lightning.finding_blocks import described
from strategies.lightning.hooks import Undo, run_hooks_within
from strategies.lightning.model_copies import averaging_callbacks, find_copies
from strategies.lightning.run import Preparation, Run
from strategies.pipeline.state.remote_operations import OnStages

_HOOKS = [
    name
    for name in vars(Callback)
    if name.startswith("on_") and name not in ("on_save_checkpoint", "on_load_checkpoint", "on_exception")
]
"""The hooks in which a callback may change weights. A checkpoint always gathers the values of every stage."""


class WeightAverages(Feature):
    """Makes callbacks average weights on the stages."""

    def check(self, prepared: Preparation) -> None:
        """Check that no callback prunes weights, and that averages are of one list of layers."""
        if prepared.is_fitting:
            check_callbacks(prepared.trainer)
        if isinstance(prepared.module, JoinedLists) and averaging_callbacks(prepared.trainer):
            raise MisconfigurationException(
                "Averages of weights (WeightAveraging, StochasticWeightAveraging) work with one nn.Sequential or "
                f"nn.ModuleList, but {described(prepared.module.paths)} are pipelined together. Name one of them by "
                "module=..."
            )

    def arguments(self, prepared: Preparation, optimizers: Sequence[Optimizer]) -> PipelineArguments:
        """Return the copies of the model in which callbacks keep averages."""
        return {"copies": find_copies(prepared.trainer, prepared.module, prepared.path)}

    def begin(self, run: Run) -> Iterable[Undo]:
        """Make the stages run the computations of the callbacks."""
        return average_on_stages(run.trainer, run.pipeline.reading_late)


def check_callbacks(trainer: Any) -> None:
    """Check that no callback prunes weights, because it would prune only the weights of the driver's stage.

    Raises:
        MisconfigurationException: If a callback prunes weights.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, ModelPruning):
            raise MisconfigurationException(
                f"RPCSequentialStrategy does not support {type(callback).__name__} yet: it would prune the weights "
                "of the last stage only. Leave it out."
            )


def average_on_stages(trainer: Any, reading_late: Callable[[], AbstractContextManager[Any]]) -> list[Undo]:
    """Make the stages run what averaging callbacks compute in their hooks.

    Args:
        trainer: The Trainer with the callbacks.
        reading_late: Returns a context in which values in state dicts of the copies are fetched when they are read.

    Returns:
        Functions that make the callbacks compute on the driver again.
    """
    callbacks = averaging_callbacks(trainer)
    undo = [undo for callback in callbacks for undo in run_hooks_within(callback, _HOOKS, OnStages)]
    # WeightAveraging saves the average under the key ``state_dict``.
    saving = [undo for own in callbacks for undo in run_hooks_within(own, ["on_save_checkpoint"], reading_late)]
    return [*undo, *saving]
