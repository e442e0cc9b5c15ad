"""The state of a run of a pipeline from ``setup`` to ``teardown``: the part known before workers start, and the whole.

options ──▶ Preparation: trainer, model, module, ... ──▶ Run: the same, the pipeline, its states, the training step
            checks, balance, optimizers                  hooks, batches, checkpoints
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch

from strategies.checkpoint.pipeline_checkpoint import StageStates
from strategies.common.joined_lists import lengths_of
from strategies.lightning.arguments import as_misconfiguration
from strategies.lightning.compat import LightningModule, Precision, PyTorchProfiler, Trainer, TrainerFn
from strategies.lightning.launch.replicated_strategy import ReplicatedStrategy
from strategies.lightning.options import Options
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.partition.sequential import Pipelined


class TrainingStep(Protocol):
    """Runs ``training_step`` of the model for a batch."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of ``training_step(*args, **kwargs)``."""


@dataclass(frozen=True)
class Preparation:
    """What is known about a run before workers start.

    Attributes:
        ranks: The strategy: its devices, its replicas, and Lightning's plug-ins.
        options: The options that the user gave.
        settings: Settings of the pipeline; under ``schedule="auto"``, without the schedule until the search finds it.
        trainer: The Trainer.
        model: The model.
        module: The part of the model that is pipelined.
        path: The dotted path of ``module`` in ``model``; empty for several lists.
        gathers: Whether weights and optimizer states come back to the driver when the run ends.
    """

    ranks: ReplicatedStrategy
    options: Options
    settings: Settings
    trainer: Trainer
    model: LightningModule
    module: Pipelined
    path: str
    gathers: bool

    @property
    def is_fitting(self) -> bool:
        """Whether the run is a ``fit``."""
        return self.trainer.state.fn == TrainerFn.FITTING

    @property
    def devices(self) -> list[torch.device]:
        """The device of each stage."""
        return self.ranks.devices

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.ranks.devices)

    @property
    def precision(self) -> Precision:
        """Lightning's precision plug-in."""
        return self.ranks.precision_plugin

    @property
    def is_profiled(self) -> bool:
        """Whether workers make traces for ``PyTorchProfiler``."""
        trainer: Any = self.trainer
        return isinstance(trainer.profiler, PyTorchProfiler)

    @property
    def stage_of_chunk(self) -> Sequence[int]:
        """The number of the stage of each chunk of layers."""
        return stages_of_chunks(self.settings, self.num_stages, len(lengths_of(self.module)))

    def with_settings(self, settings: Settings) -> "Preparation":
        """Return a copy with these settings."""
        return replace(self, settings=settings)


@dataclass(frozen=True)
class Run(Preparation):
    """A run whose workers have started.

    Attributes:
        pipeline: The pipeline.
        states: The state of all stages, for checkpoints.
        training_step: Runs ``training_step`` of the model.
        check_memory: Raises a ``ValueError`` if a stage does not fit into memory.
        move: Moves layers between two batches to match a new balance. Its arguments are the balance and the end of the
            line that reports the move.
        before_batch: Called before each training batch; a feature may add functions.
        after_batches: Called when a validation begins, or the last training batch is over.
    """

    pipeline: Pipeline
    states: StageStates
    training_step: TrainingStep
    check_memory: Callable[[], None]
    move: Callable[[Sequence[int], str], None]
    before_batch: list[Callable[["Run"], None]]
    after_batches: Sequence[Callable[["Run"], None]]

    @classmethod
    def of(cls, prepared: Preparation, pipeline: Pipeline, **rest: Any) -> "Run":
        """Return the run of a pipeline that has started. ``rest`` holds the other attributes of this class."""
        known = {field.name: getattr(prepared, field.name) for field in fields(Preparation)}
        states = StageStates(pipeline, prepared.model, prepared.path)
        return cls(**known, pipeline=pipeline, states=states, **rest)


def stages_of_chunks(settings: Settings, num_stages: int, num_lists: int = 1) -> Sequence[int]:
    """Return the number of the stage of each chunk of layers."""
    with as_misconfiguration():
        return settings.programs(num_stages, num_lists=num_lists).rank_of
