"""Decides which package of Lightning this process uses, and is the only module that uses its private names.

Lightning is published twice, as ``pytorch_lightning`` with ``lightning_fabric`` and as ``lightning`` with
``lightning.pytorch`` and ``lightning.fabric``. The two are separate copies of the same code, so a
``lightning.pytorch.LightningModule`` is not a ``pytorch_lightning.LightningModule``. When this module is imported, it
chooses the package that was imported first, or ``pytorch_lightning`` if neither was. All other modules of
``strategies`` and ``trainer`` import Lightning's names from here, and the names of its command line from
``trainer.cli.lightning_cli``.

This module also reads each private function, class or attribute of Lightning, torchmetrics and jsonargparse, in one
place. Other modules use the public names below. ``tests/unit/test_compat.py`` lists every private name with its use and
fails, with the package's version, when a name is gone. It also fails if another module imports Lightning or uses a
private name. What a subclass of one of Lightning's classes overrides, or reads from ``self``, stays in that subclass;
the same test lists it.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, update_wrapper
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torchmetrics import Metric

from strategies.common.torch_compat import forward_hooks

_FABRIC_OF = {"pytorch_lightning": "lightning_fabric", "lightning.pytorch": "lightning.fabric"}
"""The two packages, the default first, each with the package of its lower layer."""


def _decide() -> str:
    """Return the package that was imported first; if neither was, the first one that is installed."""
    imported = [name for name in sys.modules if name in _FABRIC_OF]
    installed = (name for name in _FABRIC_OF if find_spec(name.partition(".")[0]) is not None)
    return imported[0] if imported else next(installed, "pytorch_lightning")


PACKAGE = _decide()
"""The package of Lightning that this process uses: ``"pytorch_lightning"`` or ``"lightning.pytorch"``."""

if TYPE_CHECKING:
    import lightning_fabric as fabric
    import pytorch_lightning as pl
    import pytorch_lightning.overrides as _overrides
    import pytorch_lightning.plugins.io as _io
    import pytorch_lightning.trainer.connectors as _connectors
else:
    pl, fabric = import_module(PACKAGE), import_module(_FABRIC_OF[PACKAGE])
    _overrides, _io, _connectors = pl.overrides, pl.plugins.io, pl.trainer.connectors


def other_package() -> str | None:
    """Return the package of Lightning that this process does not use, if it has been imported anyway."""
    return next((name for name in _FABRIC_OF if name != PACKAGE and name in sys.modules), None)


def explain_other_package(cls: type) -> str | None:
    """Return why a class cannot be used in this process, if it derives only from classes of the other package."""
    roots = {base.__module__.partition(".")[0] for base in cls.__mro__}
    mixed = {
        name for name, fabric_name in _FABRIC_OF.items() if roots & {name.split(".")[0], fabric_name.split(".")[0]}
    }
    if not mixed or PACKAGE in mixed:
        return None
    (other,) = mixed
    return (
        f"{cls.__module__}.{cls.__qualname__} is a class of {other}, but trainer and strategies use {PACKAGE}, which "
        "this process imported first. The two packages are separate copies of Lightning, and their classes do not work "
        f"together: take all of them from one package, and for {other} import it before trainer and strategies."
    )


def check_package(*given: Any) -> None:
    """Check that objects, or the items of lists, belong to the package of Lightning that this process uses.

    Raises:
        MisconfigurationException: If the class of an object derives from the other package.
    """
    for value in given:
        for single in value if isinstance(value, list | tuple | set) else [value]:
            if (reason := explain_other_package(type(single))) is not None:
                raise MisconfigurationException(reason)


# Public names

BatchSizeFinder = pl.callbacks.BatchSizeFinder
Callback = pl.callbacks.Callback
CheckpointIO = fabric.plugins.CheckpointIO
ClosureResult = pl.loops.optimization.automatic.ClosureResult
ClusterEnvironment = fabric.plugins.ClusterEnvironment
CombinedLoader = pl.utilities.combined_loader.CombinedLoader
DummyLogger = pl.loggers.logger.DummyLogger
DoublePrecision = pl.plugins.precision.DoublePrecision
GradientAccumulationScheduler = pl.callbacks.GradientAccumulationScheduler
HalfPrecision = pl.plugins.precision.HalfPrecision
LightningDataModule = pl.LightningDataModule
LightningEnvironment = fabric.plugins.environments.LightningEnvironment
LightningModule = pl.LightningModule
LightningOptimizer = pl.core.optimizer.LightningOptimizer
MisconfigurationException = pl.utilities.exceptions.MisconfigurationException
MixedPrecision = pl.plugins.MixedPrecision
ModelCheckpoint = pl.callbacks.ModelCheckpoint
ModelPruning = pl.callbacks.ModelPruning
ModelSummary = pl.callbacks.ModelSummary
ParallelStrategy = pl.strategies.ParallelStrategy
PossibleUserWarning = fabric.utilities.warnings.PossibleUserWarning
Precision = pl.plugins.Precision
PyTorchProfiler = pl.profilers.PyTorchProfiler
RegisterRecordFunction = pl.profilers.pytorch.RegisterRecordFunction
RunningStage = pl.trainer.states.RunningStage
KubeflowEnvironment = fabric.plugins.environments.KubeflowEnvironment
LSFEnvironment = fabric.plugins.environments.LSFEnvironment
MPIEnvironment = fabric.plugins.environments.MPIEnvironment
SLURMEnvironment = fabric.plugins.environments.SLURMEnvironment
StochasticWeightAveraging = pl.callbacks.StochasticWeightAveraging
Strategy = pl.strategies.Strategy
StrategyRegistry = pl.strategies.StrategyRegistry
Summary = pl.utilities.model_summary.ModelSummary
TensorBoardLogger = pl.loggers.TensorBoardLogger
TorchCheckpointIO = fabric.plugins.TorchCheckpointIO
TorchElasticEnvironment = fabric.plugins.environments.TorchElasticEnvironment
Trainer = pl.Trainer
TrainerFn = pl.trainer.states.TrainerFn
TrainerStatus = pl.trainer.states.TrainerStatus
WeightAveraging = pl.callbacks.WeightAveraging
distributed_log = fabric.utilities.distributed.log
extract_batch_size = pl.utilities.data.extract_batch_size
get_filesystem = fabric.utilities.cloud_io.get_filesystem
is_overridden = pl.utilities.model_helpers.is_overridden
is_param_in_hook_signature = pl.utilities.signature_utils.is_param_in_hook_signature
rank_zero_info = pl.utilities.rank_zero.rank_zero_info
rank_zero_only = pl.utilities.rank_zero.rank_zero_only
rank_zero_warn = pl.utilities.rank_zero.rank_zero_warn
recursive_detach = pl.utilities.memory.recursive_detach
reset_seed = fabric.utilities.seed.reset_seed
sized_len = fabric.utilities.data.sized_len

READING_CALLBACKS: tuple[type[Callback], ...] = (
    *(ModelCheckpoint, ModelSummary, pl.callbacks.EarlyStopping, pl.callbacks.LearningRateMonitor),
    *(pl.callbacks.ProgressBar, pl.callbacks.TQDMProgressBar, pl.callbacks.RichProgressBar, pl.callbacks.Timer),
    *(pl.callbacks.RichModelSummary, pl.callbacks.DeviceStatsMonitor),
)
"""Callbacks of Lightning that change neither weights nor states of optimizers."""

GPUS_MISSING = "But your machine only has"
"""The message of Lightning about devices that its process does not see."""

# Private names

CheckpointConnector = _connectors.checkpoint_connector._CheckpointConnector
DataFetcher = pl.loops.fetchers._DataFetcher
DataLoaderIterDataFetcher = pl.loops.fetchers._DataLoaderIterDataFetcher
DataLoaderSource = _connectors.data_connector._DataLoaderSource
DatasetSamplerWrapper = fabric.utilities.distributed._DatasetSamplerWrapper
EvaluationLoop = pl.loops._EvaluationLoop
FitLoop = pl.loops.fit_loop._FitLoop
Launcher = pl.strategies.launchers.launcher._Launcher
LoggerConnector = _connectors.logger_connector._LoggerConnector
MultiProcessingLauncher = pl.strategies.launchers._MultiProcessingLauncher
PrefetchDataFetcher = pl.loops.fetchers._PrefetchDataFetcher
ResultCollection = _connectors.logger_connector.result._ResultCollection
ResultMetadata = _connectors.logger_connector.result._Metadata
ResultMetric = _connectors.logger_connector.result._ResultMetric
ResultSync = _connectors.logger_connector.result._Sync
Stateful = fabric.utilities.types._Stateful
SubprocessScriptLauncher = pl.strategies.launchers._SubprocessScriptLauncher
TrainingEpochLoop = pl.loops.training_epoch_loop._TrainingEpochLoop
WrappingCheckpointIO = _io.wrapper._WrappingCheckpointIO
collect_rng_states = fabric.utilities.seed._collect_rng_states
defaults_from_env_vars = pl.utilities.argparse._defaults_from_env_vars
destroy_dist_connection = fabric.utilities.distributed._destroy_dist_connection
distributed_is_initialized = fabric.utilities.distributed._distributed_is_initialized
init_dist_connection = fabric.utilities.distributed._init_dist_connection
optimizers_to_device = fabric.utilities.optimizer._optimizers_to_device
register_ddp_comm_hook = _overrides.distributed._register_ddp_comm_hook
set_num_threads_if_needed = fabric.utilities.distributed._set_num_threads_if_needed
set_rng_states = fabric.utilities.seed._set_rng_states
shutdown_workers_and_reset_iterator = pl.utilities.combined_loader._shutdown_workers_and_reset_iterator
sync_ddp_if_available = fabric.utilities.distributed._sync_ddp_if_available
sync_module_states = _overrides.distributed._sync_module_states


# Optimizers


def unwrapped(optimizer: Optimizer | LightningOptimizer) -> Optimizer:
    """Return the user's optimizer inside Lightning's wrapper, or the optimizer itself if it is not wrapped."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def is_stand_in(optimizer: Optimizer | LightningOptimizer) -> bool:
    """Return whether Lightning made this optimizer because ``configure_optimizers`` returned ``None``."""
    return isinstance(unwrapped(optimizer), pl.core.optimizer._MockOptimizer)


# Strategies


def start_method_of(strategy: Strategy) -> str:
    """Return how a strategy starts its processes; strategies without this setting run the script again."""
    return getattr(strategy, "_start_method", "popen")


def given_backend_of(strategy: Strategy) -> str | None:
    """Return the backend of the process group that the user has asked for, if any."""
    return getattr(strategy, "_process_group_backend", None)


def backend_of(strategy: Strategy) -> str:
    """Return the backend of a strategy's process group; strategies without this setting use gloo."""
    get = getattr(strategy, "_get_process_group_backend", None)
    return "gloo" if get is None else get()


# Trainer and loops


trainer_of = attrgetter("_trainer")
"""Returns the Trainer of a model, or ``None``."""


def run_stage_function() -> Callable[..., Any]:
    """Return the function of the Trainer that runs the loops, after the Trainer has set up the run."""
    return Trainer._run_stage


def copy_of(model: LightningModule) -> LightningModule:
    """Return a deep copy of a model, without the Trainer to which it is attached.

    Partial functions that are methods of the model refer to the copy as well, such as the ``configure_optimizers`` of
    ``LightningCLI``, which holds an optimizer over the parameters.
    """
    memo: dict[int, Any] = {}
    own, model.trainer = model._trainer, None
    try:
        copied = copy.deepcopy(model, memo)
        for name, method in vars(model).items():
            if isinstance(method, MethodType) and isinstance(held := method.__func__, partial):
                args, keywords = copy.deepcopy((held.args, held.keywords), memo)
                function = partial(held.func, *args, **keywords)
                vars(copied)[name] = MethodType(update_wrapper(function, held), copied)
        return copied
    finally:
        model.trainer = own


@contextmanager
def attached(trainer: Trainer, model: LightningModule, data: Any = None) -> Iterator[None]:
    """Context that attaches a model and its data to a Trainer as at the start of ``fit``; loggers do nothing in it.

    ``self.trainer`` then works in the model, with ``self.trainer.estimated_stepping_batches``. On exit, the Trainer
    gets its earlier state back.

    Args:
        trainer: The Trainer.
        model: The model.
        data: A data module, or loaders of training batches.
    """
    strategy, is_module = trainer.strategy, isinstance(data, LightningDataModule)
    of_strategy = strategy._lightning_module, strategy.model, strategy.optimizers, strategy.lr_scheduler_configs
    untyped: Any = trainer
    of_trainer, of_model = (untyped.datamodule, trainer.loggers), model._trainer
    of_data = data.trainer if is_module else None
    connect(trainer, model)
    loaders = {"datamodule": data} if is_module else {"train_dataloaders": data}
    trainer._data_connector.attach_data(model, **loaders)
    trainer.loggers = [DummyLogger() for _ in trainer.loggers]
    try:
        yield
    finally:
        trainer.fit_loop.teardown()
        trainer.fit_loop._combined_loader = None
        strategy._lightning_module, strategy.model, strategy.optimizers, strategy.lr_scheduler_configs = of_strategy
        untyped.datamodule, trainer.loggers = of_trainer
        model.trainer = of_model
        if is_module:
            data.trainer = of_data


def connect(trainer: Trainer, model: LightningModule) -> None:
    """Set the model of a Trainer and of its strategy."""
    trainer.strategy.connect(model)
    model.trainer = trainer


def takes_batch_idx(model: LightningModule) -> bool:
    """Return whether Lightning passes the number of the batch to ``training_step`` of a model."""
    return bool(is_param_in_hook_signature(model.training_step, "batch_idx", min_args=2))


def takes_iterator(model: LightningModule) -> bool:
    """Return whether ``training_step`` of a model takes batches from an iterator itself."""
    return bool(is_param_in_hook_signature(model.training_step, "dataloader_iter", explicit=True))


def transferred(trainer: Trainer, model: LightningModule, batch: Any, device: torch.device) -> Any:
    """Return a training batch in its precision and on a device, after the model's transfer hooks have run."""
    batch = model._on_before_batch_transfer(trainer.precision_plugin.convert_input(batch), dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, device, dataloader_idx=0)


def logged_step(trainer: Trainer) -> int:
    """Return the step at which ``self.log`` logs: the number of batches after which optimizers have stepped."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def is_accumulating(trainer: Trainer) -> bool:
    """Return whether the gradients of this batch are accumulated for the next batch, so that nothing is logged yet."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


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
    """Return an iterator over several loaders, as a combined loader of this mode makes it."""
    return cast(Any, pl.utilities.combined_loader._SUPPORTED_MODES)[mode]["iterator"](loaders, limits)


def combined_position(iterator: Any) -> tuple[int, list[bool] | None]:
    """Return the number of the next batch and, if the mode repeats loaders, which of them have been exhausted once."""
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
    """Return ``example_input_array`` after the transfer hooks and the move to the device, as for a batch."""
    return model._apply_batch_transfer_handler(model._on_before_batch_transfer(model.example_input_array))


def forward_cache(metric: Metric) -> Any:
    """Return the value of a metric for the last batch with which it was called."""
    return metric._forward_cache


def set_forward_cache(metric: Metric, value: Any) -> None:
    """Replace what :func:`forward_cache` returns."""
    metric._forward_cache = value


# Callbacks and loggers


def averaged_model(callback: WeightAveraging | StochasticWeightAveraging) -> nn.Module | None:
    """Return the copy of the model in which a callback keeps the average of weights; ``None`` before it exists."""
    average = callback._average_model
    return average.module if isinstance(average, AveragedModel) else average


def forget_validation(loop: EvaluationLoop) -> None:
    """Make a loop forget that it has run; otherwise an epoch loop that resumes skips the validation that is due."""
    loop._has_run = False


def logs_graph(logger: TensorBoardLogger) -> bool:
    """Return whether a logger traces the model to draw it."""
    return bool(logger._log_graph)


def has_own_summary(callback: ModelSummary) -> bool:
    """Return whether a subclass overrides how the summary is made."""
    return type(callback)._summary is not ModelSummary._summary


def replacing_summary(summary: Callable[[Trainer, LightningModule], Any]) -> tuple[str, Callable[..., Any]]:
    """Return name and value of the attribute that makes a ``ModelSummary`` callback show a different summary."""
    return "_summary", summary


def summary_depth(callback: ModelSummary) -> int:
    """Return the depth down to which a summary lists modules."""
    return callback._max_depth


# Signals


def slurm_handler(trainer: Trainer) -> Callable[..., None]:
    """Return Lightning's handler of SLURM's signal, which saves a checkpoint and puts the job back into the queue."""
    return trainer._signal_connector._slurm_sigusr_handler_fn


def replacing_slurm_handler(trainer: Trainer, handler: Callable[..., None]) -> tuple[Any, str, Callable[..., None]]:
    """Return object, name and value of the attribute that makes Lightning register another handler instead."""
    return trainer._signal_connector, "_slurm_sigusr_handler_fn", handler


# The profiler of torch


class ModuleLabels:
    """The labels that ``PyTorchProfiler`` gives to modules, by hooks on each module that refer to the whole model.

    Args:
        profiler: The profiler, which labels all modules of the model by default.
        model: The model.
    """

    def __init__(self, profiler: PyTorchProfiler, model: nn.Module) -> None:
        self._profiler, self._model = profiler, model
        self._none = self._of(lambda module: False)

    def remove(self) -> None:
        """Remove the labels of all modules, and keep the profiler from adding them again."""
        for module in self._model.modules():
            for own in forward_hooks(module):
                for key in [key for key, hook in own.items() if _is_label(hook)]:
                    del own[key]
        self._profiler._register = self._none

    def add(self, is_labelled: Callable[[nn.Module], bool]) -> None:
        """Label some modules, if the profiler is to label any; the profiler removes the labels at its end."""
        if self._profiler._record_module_names:
            self._profiler._register = self._of(is_labelled)
            self._profiler._register.__enter__()

    def allow(self) -> None:
        """After :meth:`remove`, let the profiler label all modules again, as it does at its start.

        This has no effect if modules have been labelled since.
        """
        if self._profiler._register is self._none:
            self._profiler._register = None

    def _of(self, is_labelled: Callable[[nn.Module], bool]) -> RegisterRecordFunction:
        def named_modules() -> Iterator[tuple[str, nn.Module]]:
            return ((name, module) for name, module in self._model.named_modules() if is_labelled(module))

        return RegisterRecordFunction(cast(Any, SimpleNamespace(named_modules=named_modules)))


def _is_label(hook: Any) -> bool:
    return isinstance(hook, partial) and isinstance(getattr(hook.func, "__self__", None), RegisterRecordFunction)


def emits_nvtx(profiler: PyTorchProfiler) -> bool:
    """Return whether a profiler marks ranges for NVIDIA's tools instead of writing a trace."""
    return bool(profiler._emit_nvtx)


def exports_to_chrome(profiler: PyTorchProfiler) -> bool:
    """Return whether a profiler writes traces into files."""
    return profiler._export_to_chrome


def profile_arguments(profiler: PyTorchProfiler) -> dict[str, Any]:
    """Return the arguments that a profiler gives to ``torch.profiler.profile``."""
    return profiler._profiler_kwargs


def profile_filename(profiler: PyTorchProfiler, action_name: str | None, extension: str) -> str:
    """Return the name of a file of a profiler, made from the profiler's file name, the action and the rank."""
    return profiler._prepare_filename(action_name=action_name, extension=extension)
