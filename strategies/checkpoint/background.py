"""Saving while training goes on: a snapshot in host memory, written by a thread."""

import copy
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor

from strategies.common.patching import replaced
from strategies.common.torch_compat import tree_leaves


def snapshot(checkpoint: dict[str, Any], private: Iterable[Tensor] = ()) -> dict[str, Any]:
    """A copy of a checkpoint in host memory that no training step changes; tensors that share memory still do.

    Args:
        checkpoint: What is to be saved.
        private: Tensors in it that nobody else knows, and which need no copy.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in private}
    for leaf in tree_leaves(checkpoint):
        if not isinstance(leaf, Tensor) or id(leaf) in memo:
            continue
        if leaf.is_meta:  # without a value
            memo[id(leaf)] = leaf
        elif leaf.device.type != "cpu" or leaf.grad_fn is not None:
            memo[id(leaf)] = leaf.detach().to("cpu", copy=True)
    return copy.deepcopy(checkpoint, memo)


def check_links(trainer: Trainer) -> None:
    """Checks that no callback links to a checkpoint, which is not there yet when it has been saved.

    Raises:
        MisconfigurationException: If one does.
    """
    if any(callback.save_last == "link" for callback in _model_checkpoints(trainer)):
        raise MisconfigurationException(
            'ModelCheckpoint(save_last="link") makes a link to a checkpoint that async_save=True is still writing. Use '
            "save_last=True."
        )


def wait_before_looking(trainer: Trainer, background: "Background") -> list[Callable[[], None]]:
    """Has callbacks look for a free name only when the checkpoint before is there; the next save waits for it anyway.

    Returns:
        Functions that end this.
    """

    def look(exists: Callable[..., bool], *args: Any) -> bool:
        background.settle()
        return exists(*args)

    callbacks = _model_checkpoints(trainer)
    return [replaced(callback, "file_exists", partial(look, callback.file_exists)) for callback in callbacks]


def _model_checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    fitting = trainer.state.fn == TrainerFn.FITTING
    return [own for own in trainer.checkpoint_callbacks if isinstance(own, ModelCheckpoint) and fitting]


class Background:
    """A thread that writes checkpoints, one at a time."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="relay-save")
        self._saving: Future[None] | None = None
        self._others: list[Future[None]] = []

    def save(self, write: Callable[[], None]) -> None:
        """Begins to write.

        Raises:
            Exception: What went wrong with the one before, for which this waits; nothing is begun then.
        """
        self.wait()
        self._saving = self._executor.submit(write)

    def after_saving(self, action: Callable[[], None]) -> None:
        """Does something when the checkpoint that is being written is there; never, if that fails."""
        saving = self._saving

        def act() -> None:
            if saving is None or saving.exception() is None:
                action()

        self._others.append(self._executor.submit(act))

    def settle(self) -> None:
        """Returns when nothing is being done any more."""
        for future in self._futures():
            future.exception()

    def wait(self) -> None:
        """Returns when nothing is being done any more.

        Raises:
            Exception: The first thing that went wrong since the last call.
        """
        self.settle()
        futures, self._saving, self._others = self._futures(), None, []
        for future in futures:
            future.result()

    def end(self) -> None:
        """Like :meth:`wait`, and ends the thread."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()

    def _futures(self) -> list[Future[None]]:
        return [*([self._saving] if self._saving is not None else []), *self._others]
