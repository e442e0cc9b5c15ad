"""SLURM gives notice by a signal before it ends a job. Lightning then saves a checkpoint and requeues the job.

Lightning does so in the signal handler, wherever the script is at that moment. In the middle of a step, the workers of
a pipeline do not answer, and ranks would save different steps or wait for each other forever. Here the handler only
notes the signal, and all drivers save after the same batch:

    rank 0    batch 0 │ batch 1, signal │ save
    rank 1    batch 0 │ batch 1         │ save
                      ╰─────────────────┴─ after each batch: has any rank received the signal?
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeGuard, cast

import torch

from strategies.lightning.compat import (
    Callback,
    SLURMEnvironment,
    Trainer,
    TrainerFn,
    is_accumulating,
    rank_zero_warn,
    slurm_handler,
)
from strategies.lightning.hooks import Undo, on_notice_of_slurm


def requeues(environment: Any) -> TypeGuard[SLURMEnvironment]:
    """Return whether Lightning puts the job back into the queue when SLURM sends its signal."""
    return isinstance(environment, SLURMEnvironment) and environment.auto_requeue


def requeue_after_batch(
    trainer: Trainer,
    environment: SLURMEnvironment,
    num_drivers: int,
    saving_at_once: Callable[[], AbstractContextManager[None]],
) -> list[Undo]:
    """Make Lightning save and requeue after a batch instead of within one.

    Args:
        trainer: The Trainer.
        environment: Knows the signal.
        num_drivers: Number of processes that run the Trainer's loop, which all save after the same batch.
        saving_at_once: Context in which no checkpoint is written in the background: a job that has been requeued is
            killed.

    Returns:
        Functions that undo this.
    """
    requeue = partial(slurm_handler(trainer), environment.requeue_signal, None)
    callback = RequeueAfterBatch(requeue, num_drivers, saving_at_once)
    callbacks: list[Callback] = cast(Any, trainer).callbacks
    callbacks.append(callback)  # last, so that the others have seen the batch before the checkpoint is saved
    return [partial(callbacks.remove, callback), on_notice_of_slurm(trainer, callback.note)]


class RequeueAfterBatch(Callback):
    """Notes the signal, and requeues the job after the batch in which any process has received it.

    Within ``fit``, this is a batch after which the optimizer has stepped, since checkpoints hold no gradients; a
    validation between two accumulated batches goes on. Several drivers agree after each batch of training and after
    each validation.

    Args:
        requeue: Lightning's handler of the signal.
        num_drivers: Number of processes that run the Trainer's loop.
        saving_at_once: Context in which no checkpoint is written in the background.
    """

    def __init__(
        self,
        requeue: Callable[[], None],
        num_drivers: int,
        saving_at_once: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._requeue, self._num_drivers, self._saving_at_once = requeue, num_drivers, saving_at_once
        self.is_due = False
        """Whether this process has received the signal, and the job has not been requeued yet."""

    def note(self) -> None:
        """Note the signal. Python calls this between any two instructions of the script."""
        self.is_due = True

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Requeue the job if any process has received the signal."""
        if not is_accumulating(trainer):
            self._requeue_if_due(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Requeue the job if the only driver has received the signal: the job may end before the validation does."""
        is_within_fit = trainer.state.fn == TrainerFn.FITTING
        if trainer.sanity_checking or (is_within_fit and is_accumulating(trainer)):
            return
        if self._requeue_in_evaluation(trainer) and is_within_fit:
            rank_zero_warn(
                "SLURM has sent its signal during a validation: the job that starts again skips the rest of this "
                "validation. Its metrics are those of the batches so far."
            )

    def on_validation_end(self, trainer: Trainer, *args: Any) -> None:
        """Requeue the job after a validation within ``fit`` if any of several drivers has received the signal."""
        is_within_fit = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if self._num_drivers > 1 and is_within_fit and not is_accumulating(trainer):
            self._requeue_if_due(trainer)

    def on_test_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Requeue the job if the only driver has received the signal."""
        self._requeue_in_evaluation(trainer)

    def on_predict_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Requeue the job if the only driver has received the signal."""
        self._requeue_in_evaluation(trainer)

    def _requeue_in_evaluation(self, trainer: Trainer) -> bool:
        """Requeue the job between two batches, unless several drivers may have different numbers of batches."""
        if self._num_drivers == 1:
            return self._requeue_if_due(trainer)
        if self.is_due and trainer.state.fn != TrainerFn.FITTING:
            self.is_due = False
            rank_zero_warn(
                f"SLURM has sent its signal during {trainer.state.fn}. A job of several drivers is put back into the "
                "queue by fit only: start it again with a longer time limit."
            )
        return False

    def _requeue_if_due(self, trainer: Trainer) -> bool:
        if is_due := self._is_due_anywhere(trainer):
            self.is_due = False
            with self._saving_at_once():
                self._requeue()
        return is_due

    def _is_due_anywhere(self, trainer: Trainer) -> bool:
        if self._num_drivers == 1:
            return self.is_due
        due = torch.tensor([float(self.is_due)], device=trainer.strategy.root_device)
        torch.distributed.all_reduce(due, torch.distributed.ReduceOp.MAX)
        return due.item() > 0
