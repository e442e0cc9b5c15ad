"""What cannot be done (yet), each said in one message before it could go wrong."""

from collections.abc import Mapping
from typing import Any

from lightning_fabric.utilities.data import sized_len
from pytorch_lightning import LightningModule
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.plugins import ClusterEnvironment
from pytorch_lightning.plugins.environments import LightningEnvironment
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import nn

from strategies.checkpoint.store import STATE_DICT_TYPES
from strategies.common.names import did_you_mean
from strategies.common.torch_compat import BatchNorm
from strategies.pipeline.executor.settings import Settings

_RESTART_OUTSIDE = (
    "Leave it out, start the run with torchrun --max-restarts, have ModelCheckpoint(dirpath=..., save_last=True) keep "
    'checkpoints, and call fit(ckpt_path="last").'
)


def check_state_dict_type(state_dict_type: str, checkpoint_io: object | None) -> None:
    """Checks in which form checkpoints are to be written.

    Raises:
        MisconfigurationException: If there is no such form, or if it goes past the user's plug-in.
    """
    if state_dict_type not in STATE_DICT_TYPES:
        raise MisconfigurationException(
            f"Unknown state_dict_type {state_dict_type!r}{did_you_mean(str(state_dict_type), STATE_DICT_TYPES)}"
        )
    if state_dict_type == "sharded" and checkpoint_io is not None:
        raise MisconfigurationException(
            f'state_dict_type="sharded" does not write through a CheckpointIO; leave out {checkpoint_io!r}.'
        )


def check_counts(number: int, divides_states: bool, max_restarts: int) -> None:
    """Checks how many pipelines there are to be, and how often one may be restarted.

    Raises:
        MisconfigurationException: If there cannot be so many, or they cannot do that.
    """
    for name, value, least in (("data_parallel_size", number, 1), ("max_restarts", max_restarts, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise MisconfigurationException(f"{name} must be a whole number of at least {least}, got {value!r}.")
    if divides_states and number == 1:
        raise MisconfigurationException(
            "shard_optimizer_states=True divides the states of a stage among its replicas, but there is one only: "
            "set data_parallel_size to 2 or more, or leave it out."
        )
    if max_restarts and number > 1:
        raise MisconfigurationException(
            f"max_restarts={max_restarts} is for one pipeline, but data_parallel_size={number}. {_RESTART_OUTSIDE}"
        )


def check_restarts(is_external: bool) -> None:
    """Checks that the strategy itself starts the processes that it is to start anew.

    Raises:
        MisconfigurationException: If somebody else does.
    """
    if is_external:
        raise MisconfigurationException(
            "max_restarts is for workers that the strategy starts; these have been started from outside. "
            + _RESTART_OUTSIDE
        )


def check_restarted_callbacks(trainer: Any) -> None:
    """Checks that a run may be restarted as far as its callbacks go; a Tuner's search is not such a run.

    Raises:
        MisconfigurationException: If one does.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, LearningRateFinder | BatchSizeFinder) and not callback._early_exit:
            raise MisconfigurationException(
                f"{type(callback).__name__} trains and goes back within fit, so a restart would not know where it is. "
                "Leave max_restarts out, or search with pytorch_lightning.tuner.Tuner first."
            )
        if isinstance(callback, StochasticWeightAveraging):
            raise MisconfigurationException(
                f"{type(callback).__name__} keeps how far it is in attributes that loading a checkpoint does not take "
                f"back within one process, so max_restarts cannot restart it. {_RESTART_OUTSIDE} Or use "
                "WeightAveraging or EMAWeightAveraging."
            )


def check_launch(environment: ClusterEnvironment, num_devices: int, num_nodes: int, num_replicas: int) -> None:
    """Checks that the processes that are there, or will be, are those that the Trainer's arguments say.

    Args:
        environment: Tells of processes that have been started from outside.
        num_devices: Those of each host.
        num_nodes: Number of hosts.
        num_replicas: Among how many pipelines they are to be divided.

    Raises:
        MisconfigurationException: If they are not, or cannot be divided.
    """
    number = num_devices * num_nodes
    if is_external(environment):
        if environment.world_size() != number:
            raise MisconfigurationException(
                f"{type(environment).__name__} has started {environment.world_size()} processes, but the Trainer's "
                f"devices={num_devices} on each of num_nodes={num_nodes} hosts make {number}; set devices to the "
                "number of processes on each host, and num_nodes to that of hosts."
            )
        if ":" in environment.main_address:
            raise MisconfigurationException(
                f"MASTER_ADDR is the IPv6 address {environment.main_address}; give an IPv4 address or a host name."
            )
    elif num_replicas > 1 and environment.creates_processes_externally and not _is_ours(environment):
        raise MisconfigurationException(
            f"data_parallel_size={num_replicas}, but {type(environment).__name__} has started a single process: have "
            f"it start all {number}."
        )
    elif num_nodes > 1:
        raise MisconfigurationException(
            f"RPCSequentialStrategy starts processes on its own host only, got num_nodes={num_nodes}. Start the ranks "
            f"of all hosts with torchrun (--nnodes={num_nodes} --nproc-per-node={num_devices}) or SLURM."
        )
    if number % num_replicas:
        raise MisconfigurationException(
            f"data_parallel_size={num_replicas} replicas cannot divide {number} devices evenly among them; set "
            f"devices to {num_replicas} times the number of stages."
        )


def is_external(environment: ClusterEnvironment) -> bool:
    """Whether several processes have been started from outside, by torchrun for instance."""
    ours = _is_ours(environment)
    return not ours and environment.creates_processes_externally and environment.world_size() > 1


def _is_ours(environment: ClusterEnvironment) -> bool:
    """Whether Lightning starts the processes; that of a replica then looks as if it came from outside."""
    return isinstance(environment, LightningEnvironment)


def check_callbacks(trainer: Any) -> None:
    """Checks that no callback prunes weights, which it would do on the driver's stage alone.

    Raises:
        MisconfigurationException: If one does.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, ModelPruning):
            raise MisconfigurationException(
                f"RPCSequentialStrategy does not support {type(callback).__name__} yet: it would work on the weights "
                "of the last stage only. Leave it out."
            )


def check_automatic_optimization(model: LightningModule, schedule: str) -> None:
    """Checks that Lightning makes the steps, if the schedule runs ``training_step`` once per micro-batch.

    Raises:
        MisconfigurationException: If the model makes them itself.
    """
    if schedule != "gpipe" and not model.automatic_optimization:
        raise MisconfigurationException(
            f"schedule={schedule!r} runs training_step once per micro-batch, so manual optimization would step after "
            "each of them. Use schedule='gpipe', or automatic optimization."
        )


def check_loggers(trainer: Any) -> None:
    """Checks that no logger wants to trace the model, which would see the driver's stage alone.

    Raises:
        MisconfigurationException: If one does.
    """
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger) and logger._log_graph:
            raise MisconfigurationException(
                f"{type(logger).__name__}(log_graph=True) traces the model in one process, and its layers live in "
                "several. Leave log_graph out; the model summary shows which layer is where."
            )


def check_deferred_batch_norm(settings: Settings, norms: Mapping[str, BatchNorm], path: str) -> None:
    """Checks that ``deferred_batch_norm`` has something to defer.

    Raises:
        MisconfigurationException: If not.
    """
    if settings.deferred_batch_norm and not norms:
        raise MisconfigurationException(
            f"deferred_batch_norm=True has no effect: {path} has no BatchNorm layer. Leave it out."
        )


def warn_of_batch_norm(model: LightningModule, norms: Mapping[str, BatchNorm], settings: Settings) -> bool:
    """Warns if a BatchNorm layer trains on statistics of micro-batches instead of those of the batch.

    One in evaluation mode normalises by its running statistics, as in one process.

    Args:
        model: The model, about to make a training step.
        norms: The BatchNorm layers of its pipelined part, by their names in the model.
        settings: How the pipeline runs.

    Returns:
        Whether it has warned.
    """
    if settings.microbatches == 1:
        return False
    active = [(name, norm) for name, norm in norms.items() if norm.training or norm.running_mean is None]
    if not active:
        return False
    name, first = active[0]
    more = f" (the first of {len(active)} such layers)" if len(active) > 1 else ""
    statistics = ""
    if any(norm.running_mean is not None for _, norm in active):
        statistics = (
            " Running statistics are updated once per batch, from all its rows (deferred_batch_norm=True)."
            if settings.deferred_batch_norm
            else " Running statistics are updated once per micro-batch; deferred_batch_norm=True updates them once per "
            "batch, from all its rows, and changes nothing else."
        )
    rows = smallest_batch(model.trainer)
    one_row = ""
    if rows is not None and rows < 2 * settings.microbatches:
        one_row = (
            f" The smallest batch of the training data has {rows} rows, so some micro-batches have a single row, for "
            f"which {type(first).__name__} raises an error if a row has one value per channel: set microbatches to at "
            f"most {max(1, rows // 2)}, or use larger batches (drop_last=True, if only the last one is so small)."
        )
    rank_zero_warn(
        f"Layer {name}, a {type(first).__name__}{more}, normalises each of the microbatches={settings.microbatches} "
        "parts of a batch by itself in training, where one process normalises the whole batch: losses and gradients "
        f"differ from those of one process.{statistics} microbatches=1 trains as one process does.{one_row}"
    )
    return True


def smallest_batch(trainer: Any) -> int | None:
    """The number of rows of the smallest batch that the training loaders give in an epoch, as far as they tell it."""
    sizes = []
    for loader in trainer.fit_loop._combined_loader.flattened:
        sampler = getattr(loader, "batch_sampler", None)
        size, drop_last = getattr(sampler, "batch_size", None), getattr(sampler, "drop_last", True)
        if not isinstance(size, int):
            continue
        whole, rest = divmod(sized_len(getattr(sampler, "sampler", None)) or 0, size)
        sizes.append(rest if rest and not drop_last and trainer.num_training_batches > whole else size)
    return min(sizes, default=None)


def warn_of_time_first(module: nn.Sequential, path: str) -> None:
    """Warns if a layer takes time as the first dimension, which a pipeline splits as the batch."""
    for name, layer in module.named_children():
        if getattr(getattr(layer, "self_attn", layer), "batch_first", True) is False:
            rank_zero_warn(
                f"Layer {name} of {path}, a {type(layer).__name__}, has batch_first=False, so its first dimension "
                "is time; a pipeline splits the first dimension into micro-batches. Give it batch_first=True."
            )
            return
