"""Restart after a worker is lost: ``fit`` runs again from the last checkpoint, with new workers.

    Trainer.fit ──▶ Restarts.launch ──▶ what Lightning does in fit ──▶ WorkerLost
                          ▲                                                │
                          └── the model as it was, the last checkpoint ◀───┘

The result equals that of a new process that resumes from there, except that Python attributes of the user's objects
keep their values.
"""

import importlib
import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from strategies.common.errors import WorkerLost
from strategies.lightning.checks import check_restarted_callbacks
from strategies.lightning.compat import (
    BatchSizeFinder,
    Launcher,
    LearningRateFinder,
    ModelCheckpoint,
    ModuleMode,
    Trainer,
    TrainerFn,
    TrainerStatus,
    WeightAveraging,
    collect_rng_states,
    forget_saved_step,
    forget_update_epoch,
    get_filesystem,
    logged_results,
    rank_zero_warn,
    set_rng_states,
    tear_down,
)
from strategies.pipeline.state.stand_ins import move_from_meta


class Restarts(Launcher):
    """The launcher that the Trainer calls to run ``fit``.

    Args:
        max_restarts: How often one ``fit`` may be restarted.
        settle: Waits until no checkpoint is being written.
        abandon: Ends the remaining workers without fetching their state.
        agree: Called with an error and the numbers of checkpoints that are there; returns the number of the one to go
            back to, which all replicas have, or ``None``. By default there is one pipeline, which chooses the last.
        broadcast: Returns what the first replica has passed.
    """

    def __init__(
        self,
        max_restarts: int,
        settle: Callable[[], None],
        abandon: Callable[[], None],
        agree: Callable[[WorkerLost, Sequence[int]], int | None] = lambda error, numbers: max(numbers, default=None),
        broadcast: Callable[[Path], Path] = lambda path: path,
    ) -> None:
        self._max_restarts, self._settle, self._abandon = max_restarts, settle, abandon
        self._agree, self._broadcast = agree, broadcast
        self._folder: Path | None = None  # while there is a fit
        self._beginning: Beginning | None = None
        self._first: Path | None = None
        self._checkpoints: dict[Any, _Saved] = {}
        self._num_saved = 0  # the same in all replicas

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether it works in a notebook."""
        return True

    def kill(self, signum: Any) -> None:
        """Does nothing: the strategy ends its workers."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Calls the function. If it is ``fit`` and a worker is lost, calls it again from the last checkpoint.

        Raises:
            WorkerLost: If more than ``max_restarts`` workers were lost, or the checkpoints have been removed.
            MisconfigurationException: If a callback runs training steps of its own and reverts them.
        """
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return function(*args, **kwargs)
        check_restarted_callbacks(trainer)
        if _is_search(trainer):
            return function(*args, **kwargs)
        given = signature(function).bind(*args, **kwargs)
        with tempfile.TemporaryDirectory(prefix="relay-restart-", ignore_cleanup_errors=True) as folder:
            self._folder, random_state = Path(folder), collect_rng_states()
            try:
                for number in itertools.count(1):
                    try:
                        return function(*given.args, **given.kwargs)
                    except WorkerLost as error:
                        if number > self._max_restarts or trainer.received_sigterm:
                            raise
                        last = self._last_checkpoint(error)
                        if last is None and self._checkpoints:
                            raise
                        where = "where it began" if last in (None, self._first) else last
                        rank_zero_warn(f"{error}\nRestart {number} of at most {self._max_restarts}, from {where}.")
                    self._tidy(trainer, stops=last in self._checkpoints and self._checkpoints[last].stops)
                    set_rng_states(random_state)
                    given.arguments["ckpt_path"] = last or given.arguments.get("ckpt_path")
            finally:
                self._settle()
                self._folder, self._beginning, self._first = None, None, None
                self._checkpoints.clear()
                self._num_saved = 0

    def model_is_whole(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Stores model and optimizers before workers get their parts, the first time in each ``fit``."""
        if self._folder is not None and self._beginning is None:
            importlib.import_module("omegaconf")  # as Lightning does in the first checkpoint, when workers wait
            self._beginning = Beginning(model, optimizers, self._folder / "model.pt")

    def training_begins(self, trainer: Trainer) -> None:
        """Writes the first checkpoint of each ``fit``."""
        if self._folder is not None:
            self._first = self._broadcast(self._folder / "begin.ckpt")
            if self._first not in self._checkpoints:
                trainer.save_checkpoint(self._first, weights_only=False)

    def checkpoint_saved(self, path: Any, *, stops: bool) -> None:
        """Records a checkpoint from which training can continue, and ``trainer.should_stop``, which is not in it."""
        if self._folder is not None:
            self._checkpoints.pop(path, None)
            self._num_saved += 1
            self._checkpoints[path] = _Saved(self._num_saved, stops)

    @property
    def is_restart(self) -> bool:
        """Whether this ``fit`` has run before, with workers of which one was lost; asked before the model is stored."""
        return self._beginning is not None

    def _last_checkpoint(self, error: WorkerLost) -> Any | None:
        """Return the last checkpoint that is there, and of which all replicas know."""
        self._settle()
        # Callbacks remove checkpoints, and one that was being written may be missing.
        there = {saved.number: path for path, saved in self._checkpoints.items() if _exists(path)}
        number = self._agree(error, list(there))
        if number is None:
            return None
        self._num_saved = number
        for path in [path for path, saved in self._checkpoints.items() if saved.number > number]:
            del self._checkpoints[path]
        return there[number]

    def _tidy(self, trainer: Trainer, *, stops: bool) -> None:
        """Restores Trainer and model to their state before ``fit``."""
        self._abandon()
        trainer.training = True  # the worker may have been lost in validation
        trainer.state.status = TrainerStatus.INTERRUPTED  # so that an incomplete checkpoint raises no error
        tear_down(trainer)
        trainer.state.status = TrainerStatus.RUNNING
        if self._beginning is not None:
            self._beginning.restore(trainer.lightning_module)
        for results in logged_results(trainer):
            results.clear()  # Lightning would reset the metrics in them, which a checkpoint may have
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                forget_saved_step(callback)
        for callback in cast(Any, trainer).callbacks:
            if isinstance(callback, WeightAveraging):
                forget_update_epoch(callback)  # no checkpoint holds it
        trainer.should_stop = stops


@dataclass(frozen=True)
class _Saved:
    """A checkpoint.

    Attributes:
        number: How many checkpoints of this ``fit`` had been saved with it.
        stops: Whether a callback had asked to stop.
    """

    number: int
    stops: bool


def _exists(path: Any) -> bool:
    return bool(get_filesystem(path).exists(str(path)))


def _is_search(trainer: Trainer) -> bool:
    """Whether this ``fit`` is a search of a Tuner, which writes no checkpoint to continue from."""
    return any(isinstance(callback, LearningRateFinder | BatchSizeFinder) for callback in cast(Any, trainer).callbacks)


class Beginning:
    """A stored model. Its values are in a file, because the layers of a lost worker have no values any more.

    Args:
        model: The model, with all of its values in this process.
        optimizers: Optimizers of its parameters; a user may keep them over several fits.
        path: Path of the file.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], path: Path) -> None:
        self._path, self._modes, self._optimizers = path, ModuleMode(), optimizers
        self._modes.capture(model)
        self._requires_grad = {name: p.requires_grad for name, p in model.named_parameters()}
        self._buffers = {(prefix, name) for prefix, module in model.named_modules() for name in module._buffers}
        torch.save((_tensors_of(model), [optimizer.state_dict() for optimizer in optimizers]), path)

    def restore(self, model: nn.Module) -> None:
        """Restores the values of the model, parts of which may have none, and of its optimizers."""
        tensors, states = torch.load(self._path, weights_only=False)  # in a folder of this user's only
        move_from_meta(model, model, self._optimizers, tensors)
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        for name, parameter in model.named_parameters():
            parameter.data.copy_(tensors[name])
            parameter.requires_grad_(self._requires_grad[name])
            parameter.grad = None
        self._modes.restore(model)
        for prefix, module in model.named_modules():
            for name in [name for name in module._buffers if (prefix, name) not in self._buffers]:
                del module._buffers[name]  # created since
            if isinstance(module, Metric):
                module.reset()


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers(remove_duplicate=False))}
    return {name: tensor.detach() for name, tensor in named.items()}
