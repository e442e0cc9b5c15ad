"""Lightning's loops and connectors, extended so that a resumed run continues with the next batch and random state."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, cast

import torch

from strategies.lightning.compat import (
    CheckpointConnector,
    CombinedLoader,
    DataFetcher,
    DataLoaderIterDataFetcher,
    DataLoaderSource,
    FitLoop,
    LoggerConnector,
    PossibleUserWarning,
    PrefetchDataFetcher,
    Trainer,
    TrainerFn,
    TrainingEpochLoop,
    combined_mode,
    forget_validation,
    update_callback_metrics,
)
from trainer.resume.combined_loader import ResumableLoader
from trainer.resume.epoch_results import ResumableResults
from trainer.resume.loader import Resumption
from trainer.resume.random_state import cuda_random_state, plain, random_state, set_cuda_random_state, set_random_state


class ResumingEpochLoop(TrainingEpochLoop):
    """Lightning's loop over the batches of an epoch; a resumed run first finishes the last batch.

    After a batch, Lightning validates if validation is due, steps plateau schedulers, and counts the step for loggers.
    A checkpoint can be written before, during or after that, and Lightning's counters of batches do not show which.
    """

    def __init__(self, trainer: Trainer, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps=min_steps, max_steps=max_steps)
        self._results: ResumableResults = ResumableResults()
        self._num_ended = 0
        self._is_validated = False
        self.resumes = self.loader_resumes = False

    def reset(self) -> None:
        with warnings.catch_warnings():
            if self.loader_resumes:
                warnings.filterwarnings("ignore", ".*your dataloader is not resumable", PossibleUserWarning)
            super().reset()
        self.loader_resumes = False

    def all_batches_ready(self) -> bool:
        """Return whether the last batch of the epoch has been taken."""
        return bool(self._num_ready_batches_reached())

    @property
    def is_in_step(self) -> bool:
        """Whether a batch has begun but is not trained on."""
        current: Any = self.batch_progress.current
        return bool(current.ready > current.processed)

    @property
    def rest_of_batch(self) -> str:
        """What the last batch still needs: ``"validation"`` and all after it, ``"schedulers"``, or nothing: ``""``."""
        current: Any = self.batch_progress.current
        if current.processed <= self._num_ended:
            return ""
        return "schedulers" if self._is_validated else "validation"

    @rest_of_batch.setter
    def rest_of_batch(self, rest: str) -> None:
        current: Any = self.batch_progress.current
        self._num_ended = current.completed - bool(rest)
        self._is_validated = rest == "schedulers"

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self.rest_of_batch = ""

    def advance(self, data_fetcher: DataFetcher) -> None:
        self._results.begin_batch()
        resumes, self.resumes = self.resumes, False
        if resumes and self.rest_of_batch:
            self.val_loop.restarting = self.rest_of_batch == "schedulers"
            # Lightning itself goes on in the validation step in which the checkpoint was written.
            self._skip_next_val = self.val_loop.restarting and not self.val_loop.restarted_mid_evaluation
            return
        if resumes:
            self._restarting = False  # or Lightning would finish the last batch again
        self.rest_of_batch = ""
        super().advance(data_fetcher)

    def on_advance_end(self, data_fetcher: DataFetcher) -> None:
        self.rest_of_batch = "schedulers"
        super().on_advance_end(data_fetcher)

    def _save_loggers_on_train_batch_end(self) -> None:
        self.rest_of_batch = ""  # here, because on_advance_end ends with an exception after SIGTERM
        super()._save_loggers_on_train_batch_end()


class ResumingFitLoop(FitLoop):
    """Lightning's loop over epochs; it saves and restores the position of its loaders and the random state.

    A resumed run restores the random state at the point where training continues: before the hooks of a new epoch, or
    before the next batch of an epoch that had begun. In the first case its loaders start only then, as they would have
    without the interruption.
    """

    epoch_loop: ResumingEpochLoop

    def __init__(self, trainer: Trainer, min_epochs: int | None, max_epochs: int | None) -> None:
        super().__init__(trainer, min_epochs=min_epochs, max_epochs=max_epochs)
        self._data_source = _ResumableSource(None, "train_dataloader", self._num_processed)
        self._saved: dict[str, Any] | None = None
        self._num_processes = 0
        self._knows_counters = False
        self._loaders_at_end: dict[str, Any] | None = None
        self._stateful_at_end: list[dict[str, Any]] = []
        self._random_at_end: dict[str, Any] | None = None
        self._resumed = self._finishes_epoch = False

    def state_of_process(self) -> dict[str, Any]:
        """Return random state and position of the loaders of this process, and the metrics that schedulers read."""
        waiting = self._saved or {}  # loaded, and not yet used because training has not begun
        return {
            "random": waiting.get("random", plain(self._random())),
            "cuda": waiting.get("cuda", cuda_random_state()),
            "loaders": self._loaders_at_end if self._data_fetcher is None else self._state_of_loaders(),
            "stateful": self._states_of_stateful(),
            "loaded_in_epoch": self._last_train_dl_reload_epoch,
            "rest_of_batch": self.epoch_loop.rest_of_batch,
            "sums": self.epoch_loop._results.state(before_batch=self.epoch_loop.is_in_step),
            "metrics": {
                name: value.detach().cpu()
                for name, value in self.trainer.callback_metrics.items()
                if isinstance(value, torch.Tensor)  # users may also add entries
            },
        }

    def on_save_checkpoint(self) -> dict[str, Any]:
        state: dict[str, Any] = super().on_save_checkpoint()
        if state.get("combined_loader") and self._loader() is not None:
            state["combined_loader"] = self._states_of_stateful()  # for Lightning's own Trainer
        return state

    def resume_processes(self, saved: list[dict[str, Any]]) -> None:
        """Make the next run continue from the states that :meth:`state_of_process` returned.

        Args:
            saved: The state of each process; empty for a checkpoint without states. If there are more processes than
                before, the additional ones take the state of the last one.
        """
        self._saved = saved[min(self.trainer.global_rank, len(saved) - 1)] if saved else None
        self._num_processes, self._knows_counters = len(saved), False
        self._loaders_at_end, self._stateful_at_end, self._random_at_end = None, [], None
        self._finishes_epoch = self.epoch_loop.resumes = False

    def load_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        """Load the counters, and complete those that were saved in the middle of a batch or of the end of an epoch."""
        super().load_state_dict(state_dict, prefix)
        self._knows_counters = True
        if self._saved is not None:
            self._complete_steps(self._saved["rest_of_batch"])
        if self._data_fetcher is not None and self._combined_loader is not None:
            self._load_combined_loader_states()
            iter(self._data_fetcher)

    def _complete_steps(self, rest_of_batch: str) -> None:
        batches: Any = self.epoch_loop.batch_progress
        epochs: Any = self.epoch_progress
        forget_validation(self.epoch_loop.val_loop)  # that of an earlier fit
        # A batch that on_train_batch_start has skipped is not completed either, but it has ended its epoch.
        is_in_epoch = epochs.current.started > epochs.current.processed
        if is_in_epoch and batches.current.processed > batches.current.completed:
            batches.increment_completed()
        self.epoch_loop.rest_of_batch = rest_of_batch if is_in_epoch else ""
        self.epoch_loop.resumes = True
        if batches.current.ready > batches.current.processed:
            batches.is_last_batch = False  # this batch is trained on again
        batches.total.reset_on_restart()
        has_steps = self.max_steps == -1 or self.epoch_loop.global_step < self.max_steps
        if batches.current.ready and not batches.is_last_batch and has_steps:
            # The epoch ended early, by max_steps, max_time or should_stop, so it continues.
            for progress in (epochs.total, epochs.current):
                progress.processed = progress.completed = progress.ready - 1
            self.restarting = True  # Lightning has cleared it, because it took the epoch for a complete one
        for progress in (epochs.total, epochs.current):
            progress.ready = progress.started  # an epoch that was only ready is started again and counted then
        if epochs.total.started == epochs.total.processed:
            self.epoch_loop.restarting = False
            self._finishes_epoch = epochs.total.processed > epochs.total.completed

    def reset(self) -> None:
        if not self.is_resuming:
            epochs: Any = self.epoch_progress
            for progress in (epochs.total, epochs.current):
                progress.ready = progress.started = progress.processed  # an epoch that a failed fit has left is over
            epochs.total.completed = epochs.total.processed
        if self._saved is not None:
            metrics = {
                name: value.to(self.trainer.strategy.root_device) for name, value in self._saved["metrics"].items()
            }
            update_callback_metrics(self.trainer, metrics)
            if self.epoch_loop.restarting:
                self.epoch_loop._results.resume(self._saved["sums"], self.trainer.strategy.reduce)
        if self._finishes_epoch:
            if self.epoch_loop.all_batches_ready():
                self.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
            self.epoch_progress.increment_completed()
            self._finishes_epoch = False
        super().reset()

    def _load_combined_loader_states(self) -> None:
        # Called by setup_data, when the loaders are known and before they are iterated over.
        loader = self._loader()
        if loader is not None and self._saved is not None and not self._knows_counters:
            loader.waits = True  # configure_optimizers has asked for the number of steps
            return
        if loader is None or self._saved is None or self._saved["loaders"] is None:
            super()._load_combined_loader_states()
            return
        self.epoch_loop.loader_resumes = True
        progress = self.epoch_loop.batch_progress
        in_mid_epoch = not progress.is_last_batch and (self.epoch_loop.restarting or progress.current.ready == 0)
        if in_mid_epoch:
            self._combined_loader_states_to_load = self._saved["stateful"]  # those of this process
            super()._load_combined_loader_states()
        loader.resume(
            self._saved["loaders"],
            Resumption(in_mid_epoch, self._num_processes, self.trainer.world_size, self.trainer.global_rank),
        )

    def on_advance_start(self) -> None:
        saved, self._saved = self._saved, None
        self._resumed = saved is not None
        if saved is not None:
            set_random_state(saved["random"])
            set_cuda_random_state(saved["cuda"])
            self._last_train_dl_reload_epoch = saved["loaded_in_epoch"]
        super().on_advance_start()

    def advance(self) -> None:
        loader = self._loader()
        if loader is not None and self._resumed:
            begins = loader.waits or self.trainer.current_epoch > 0
            loader.waits = False
            if begins and not self.epoch_loop.restarting:
                iter(cast(Any, self._data_fetcher))
        super().advance()

    def on_advance_end(self) -> None:
        if self._resumed:
            self.epoch_loop._results.end_epoch()
        super().on_advance_end()

    def after_epoch_end_hooks(self) -> None:
        """End ``restarting``, or Lightning would not step ``ReduceLROnPlateau`` at the end of a resumed epoch."""
        if self._resumed:
            self._restarting = False

    def teardown(self) -> None:
        if self._data_fetcher is not None:
            self._random_at_end = self._random()
            # After an error, the user must see this error, and not a later error of their loaders.
            with suppress(Exception) if self.trainer.interrupted else nullcontext():
                loaders, stateful = self._state_of_loaders(), self._states_of_stateful()
                self._loaders_at_end, self._stateful_at_end = loaders, stateful
        super().teardown()

    def _loader(self) -> ResumableLoader | None:
        return self._combined_loader if isinstance(self._combined_loader, ResumableLoader) else None

    def _state_of_loaders(self) -> dict[str, Any] | None:
        loader = self._loader()
        return None if loader is None else loader.state(self._num_ahead())

    def _states_of_stateful(self) -> list[dict[str, Any]]:
        loader = self._loader()
        if self._data_fetcher is None or loader is None:
            return self._stateful_at_end
        return loader.states_of_stateful(self._num_ahead())

    def _random(self) -> dict[str, Any]:
        """Return the random state, or the one before the current batch if that batch will be trained on again."""
        loader = self._loader()
        if self._data_fetcher is None:
            return self._random_at_end or random_state()
        if loader is not None and self._num_ahead() > self._num_read_ahead():
            return loader.random_at_last_batch
        return random_state()

    def _num_ahead(self) -> int:
        """Return how many batches are taken but not trained on: those read ahead, and one in the middle of its step."""
        loader = self._loader()
        if loader is None or isinstance(self._data_fetcher, DataLoaderIterDataFetcher | None):
            return 0
        return loader.num_taken - self._num_processed()

    def _num_read_ahead(self) -> int:
        return len(self._data_fetcher.batches) if isinstance(self._data_fetcher, PrefetchDataFetcher) else 0

    def _num_processed(self) -> int:
        total: Any = self.epoch_loop.batch_progress.total
        return int(total.processed)


class ResumingLoggerConnector(LoggerConnector):
    """Lightning's logger connector, which is called between the hooks of an epoch's end and the schedulers' steps."""

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        if self.trainer.training:
            cast(Any, self.trainer.fit_loop).after_epoch_end_hooks()


class ResumingCheckpointConnector(CheckpointConnector):
    """Lightning's checkpoint connector; full checkpoints also hold the state of every process, under ``relay``."""

    def dump_checkpoint(self, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().dump_checkpoint(weights_only)
        if not weights_only:
            checkpoint.setdefault("relay", {})["processes"] = _of_every_process(
                self.trainer, cast(Any, self.trainer.fit_loop).state_of_process()
            )
        return checkpoint

    def _restore_modules_and_callbacks(self, *args: Any, **kwargs: Any) -> None:
        super()._restore_modules_and_callbacks(*args, **kwargs)
        if self.trainer.state.fn == TrainerFn.FITTING:
            cast(Any, self.trainer.fit_loop).resume_processes(
                self._loaded_checkpoint.get("relay", {}).get("processes", [])
            )


@dataclass
class _ResumableSource(DataLoaderSource):
    """The source of the fit loop's loaders.

    Attributes:
        num_processed: Returns how many batches have been trained on, in all epochs.
    """

    num_processed: Callable[[], int]

    def dataloader(self) -> Any:
        loaders = super().dataloader()
        if not isinstance(loaders, CombinedLoader):
            return ResumableLoader(loaders, "max_size_cycle", self.num_processed)
        if type(loaders) is not CombinedLoader:
            return loaders
        return ResumableLoader(loaders.iterables, combined_mode(loaders), self.num_processed)


def _of_every_process(trainer: Trainer, state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the states of all ranks on rank 0, and an empty list on other ranks, which write no checkpoint."""
    if trainer.world_size == 1 or not (trainer.interrupted or torch.distributed.is_initialized()):
        return [state]
    if trainer.interrupted:  # other ranks may have ended, so only what is the same on all ranks can be saved
        loaders = state["loaders"]["loaders"] if state["loaders"] else []
        return [state] * trainer.world_size if all(loader["order"] for loader in loaders) else []
    gathered: list[Any] | None = [None] * trainer.world_size if trainer.global_rank == 0 else None
    trainer.strategy.barrier("state of the loops")  # no rank passes if one rank must start again
    group = getattr(trainer.strategy, "data_parallel_group", None)  # pipelines that divide layers have one state
    first = 0 if group is None else torch.distributed.get_global_rank(group, 0)
    torch.distributed.gather_object(state, gathered, first, group)
    return gathered or []


# Profilers, warnings and errors print __name__, by which users know Lightning's classes; pickle goes by __qualname__.
for _class in (ResumingEpochLoop, ResumingFitLoop, ResumableLoader, ResumableResults):
    _class.__name__ = _class.__mro__[1].__name__
