"""What a training step begins with, apart from what the engine's snapshots hold."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from strategies.lightning.compat import (
    Callback,
    LightningDataModule,
    LightningModule,
    LightningOptimizer,
    Logger,
    Precision,
    Profiler,
    Strategy,
    Trainer,
    collect_rng_states,
    set_rng_states,
    unwrapped,
)
from strategies.lightning.hooks import scaler_of
from strategies.lightning.recovery.values import Remembered, RememberedValues
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.stage.layers import Seeds

_FOREIGN = (
    *(Trainer, Strategy, Callback, Logger, Profiler, Precision, LightningDataModule, Optimizer, LightningOptimizer),
    Pipeline,
)


class Moment:
    """The state of a run at one moment.

    Args:
        values: What Python objects held.
        seeds: Source of the layers' random numbers.
        model: The model.
    """

    def __init__(self, values: Remembered, seeds: Seeds, model: nn.Module) -> None:
        self._values, self._seeds = values, seeds
        self._position, self._random = seeds.state_dict(), collect_rng_states(include_cuda=False)
        self._requires_grad = [(p, p.requires_grad) for p in model.parameters()]
        self._modes = [(module, module.training) for module in model.modules()]

    def changed(self) -> list[str]:
        """Return the names of objects that have changed since and cannot be restored."""
        return self._values.changed()

    def restore(self) -> None:
        """Restore the state of that moment."""
        self._values.restore()
        for module, mode in self._modes:
            if module.training != mode:
                module.training = mode
        for parameter, requires_grad in self._requires_grad:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
        self._seeds.load_state_dict(self._position)
        set_rng_states(self._random)


class Moments:
    """Remembers moments of a run.

    Args:
        trainer: The Trainer.
        model: The model.
        pipeline: The pipeline, which restores parameters and buffers.
        seeds: Source of the layers' random numbers.
        others: Other objects that change in a step, by their names.
    """

    def __init__(
        self, trainer: Trainer, model: LightningModule, pipeline: Pipeline, seeds: Seeds, others: Mapping[str, Any]
    ) -> None:
        self._trainer, self._model, self._pipeline, self._seeds = trainer, model, pipeline, seeds
        self._others = others
        self._inside = set(pipeline.module.modules())
        self.look_again()

    def look_again(self) -> None:
        """Read the modules, parameters and buffers of the model again, because they may have been replaced."""
        model = self._model
        self._memory = RememberedValues([*model.modules(), *model.parameters(), *model.buffers()], _FOREIGN)
        self._modules = [
            (f"self.{name}" if name else "self", module)
            for name, module in model.named_modules()
            if module not in self._inside
        ]

    @property
    def taken_as_unchanged(self) -> Mapping[str, str]:
        """Names of attributes that are not restored, because they cannot be copied, and why."""
        return self._memory.taken_as_unchanged

    def now(self) -> Moment:
        """Return the state of the run at this moment."""
        return Moment(self._memory.take(self._holders()), self._seeds, self._model)

    def batch(self, arguments: Any, *, copies: bool) -> Remembered:
        """Return the values of a batch, or, without ``copies``, marks that differ if they have changed."""
        return self._memory.take([("the batch", arguments)], copies_tensors=copies)

    def _holders(self) -> Iterator[tuple[str, Any]]:
        trainer: Any = self._trainer
        yield from self._modules
        for number, optimizer in enumerate(map(unwrapped, trainer.optimizers)):
            yield f"optimizers[{number}].param_groups", optimizer.param_groups
        for number, config in enumerate(trainer.lr_scheduler_configs):
            yield f"lr_scheduler_configs[{number}].scheduler", config.scheduler
        loop = trainer.fit_loop.epoch_loop
        yield "epoch_progress", trainer.fit_loop.epoch_progress
        yield "batch_progress", loop.batch_progress
        yield "scheduler_progress", loop.scheduler_progress
        yield "optim_progress", loop.automatic_optimization.optim_progress
        yield "optim_step_progress", loop.manual_optimization.optim_step_progress
        yield "state", trainer.state
        if (scaler := scaler_of(trainer.precision_plugin)) is not None:
            yield "scaler", scaler
        yield from self._others.items()
