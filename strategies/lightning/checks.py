"""Checks of settings, models and callbacks, each made before any process starts and reported in one message."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from strategies.checkpoint.store import STATE_DICT_TYPES
from strategies.common.errors import RemoteTraceback
from strategies.common.names import did_you_mean
from strategies.common.torch_compat import BatchNorm
from strategies.lightning.compat import (
    GPUS_MISSING,
    ClusterEnvironment,
    LightningEnvironment,
    LightningModule,
    MisconfigurationException,
    ModelPruning,
    Precision,
    PyTorchProfiler,
    SLURMEnvironment,
    StochasticWeightAveraging,
    TensorBoardLogger,
    TorchElasticEnvironment,
    WeightAveraging,
    logs_graph,
    rank_zero_warn,
    sized_len,
    training_loaders,
)
from strategies.pipeline.executor.settings import ScheduleChoice, Settings
from strategies.pipeline.recovery.repairs import RecoverySettings
from strategies.pipeline.state.snapshots import check_snapshots


@contextmanager
def as_misconfiguration() -> Iterator[None]:
    """Turn the engine's errors about a user's settings into Lightning's ``MisconfigurationException``.

    An error that a layer has raised in another process stays as it is.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        if isinstance(error.__cause__, RemoteTraceback):
            raise
        raise MisconfigurationException(str(error)) from error


def check_state_dict_type(state_dict_type: str, checkpoint_io: object | None) -> None:
    """Check the form in which checkpoints are written.

    Raises:
        MisconfigurationException: If there is no such form, or if the form does not use the user's ``CheckpointIO``.
    """
    if state_dict_type not in STATE_DICT_TYPES:
        raise MisconfigurationException(
            f"Unknown state_dict_type {state_dict_type!r}{did_you_mean(str(state_dict_type), STATE_DICT_TYPES)}"
        )
    if state_dict_type == "sharded" and checkpoint_io is not None:
        raise MisconfigurationException(
            f'state_dict_type="sharded" does not write through a CheckpointIO; leave out {checkpoint_io!r}.'
        )


def check_replicas(number: int, divides_states: bool) -> None:
    """Check the number of pipelines.

    Args:
        number: ``data_parallel_size``.
        divides_states: ``shard_optimizer_states``.

    Raises:
        MisconfigurationException: If the number is too small, or if these settings exclude each other.
    """
    _check_whole_number("data_parallel_size", number, 1)
    if divides_states and number == 1:
        raise MisconfigurationException(
            "shard_optimizer_states=True divides the states of a stage among its replicas, but there is only one: "
            "set data_parallel_size to 2 or more, or leave shard_optimizer_states out."
        )


def _check_whole_number(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise MisconfigurationException(f"{name} must be a whole number of at least {least}, got {value!r}.")


def checked_recovery(
    max_restarts: int, snapshot_every_n_steps: int, verify_every_n_steps: int
) -> RecoverySettings | None:
    """Return how lost workers are repaired and which steps are verified.

    Returns:
        The settings; ``None`` if lost workers are not repaired and no steps are verified.

    Raises:
        MisconfigurationException: If a number is wrong, if ``snapshot_every_n_steps`` has no effect, or if this system
            cannot take snapshots.
    """
    _check_whole_number("max_restarts", max_restarts, 0)
    _check_whole_number("snapshot_every_n_steps", snapshot_every_n_steps, 1)
    _check_whole_number("verify_every_n_steps", verify_every_n_steps, 0)
    if snapshot_every_n_steps != 1 and not max_restarts:
        raise MisconfigurationException(
            f"snapshot_every_n_steps={snapshot_every_n_steps} has no effect with max_restarts=0, because lost workers "
            "are not repaired: set max_restarts to 1 or more, or leave snapshot_every_n_steps out."
        )
    if not (max_restarts or verify_every_n_steps):
        return None
    check_repairs(devices=[], num_hosts=1)
    return RecoverySettings(max_restarts, snapshot_every_n_steps, verify_every_n_steps)


def check_repairs(*, devices: Sequence[torch.device], num_hosts: int) -> None:
    """Check that lost workers can be repaired, and steps verified, on these devices.

    Args:
        devices: The devices of the stages.
        num_hosts: Number of hosts with stages.

    Raises:
        MisconfigurationException: If they cannot.
    """
    try:
        check_snapshots(devices=devices, num_hosts=num_hosts)
    except ValueError as error:
        raise MisconfigurationException(
            f"max_restarts and verify_every_n_steps repeat computation from snapshots, but {error}"
        ) from error


def check_repairs_of_run(trainer: Any, *, num_stages: int) -> None:
    """Check that lost workers can be repaired, and steps verified, in a run; warn if it has no workers.

    Args:
        trainer: The Trainer.
        num_stages: Number of stages of the pipeline.

    Raises:
        MisconfigurationException: If they cannot.
    """
    if num_stages == 1:
        rank_zero_warn(
            "max_restarts and verify_every_n_steps have no effect with a single stage, which the driver itself runs, "
            "because there is no worker that could be lost or compute wrongly. Set devices to 2 or more."
        )
    elif isinstance(trainer.profiler, PyTorchProfiler):
        raise MisconfigurationException(
            "max_restarts and verify_every_n_steps run steps again, of which PyTorchProfiler would lose or repeat the "
            "traces. Leave them or the profiler out."
        )


def check_loss_weight(loss_weight: str, settings: Settings) -> None:
    """Check that ``loss_weight="tokens"`` has an effect.

    Args:
        loss_weight: The setting.
        settings: Settings of the pipeline.

    Raises:
        MisconfigurationException: If ``training_step`` runs once for the whole batch.
    """
    if loss_weight == "tokens" and not settings.interleaves:
        raise MisconfigurationException(
            f"loss_weight='tokens' weights micro-batches, but under schedule={settings.schedule!r} training_step "
            "computes one loss for the whole batch, which may be a mean over its tokens. Leave loss_weight out, or use "
            "schedule='1f1b'."
        )


def check_launch(environment: ClusterEnvironment, num_devices: int, num_nodes: int, num_replicas: int) -> None:
    """Check that the number of processes agrees with the Trainer's arguments.

    Args:
        environment: Tells whether processes have been started from outside, and how many.
        num_devices: Number of devices of each host.
        num_nodes: Number of hosts.
        num_replicas: Number of pipelines among which the devices are divided.

    Raises:
        MisconfigurationException: If it does not, or if the devices cannot be divided evenly.
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
            f"data_parallel_size={num_replicas}, but {type(environment).__name__} has started a single process; start "
            f"all {number} of them."
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


def check_visible_gpus(environment: ClusterEnvironment, devices: Sequence[torch.device], num_nodes: int) -> None:
    """Check that a rank that a launcher has started sees all GPUs of its host.

    The first rank of a host has its first device, the second rank the second one, and so on.

    Args:
        environment: Tells how many processes have been started.
        devices: The devices of this host.
        num_nodes: Number of hosts.

    Raises:
        MisconfigurationException: If the rank sees only some of them.
    """
    indices = [device.index or 0 for device in devices if device.type == "cuda"]
    if not indices:
        return
    num_visible, num_local = torch.cuda.device_count(), environment.world_size() // num_nodes
    if max(indices) >= num_visible or len(devices) == num_visible < num_local:
        raise MisconfigurationException(_visible_gpus(num_visible, num_local))


def check_numbering(environment: ClusterEnvironment, num_local: int) -> None:
    """Check that a launcher has numbered the ranks host by host, which tells the stages of a host and their devices.

    Args:
        environment: Tells the number of this rank in all, and on its host.
        num_local: Number of ranks of each host.

    Raises:
        MisconfigurationException: If the ranks are numbered in another way, such as in turn on each host.
    """
    rank, local_rank = environment.global_rank(), environment.local_rank()
    if local_rank != rank % num_local:
        raise MisconfigurationException(
            f"{type(environment).__name__} has given the number {local_rank} on its host to rank {rank}, which with "
            f"{num_local} ranks on each host must have the number {rank % num_local}: ranks 0 to {num_local - 1} "
            "belong on the first host, the next ones on the second, and so on, or ranks would share a device. Under "
            "SLURM, use --distribution=block and the same --ntasks-per-node for all hosts."
        )


def explained_gpus(error: MisconfigurationException, num_nodes: int) -> MisconfigurationException:
    """Return the error of a Trainer that asks for more GPUs than its process sees, with the way out under a launcher.

    Under SLURM, Lightning refuses such devices before it asks the strategy.
    """
    if GPUS_MISSING not in str(error):
        return error
    launchers = [environment for environment in (TorchElasticEnvironment, SLURMEnvironment) if environment.detect()]
    num_local = launchers[0]().world_size() // num_nodes if launchers else 1
    if num_local == 1:
        return error
    return MisconfigurationException(f"{error}\n{_visible_gpus(torch.cuda.device_count(), num_local)}")


def _visible_gpus(num_visible: int, num_local: int) -> str:
    return (
        f"This rank sees {num_visible} GPU{'' if num_visible == 1 else 's'}, but {num_local} ranks of this host need "
        "one each, and each rank must see those of all: rank r of a host uses cuda:r. Under SLURM, use "
        f"--gpus-per-node={num_local} (and --gpu-bind=none) instead of --gpus-per-task=1; under torchrun and others, "
        "set CUDA_VISIBLE_DEVICES to one list for all ranks of a host, or not at all. For stages that share a GPU, "
        f"leave devices out and set RPCSequentialStrategy(parallel_devices=[torch.device('cuda:0')] * {num_local})."
    )


def is_external(environment: ClusterEnvironment) -> bool:
    """Return whether several processes have been started from outside, for instance by torchrun."""
    ours = _is_ours(environment)
    return not ours and environment.creates_processes_externally and environment.world_size() > 1


def _is_ours(environment: ClusterEnvironment) -> bool:
    """Return whether Lightning starts the processes; a process that it has started looks external otherwise."""
    return isinstance(environment, LightningEnvironment) and not _counts_ranks_itself(environment)


def _counts_ranks_itself(environment: ClusterEnvironment) -> bool:
    """Return whether an environment is a variant of Lightning's that counts ranks itself, as Ray Train's does."""
    counts = type(environment).world_size is not LightningEnvironment.world_size
    return isinstance(environment, LightningEnvironment) and counts


def check_environment(environment: ClusterEnvironment) -> None:
    """Check that the ranks of a pipeline may become workers, where something other than Lightning has started them.

    Args:
        environment: Tells who has started the ranks.

    Raises:
        MisconfigurationException: If it is a variant of Lightning's environment that knows of several ranks.
    """
    if _counts_ranks_itself(environment) and (number := environment.world_size()) > 1:
        name = f"{type(environment).__module__}.{type(environment).__qualname__}"
        raise MisconfigurationException(
            f"{name} says that {number} ranks have been started, by something other than torchrun, SLURM or MPI; a "
            'pipeline cannot have them as its workers. Start the ranks with one of these, or use strategy="ddp" or '
            '"zero", which train in the processes that there are.'
        )


def check_callbacks(trainer: Any) -> None:
    """Check that no callback prunes weights, because it would prune those of the driver's stage only.

    Raises:
        MisconfigurationException: If a callback does.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, ModelPruning):
            raise MisconfigurationException(
                f"RPCSequentialStrategy does not support {type(callback).__name__} yet: it would prune the weights "
                "of the last stage only. Leave it out."
            )


def check_automatic_optimization(model: LightningModule, schedule: ScheduleChoice) -> None:
    """Check that optimization is automatic if the schedule runs ``training_step`` once per micro-batch.

    Raises:
        MisconfigurationException: If the model steps its optimizers itself.
    """
    if schedule != "gpipe" and not model.automatic_optimization:
        raise MisconfigurationException(
            f"schedule={schedule!r} runs training_step once per micro-batch, so manual optimization would step after "
            "each of them. Use schedule='gpipe', or automatic optimization."
        )


def check_repeatable(model: LightningModule) -> None:
    """Check that the code of ``training_step`` can run a second time for the same batch.

    Raises:
        RuntimeError: If a module has an iterator, such as one over a second loader, which a second call would advance.
    """
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Iterator):
                raise RuntimeError(
                    f"{'.'.join(filter(None, [path, name]))} is an iterator ({type(value).__name__}), which a second "
                    "call of training_step would advance; call the blocks in the forward of a module instead"
                )


def check_layer_drop(model: nn.Module, path: str) -> None:
    """Refuse a model that skips blocks at random in training (LayerDrop: Fan et al., 2020, arXiv:1909.11556).

    Args:
        model: The model.
        path: Path of the blocks. The probability is an attribute of the module around them, or of its configuration.

    Raises:
        MisconfigurationException: If the probability is not 0.
    """
    parent = path.rpartition(".")[0]
    owner: Any = attrgetter(parent)(model) if parent else model
    where = "layerdrop" if hasattr(owner, "layerdrop") else "config.layerdrop"
    try:
        probability = attrgetter(where)(owner)
    except AttributeError:
        return
    if isinstance(probability, int | float) and probability > 0:
        raise MisconfigurationException(
            f"{type(model).__name__}.{parent} skips blocks at random in training ({where} is {probability}), but a "
            f"pipeline runs every block. Set {parent}.{where} = 0."
        )


def check_loggers(trainer: Any) -> None:
    """Check that no logger traces the model, because a trace would contain the driver's stage only.

    Raises:
        MisconfigurationException: If a logger does.
    """
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger) and logs_graph(logger):
            raise MisconfigurationException(
                f"{type(logger).__name__}(log_graph=True) traces the model in one process, but its layers are in "
                "several. Leave log_graph out; the model summary shows which layer is where."
            )


def check_deferred_batch_norm(settings: Settings, norms: Mapping[str, BatchNorm], path: str) -> None:
    """Check that ``deferred_batch_norm=True`` has an effect.

    Args:
        settings: Settings of the pipeline.
        norms: BatchNorm layers of the pipelined part, by name.
        path: Dotted path of the pipelined part.

    Raises:
        MisconfigurationException: If there is no BatchNorm layer.
    """
    if settings.deferred_batch_norm and not norms:
        raise MisconfigurationException(
            f"deferred_batch_norm=True has no effect: {path} has no BatchNorm layer. Leave it out."
        )


def warn_of_batch_norm(model: LightningModule, norms: Mapping[str, BatchNorm], settings: Settings) -> bool:
    """Warn if a BatchNorm layer normalises by statistics of micro-batches instead of those of the batch.

    A BatchNorm layer in evaluation mode normalises by its running statistics, as in one process.

    Args:
        model: The model, before a training step.
        norms: The BatchNorm layers of its pipelined part, by their names in the model.
        settings: Settings of the pipeline.

    Returns:
        Whether a warning was given.
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
        "parts of a batch by itself in training, whereas one process normalises the whole batch: losses and gradients "
        f"differ from those of one process.{statistics} microbatches=1 trains as one process does.{one_row}"
    )
    return True


def smallest_batch(trainer: Any) -> int | None:
    """Return the number of rows of the smallest training batch of an epoch, or ``None`` if no loader tells it."""
    sizes = []
    for loader in training_loaders(trainer):
        sampler = getattr(loader, "batch_sampler", None)
        size, drop_last = getattr(sampler, "batch_size", None), getattr(sampler, "drop_last", True)
        if not isinstance(size, int):
            continue
        whole, rest = divmod(sized_len(getattr(sampler, "sampler", None)) or 0, size)
        sizes.append(rest if rest and not drop_last and trainer.num_training_batches > whole else size)
    return min(sizes, default=None)


def warn_of_time_first(module: nn.Module, path: str) -> None:
    """Warn if a layer takes time as the first dimension, because a pipeline splits that dimension as the batch."""
    for name, layer in module.named_children():
        if getattr(getattr(layer, "self_attn", layer), "batch_first", True) is False:
            rank_zero_warn(
                f"Layer {name} of {path}, a {type(layer).__name__}, has batch_first=False, so its first dimension "
                "is time; a pipeline splits the first dimension into micro-batches. Give it batch_first=True."
            )
            return


def warn_of_router_loss(model: nn.Module, settings: Settings) -> None:
    """Warn if a mixture of experts of Hugging Face adds its auxiliary loss, which is not a mean over rows."""
    if not settings.interleaves or settings.microbatches == 1:
        return
    for name, module in model.named_modules():
        if getattr(getattr(module, "config", None), "output_router_logits", False) is True:
            rank_zero_warn(
                f"{name}, a {type(module).__name__}, adds the auxiliary loss of its routers, because of "
                f"output_router_logits=True. Under schedule={settings.schedule!r} each micro-batch has such a loss, so "
                "the total differs from that of one process. schedule='gpipe' computes it for the whole batch."
            )
            return


def check_mixed_precision(precision: Precision, devices: Sequence[torch.device]) -> None:
    """Check that autocast, which is of one kind of device, reaches all stages.

    Raises:
        MisconfigurationException: If stages are on devices of several kinds, under mixed precision.
    """
    kinds = sorted({device.type for device in devices})
    if len(kinds) > 1 and str(precision.precision).endswith("-mixed"):
        raise MisconfigurationException(
            f"precision={precision.precision!r} casts on one kind of device only, but the stages are on "
            f"{' and '.join(kinds)}, so some of them would compute in full precision. Put all stages on devices of one "
            "kind, or set precision='bf16-true' or '32-true'."
        )


def warn_of_compiled_model(path: str) -> None:
    """Warn if a module that contains the pipelined blocks is compiled, since the blocks run on their stages."""
    if "_orig_mod" in path.split("."):
        rank_zero_warn(
            f"{path} is inside a module in torch.compile(...), which compiles neither its blocks, because they run on "
            "their stages, nor the code that calls them. Compile the blocks instead: "
            "blocks[i] = torch.compile(blocks[i])."
        )


def check_divided_run(trainer: Any, model: LightningModule) -> None:
    """Check that a run can be made with a model whose parameters are divided by rows (ZeRO stage 3).

    Raises:
        MisconfigurationException: If optimization is manual, or if a callback copies or prunes the model.
    """
    if not model.automatic_optimization:
        raise MisconfigurationException(
            "stage=3 needs automatic optimization: it gathers parameters for training_step as a whole, in which manual "
            "optimization would change them. Use stage=2."
        )
    for callback in trainer.callbacks:
        if isinstance(callback, ModelPruning | StochasticWeightAveraging | WeightAveraging):
            raise MisconfigurationException(
                f"stage=3 does not support {type(callback).__name__}, which works on whole parameters, but each rank "
                "has some rows of each. Leave it out, or use stage=2."
            )


def check_dense_gradients(model: nn.Module) -> None:
    """Check that no layer makes sparse gradients, which do not fit into the buffers in which gradients travel.

    Raises:
        MisconfigurationException: If a layer does.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise MisconfigurationException(
                f"Layer {name} makes sparse gradients, which do not fit into buckets. Leave out sparse=True, "
                "or use strategy='ddp'."
            )
