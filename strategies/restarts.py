"""Going on after a worker is lost: ``fit`` begins once more, with new workers, from the last checkpoint.

    Trainer.fit ──▶ Restarts.launch ──▶ what Lightning does in fit ──▶ WorkerLost
                          ▲                                                │
                          └── the model as it was, the last checkpoint ◀───┘

As a new process would that resumes from there; only Python attributes of the user's objects stay what they are.
"""

import tempfile
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.utilities.cloud_io import get_filesystem
from lightning_fabric.utilities.seed import _collect_rng_states, _set_rng_states
from pytorch_lightning import Trainer
from pytorch_lightning.strategies.launchers.launcher import _Launcher
from pytorch_lightning.trainer.states import TrainerFn, TrainerStatus
from pytorch_lightning.utilities.model_helpers import _ModuleMode
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from strategies.base import unwrapped
from strategies.pipeline.lost import WorkerLost
from strategies.pipeline.placement import move_from_meta


class Restarts(_Launcher):
    """What the Trainer asks to run ``fit``.

    Args:
        max_restarts: How often one ``fit`` may begin once more.
        abandon: Ends what is left of the workers, without asking them for anything.
    """

    def __init__(self, max_restarts: int, abandon: Callable[[], None]) -> None:
        self._max_restarts, self._abandon = max_restarts, abandon
        self._folder: Path | None = None  # while there is a fit
        self._beginning: Beginning | None = None
        self._checkpoints: list[Any] = []

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether it works in a notebook."""
        return True

    def kill(self, signum: Any) -> None:
        """Nothing: the strategy ends its workers."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Calls the function; if it is ``fit`` and loses a worker, calls it again, from the last checkpoint.

        Raises:
            WorkerLost: If that has happened too often.
        """
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return function(*args, **kwargs)
        given = signature(function).bind(*args, **kwargs)
        with tempfile.TemporaryDirectory(prefix="relay-restart-") as folder:
            self._folder = Path(folder)
            random_state = _collect_rng_states()
            try:
                for number in range(self._max_restarts):
                    try:
                        return function(*given.args, **given.kwargs)
                    except WorkerLost as error:
                        last = self._last_checkpoint()
                        rank_zero_warn(
                            f"{error}. Restart {number + 1} of at most {self._max_restarts}, "
                            f"from {last if last in self._checkpoints[1:] else 'the beginning'}."
                        )
                    self._tidy(trainer)
                    if last is None:
                        _set_rng_states(random_state)
                    else:
                        given.arguments["ckpt_path"] = last
                return function(*given.args, **given.kwargs)
            finally:
                self._folder, self._beginning = None, None
                self._checkpoints.clear()

    def keep(self, model: nn.Module) -> None:
        """Remembers the model as it is before workers get their layers, the first time in each ``fit``."""
        if self._folder is not None and self._beginning is None:
            self._beginning = Beginning(model, self._folder / "model.pt")

    def training_begins(self, trainer: Trainer) -> None:
        """Makes the first checkpoint, for as long as the user's callbacks have made none."""
        if self._folder is not None and not self._checkpoints:
            trainer.save_checkpoint(self._folder / "begin.ckpt", weights_only=False)

    def saved(self, path: Any) -> None:
        """Notes a checkpoint from which training can go on."""
        if self._folder is not None:
            self._checkpoints = [*(other for other in self._checkpoints if other != path), path]

    def _last_checkpoint(self) -> Any | None:
        # Callbacks remove some, and one that was being written may not be there.
        return next((path for path in reversed(self._checkpoints) if get_filesystem(path).exists(str(path))), None)

    def _tidy(self, trainer: Trainer) -> None:
        """Leaves Trainer and model as ``fit`` found them."""
        self._abandon()
        if self._beginning is not None:
            own = [unwrapped(optimizer) for optimizer in trainer.optimizers]
            self._beginning.restore(trainer.lightning_module, own)
        trainer.state.status = TrainerStatus.INTERRUPTED  # a checkpoint that cannot be completed is no error now
        trainer._teardown()
        trainer.state.status = TrainerStatus.RUNNING
        for results in (trainer.fit_loop.epoch_loop._results, trainer.fit_loop.epoch_loop.val_loop._results):
            results.clear()  # Lightning would reset the metrics in them, which a checkpoint may have
        trainer.should_stop = False
        trainer.training = True


class Beginning:
    """A model as it was: its values in a file, since the layers of a lost worker have none any more.

    Args:
        model: The model, all of it in this process.
        path: Where the file is to be.
    """

    def __init__(self, model: nn.Module, path: Path) -> None:
        self._path, self._modes = path, _ModuleMode()
        self._modes.capture(model)
        self._requires_grad = {name: p.requires_grad for name, p in model.named_parameters()}
        torch.save(_tensors_of(model), path)

    def restore(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Makes the model what it was.

        Args:
            model: The same model, parts of which may be without values.
            optimizers: Those that hold its parameters.
        """
        tensors = torch.load(self._path)
        move_from_meta(model, model, optimizers, tensors)
        for name, parameter in model.named_parameters():
            parameter.data.copy_(tensors[name])
            parameter.requires_grad_(self._requires_grad[name])
            parameter.grad = None
        self._modes.restore(model)
        for module in model.modules():
            if isinstance(module, Metric):
                module.reset()


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers(remove_duplicate=False))}
    return {name: tensor.detach() for name, tensor in named.items()}
