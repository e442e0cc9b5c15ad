"""The only module of ``strategies`` and ``trainer`` that uses private names of Lightning, torchmetrics, jsonargparse.

Each private function, class or attribute is imported or read here once; other modules use the public names below.
``tests/unit/test_compat.py`` lists every private name with its use and fails, with the package's version, when one is
gone. It also fails if another module uses a private name. What a subclass of one of Lightning's classes overrides, or
reads from ``self``, stays in that subclass; the same test lists it.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from lightning_fabric.utilities.distributed import _DatasetSamplerWrapper as DatasetSamplerWrapper
from lightning_fabric.utilities.distributed import _destroy_dist_connection as destroy_dist_connection
from lightning_fabric.utilities.distributed import _distributed_is_initialized as distributed_is_initialized
from lightning_fabric.utilities.distributed import _init_dist_connection as init_dist_connection
from lightning_fabric.utilities.distributed import _set_num_threads_if_needed as set_num_threads_if_needed
from lightning_fabric.utilities.distributed import _sync_ddp_if_available as sync_ddp_if_available
from lightning_fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
from lightning_fabric.utilities.seed import _collect_rng_states as collect_rng_states
from lightning_fabric.utilities.seed import _set_rng_states as set_rng_states
from lightning_fabric.utilities.types import _Stateful as Stateful
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelCheckpoint,
    ModelSummary,
    StochasticWeightAveraging,
    WeightAveraging,
)
from pytorch_lightning.core.optimizer import LightningOptimizer, _MockOptimizer
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.loops.fetchers import _DataFetcher as DataFetcher
from pytorch_lightning.loops.fetchers import _DataLoaderIterDataFetcher as DataLoaderIterDataFetcher
from pytorch_lightning.loops.fetchers import _PrefetchDataFetcher as PrefetchDataFetcher
from pytorch_lightning.loops.fit_loop import _FitLoop as FitLoop
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop as TrainingEpochLoop
from pytorch_lightning.overrides.distributed import _register_ddp_comm_hook as register_ddp_comm_hook
from pytorch_lightning.overrides.distributed import _sync_module_states as sync_module_states
from pytorch_lightning.plugins.io.wrapper import _WrappingCheckpointIO as WrappingCheckpointIO
from pytorch_lightning.profilers import PyTorchProfiler
from pytorch_lightning.profilers.pytorch import RegisterRecordFunction
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.strategies.launchers import _SubprocessScriptLauncher as SubprocessScriptLauncher
from pytorch_lightning.strategies.launchers.launcher import _Launcher as Launcher
from pytorch_lightning.trainer.connectors.checkpoint_connector import _CheckpointConnector as CheckpointConnector
from pytorch_lightning.trainer.connectors.data_connector import _DataLoaderSource as DataLoaderSource
from pytorch_lightning.trainer.connectors.logger_connector import _LoggerConnector as LoggerConnector
from pytorch_lightning.trainer.connectors.logger_connector.result import _Metadata as ResultMetadata
from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultCollection as ResultCollection
from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultMetric as ResultMetric
from pytorch_lightning.trainer.connectors.logger_connector.result import _Sync as ResultSync
from pytorch_lightning.utilities.argparse import _defaults_from_env_vars as defaults_from_env_vars
from pytorch_lightning.utilities.combined_loader import _SUPPORTED_MODES, CombinedLoader
from pytorch_lightning.utilities.combined_loader import (
    _shutdown_workers_and_reset_iterator as shutdown_workers_and_reset_iterator,
)
from pytorch_lightning.utilities.model_helpers import _ModuleMode as ModuleMode
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torchmetrics import Metric

from strategies.common.torch_compat import forward_hooks

__all__ = [
    "CheckpointConnector",
    "DataFetcher",
    "DataLoaderIterDataFetcher",
    "DataLoaderSource",
    "DatasetSamplerWrapper",
    "FitLoop",
    "Launcher",
    "LoggerConnector",
    "ModuleMode",
    "PrefetchDataFetcher",
    "ResultCollection",
    "ResultMetadata",
    "ResultMetric",
    "ResultSync",
    "Stateful",
    "SubprocessScriptLauncher",
    "TrainingEpochLoop",
    "WrappingCheckpointIO",
    "collect_rng_states",
    "defaults_from_env_vars",
    "destroy_dist_connection",
    "distributed_is_initialized",
    "init_dist_connection",
    "optimizers_to_device",
    "register_ddp_comm_hook",
    "set_num_threads_if_needed",
    "set_rng_states",
    "shutdown_workers_and_reset_iterator",
    "sync_ddp_if_available",
    "sync_module_states",
]


# Optimizers


def unwrapped(optimizer: Optimizer | LightningOptimizer) -> Optimizer:
    """Return the user's optimizer inside Lightning's wrapper, or the optimizer itself if it is not wrapped."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def is_stand_in(optimizer: Optimizer | LightningOptimizer) -> bool:
    """Return whether Lightning made this optimizer because ``configure_optimizers`` returned ``None``."""
    return isinstance(unwrapped(optimizer), _MockOptimizer)


# Strategies


def start_method_of(strategy: Strategy) -> str:
    """Return how a strategy starts its processes; strategies without that setting run the script again."""
    return getattr(strategy, "_start_method", "popen")


def given_backend_of(strategy: Strategy) -> str | None:
    """Return the backend of the process group that the user has asked for, if any."""
    return getattr(strategy, "_process_group_backend", None)


def backend_of(strategy: Strategy) -> str:
    """Return the backend of a strategy's process group; strategies without that setting use gloo."""
    get = getattr(strategy, "_get_process_group_backend", None)
    return "gloo" if get is None else get()


# Trainer and loops


def run_stage_function() -> Callable[..., Any]:
    """Return the function of the Trainer below which the loops run, and above which it sets up."""
    return Trainer._run_stage


def tear_down(trainer: Trainer) -> None:
    """End the run of a Trainer: strategy, loops and callbacks."""
    trainer._teardown()


def logged_results(trainer: Trainer) -> tuple[ResultCollection, ResultCollection]:
    """Return what ``self.log`` has collected in the current epoch of training and of validation."""
    epoch_loop = trainer.fit_loop.epoch_loop
    return epoch_loop._results, epoch_loop.val_loop._results


def training_loaders(trainer: Trainer) -> list[Any]:
    """Return the loaders of the training loop, in the order in which the user's collection holds them."""
    combined: Any = trainer.fit_loop._combined_loader
    return combined.flattened


def update_callback_metrics(trainer: Trainer, metrics: dict[str, Tensor]) -> None:
    """Add entries to ``trainer.callback_metrics``, as if they had been logged."""
    trainer._logger_connector._callback_metrics.update(metrics)


def metric_defaults(metric: Metric) -> Iterable[str]:
    """Return the names of a metric's states."""
    return metric._defaults


def combined_mode(loader: CombinedLoader) -> Any:
    """Return how a combined loader combines its loaders, such as ``max_size_cycle``."""
    return loader._mode


def combined_iterator(mode: Any, loaders: list[Any], limits: Any) -> Any:
    """Return an iterator over several loaders, as a combined loader of that mode makes one."""
    return cast(Any, _SUPPORTED_MODES)[mode]["iterator"](loaders, limits)


def combined_position(iterator: Any) -> tuple[int, list[bool] | None]:
    """Return the number of the next batch, and which loaders have been exhausted once if the mode repeats loaders."""
    consumed = getattr(iterator, "_consumed", None)
    return getattr(iterator, "_idx", 0), None if consumed is None else list(consumed)


def set_combined_position(iterator: Any, index: int, consumed: list[bool] | None) -> None:
    """Set what :func:`combined_position` returned."""
    iterator._idx = index
    if consumed is not None:
        iterator._consumed = list(consumed)


def wrapped_sampler(sampler: DatasetSamplerWrapper) -> Any:
    """Return the user's sampler, which Lightning divides among processes."""
    return cast(Any, sampler)._sampler


# The command line


def type_of_argument(action: Any) -> Any:
    """Return the type that an argument of a ``jsonargparse`` parser declares, or ``None``."""
    return getattr(action, "_typehint", None)


# Models


def set_device(model: LightningModule, device: torch.device) -> None:
    """Set what ``self.device`` returns, for a replica that was not moved by ``to``."""
    model._device = device


def example_batch_of(model: LightningModule) -> Any:
    """Return ``example_input_array`` after the hooks and the move to the device that a batch goes through."""
    return model._apply_batch_transfer_handler(model._on_before_batch_transfer(model.example_input_array))


def forward_cache(metric: Metric) -> Any:
    """Return the value of a metric for the batch that it was called with last."""
    return metric._forward_cache


def set_forward_cache(metric: Metric, value: Any) -> None:
    """Replace what :func:`forward_cache` returns."""
    metric._forward_cache = value


# Callbacks and loggers


def averaged_model(callback: WeightAveraging | StochasticWeightAveraging) -> nn.Module | None:
    """Return the copy of the model in which a callback keeps the average of weights, once there is one."""
    average = callback._average_model
    return average.module if isinstance(average, AveragedModel) else average


def forget_update_epoch(callback: WeightAveraging) -> None:
    """Make a callback forget in which epoch it updated its average last; otherwise it skips epochs that repeat."""
    callback._latest_update_epoch = -1


def forget_saved_step(callback: ModelCheckpoint) -> None:
    """Make a callback forget at which step it saved last; otherwise it does not save at that step again."""
    callback._last_global_step_saved = 0


def searches_without_training(callback: LearningRateFinder | BatchSizeFinder) -> bool:
    """Return whether a ``Tuner`` uses a callback, which ends the fit when it has searched."""
    return callback._early_exit


def logs_graph(logger: TensorBoardLogger) -> bool:
    """Return whether a logger traces the model to draw it."""
    return bool(logger._log_graph)


def has_own_summary(callback: ModelSummary) -> bool:
    """Return whether a subclass makes the summary in a way of its own."""
    return type(callback)._summary is not ModelSummary._summary


def replacing_summary(summary: Callable[[Trainer, LightningModule], Any]) -> tuple[str, Callable[..., Any]]:
    """Return name and value of the attribute that makes a ``ModelSummary`` callback show another summary."""
    return "_summary", summary


def summary_depth(callback: ModelSummary) -> int:
    """Return down to which depth a summary lists modules."""
    return callback._max_depth


# The profiler of torch


class ModuleLabels:
    """The labels that ``PyTorchProfiler`` gives to modules, by hooks on each module that refer to the whole model.

    Args:
        profiler: The profiler, which labels all modules of the model unless it is told otherwise.
        model: The model.
    """

    def __init__(self, profiler: PyTorchProfiler, model: nn.Module) -> None:
        self._profiler, self._model = profiler, model

    def remove(self) -> None:
        """Remove the labels of all modules, and keep the profiler from adding them again."""
        for module in self._model.modules():
            for own in forward_hooks(module):
                for key in [key for key, hook in own.items() if _is_label(hook)]:
                    del own[key]
        self._profiler._register = self._of(lambda module: False)

    def add(self, is_labelled: Callable[[nn.Module], bool]) -> None:
        """Label some modules, if the profiler is to label any; the profiler removes the labels at its end."""
        if self._profiler._record_module_names:
            self._profiler._register = self._of(is_labelled)
            self._profiler._register.__enter__()

    def allow(self) -> None:
        """Let the profiler label all modules again, as it does at its start."""
        if isinstance(self._profiler._register, RegisterRecordFunction):
            self._profiler._register = None

    def _of(self, is_labelled: Callable[[nn.Module], bool]) -> RegisterRecordFunction:
        def named_modules() -> Iterator[tuple[str, nn.Module]]:
            return ((name, module) for name, module in self._model.named_modules() if is_labelled(module))

        return RegisterRecordFunction(cast(Any, SimpleNamespace(named_modules=named_modules)))


def _is_label(hook: Any) -> bool:
    return isinstance(hook, partial) and isinstance(getattr(hook.func, "__self__", None), RegisterRecordFunction)


def emits_nvtx(profiler: PyTorchProfiler) -> bool:
    """Return whether a profiler marks ranges for NVIDIA's tools instead of recording a trace."""
    return bool(profiler._emit_nvtx)


def exports_to_chrome(profiler: PyTorchProfiler) -> bool:
    """Return whether a profiler writes traces into files."""
    return profiler._export_to_chrome


def profile_arguments(profiler: PyTorchProfiler) -> dict[str, Any]:
    """Return the arguments that a profiler gives to ``torch.profiler.profile``."""
    return profiler._profiler_kwargs


def profile_filename(profiler: PyTorchProfiler, action_name: str | None, extension: str) -> str:
    """Return the name of a file of a profiler, made from its own file name, the action and the rank."""
    return profiler._prepare_filename(action_name=action_name, extension=extension)
