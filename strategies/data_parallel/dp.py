"""Data parallelism in one process: ``torch.nn.DataParallel`` over several GPUs, with one thread per GPU.

    batch ── split by rows ──▶ GPU 0: replica, step ── loss, logs ──┐
                           └─▶ GPU 1: replica, step ── loss, logs ──┴─▶ means over rows, on GPU 0

``DDPStrategy`` is faster, and also works on CPUs and on several hosts. ``DataParallelStrategy`` is for scripts and
notebooks that must run in one process.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel
from torch.optim import Optimizer
from torchmetrics import Metric

from strategies.common.torch_compat import give_parameters, tree_flatten, tree_leaves, tree_unflatten
from strategies.lightning.compat import MisconfigurationException, ParallelStrategy, pl, set_device
from strategies.lightning.hooks import collect_logs
from strategies.lightning.launch.environment import is_external
from strategies.lightning.strategy_plugin import StrategyPlugin


class DataParallelStrategy(StrategyPlugin, ParallelStrategy):
    """Runs each step of the model on all GPUs of this process; each GPU gets some rows of the batch.

    The methods of the contract (:class:`~strategies.lightning.strategy_plugin.StrategyPlugin`):

    * ``setup_environment`` starts nothing.
    * ``setup`` moves the model to the first GPU, from which ``DataParallel`` copies it for each step.
    * ``barrier`` returns at once, because there is one process.
    * ``pre_backward`` and ``post_optimizer_step`` do nothing, because each gradient exists once.
    * ``save_checkpoint`` writes the state of this process.
    * ``teardown`` removes the wrapper.

    Losses, logged values and other scalars of a step become means over the replicas, weighted by rows. Tensors with one
    row per sample are concatenated. A batch consists of tensors, tuples, lists and dicts. Attributes that a step sets
    on ``self`` are lost, because ``self`` is a replica that exists for this step only.

    Args:
        parallel_devices: The GPUs; by default, the GPUs of the Trainer.

    Raises:
        MisconfigurationException: When the Trainer is built, if there are fewer than two GPUs. At the start of ``fit``,
            if optimization is manual or the model contains torchmetrics, whose states are on one GPU.
    """

    def __init__(self, parallel_devices: list[torch.device] | None = None) -> None:
        super().__init__(parallel_devices=parallel_devices)
        self._replicas: DataParallel | None = None

    @property
    def is_distributed(self) -> bool:
        """Whether samplers divide the data among processes."""
        return False

    @property
    def world_size(self) -> int:
        return 1

    @property
    def root_device(self) -> torch.device:
        """The GPU that holds the model and sums the gradients."""
        assert self.parallel_devices
        return self.parallel_devices[0]

    def _check_devices(self) -> None:
        devices = self.parallel_devices or []
        if any(device.type != "cuda" for device in devices):
            raise MisconfigurationException(
                "strategy='dp' splits a batch over several GPUs in one process; on CPU use strategy='ddp', which has a "
                f"process for each of devices={len(devices)}"
            )
        if len(devices) < 2:
            raise MisconfigurationException(
                f"strategy='dp' splits a batch over several GPUs in one process, got {len(devices)}; give the Trainer "
                "more devices, or leave the strategy out"
            )
        if self.cluster_environment is not None and is_external(self.cluster_environment):
            raise MisconfigurationException(
                "strategy='dp' is for one process, but several have been started, by torchrun or SLURM; use "
                "strategy='ddp'"
            )

    def setup_environment(self) -> None:
        """Set up what Lightning sets up; no process is started."""
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        """Move the model to the first GPU and wrap it."""
        model = self.lightning_module
        assert model is not None
        _check(model)
        self.model_to_device()
        super().setup(trainer)
        self._replicas = _UngatheredReplicas(_StepModule(model), device_ids=self.parallel_devices)

    def barrier(self, name: str | None = None) -> None:
        """Return at once: there is one process."""

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Do nothing: autograd reaches the model through its copies."""

    def post_optimizer_step(self, optimizer: Optimizer) -> None:
        """Do nothing: the next step copies the new weights."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Any, storage_options: Any | None = None
    ) -> None:
        """Write the state of this process."""
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def teardown(self) -> None:
        """Remove the wrapper."""
        self._replicas = None
        super().teardown()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on all GPUs."""
        with self.precision_plugin.train_step_context():
            return self._step("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on all GPUs."""
        with self.precision_plugin.val_step_context():
            return self._step("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on all GPUs."""
        with self.precision_plugin.test_step_context():
            return self._step("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on all GPUs."""
        with self.precision_plugin.predict_step_context():
            return self._step("predict_step", *args, **kwargs)

    def _step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        assert self._replicas is not None and self.lightning_module is not None
        kind = self.root_device.type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        ran = self._replicas(name, autocast, *args, **kwargs)
        parts: list[ReplicaResult] = (
            ran if isinstance(ran, list) else [ran]
        )  # a small batch may have rows for one device only
        rows = [part.rows for part in parts]
        for part in parts:
            _check_logged(part.logged, parts[0].logged)
        for logged in zip(*(part.logged for part in parts), strict=True):
            (label, _, options), *_ = logged
            if options.get("batch_size") is not None:
                options = {**options, "batch_size": sum(own["batch_size"] for _, _, own in logged)}
            value = merged([value for _, value, _ in logged], rows, self.root_device)
            self.lightning_module.log(label, value, **options)
        return merged([part.output for part in parts], rows, self.root_device, joins_lists=name == "predict_step")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object itself: there is one process."""
        return obj

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the tensor itself, which already combines all replicas."""
        return tensor


LogCall = tuple[str, Any, dict[str, Any]]
"""Name, value and options of a call of ``log``."""


@dataclass
class ReplicaResult:
    """The result of a step on one replica.

    Attributes:
        rows: Number of rows of the replica's share of the batch.
        logged: Each call of ``log``.
        output: What the step returned.
    """

    rows: int
    logged: list[LogCall]
    output: Any


class _StepModule(nn.Module):
    """The module that ``DataParallel`` replicates; it calls a step of the model."""

    def __init__(self, model: pl.LightningModule) -> None:
        super().__init__()
        self.model = model

    def forward(self, name: str, autocast: tuple[bool, torch.dtype], *args: Any, **kwargs: Any) -> ReplicaResult:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not tensors:
            raise TypeError(
                f"strategy='dp' cannot split a batch of type {type(args[0]).__name__ if args else 'nothing'}: it takes "
                "tensors, and tuples, lists and dicts of them. Use strategy='ddp'."
            )
        device = tensors[0].device
        logged: list[LogCall] = []
        set_device(self.model, device)
        # DataParallel calls this on a new thread, which starts with autocast's defaults.
        with ExitStack() as ending, torch.autocast(device.type, dtype=autocast[1], enabled=autocast[0]):
            ending.callback(collect_logs(self.model, lambda: lambda *call: logged.append(call)))
            output = getattr(self.model, name)(*args, **kwargs)
        return ReplicaResult(len(tensors[0]) if tensors[0].ndim else 1, logged, output)


class _UngatheredReplicas(DataParallel):
    """Returns the results of the replicas as a list instead of gathering them into one."""

    def replicate(self, module: Any, device_ids: Any) -> list[Any]:
        """Return copies of the module. A step may use their parameters, for example in a penalty on all weights."""
        replicas = super().replicate(module, device_ids)
        for replica in replicas:
            give_parameters(replica)
        return replicas

    def gather(self, outputs: Any, output_device: Any) -> list[ReplicaResult]:
        return list(outputs)


def merged(values: Sequence[Any], rows: Sequence[int], device: torch.device, *, joins_lists: bool = False) -> Any:
    """Combine the results of replicas.

    Args:
        values: The result of each replica: nested tensors, numbers and other objects, with the same structure.
        rows: Number of rows of each replica.
        device: The device of the combined result.
        joins_lists: Whether lists with an entry for each row are concatenated.

    Returns:
        The same structure. It contains the means of scalars and numbers, weighted by rows, the concatenation of all
        other tensors, and the first replica's objects of any other type.

    Raises:
        ValueError: If the structures differ, or if it is not clear whether lists are to be concatenated.
    """
    if joins_lists and all(
        isinstance(value, list) and len(value) == number for value, number in zip(values, rows, strict=True)
    ):
        if all(map(_has_tensor_of_rows, values, rows)):
            raise ValueError(
                f"predict_step under strategy='dp' returned a list with as many entries as rows, {len(values[0])}, and "
                "with tensors of so many rows, so it is not clear whether each entry belongs to one row. Return a dict "
                "or a tuple of the tensors, or one tensor in place of a list of rows."
            )
        return [*chain.from_iterable(values)]
    flat = [tree_flatten(value, partial(is_not, value)) for value in values]  # one level
    specs = [spec for _, spec in flat]
    kinds = [isinstance(value, Tensor) for value in values]
    if any(spec != specs[0] for spec in specs) or any(kind != kinds[0] for kind in kinds):
        raise ValueError("the replicas of strategy='dp' gave results of different structure; return the same from each")
    first, total = values[0], sum(rows)
    if not (flat[0][0] and flat[0][0][0] is first):
        children = zip(*(children for children, _ in flat), strict=True)
        return tree_unflatten([merged(each, rows, device, joins_lists=joins_lists) for each in children], specs[0])
    if len(values) == 1:
        return first
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat([value.to(device) for value in values])
    if isinstance(first, Tensor):
        return sum(value.to(device) * (number / total) for value, number in zip(values, rows, strict=True))
    if isinstance(first, int | float) and not isinstance(first, bool):
        return sum(value * number for value, number in zip(values, rows, strict=True)) / total
    return first


def _has_tensor_of_rows(value: Any, number: int) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == number for leaf in tree_leaves(value))


def _check_logged(logged: Sequence[LogCall], first: Sequence[LogCall]) -> None:
    """Check that a replica has logged under the names and with the options of the first replica, and only means."""
    for labels in zip_longest(*([label for label, _, _ in own] for own in (logged, first))):
        if labels[0] != labels[1]:
            raise ValueError(
                "the replicas of strategy='dp' logged values under different names, "
                f"{sorted(filter(None, labels))}{' or none' * (None in labels)}; log the same names in the same order "
                "for any rows, or use strategy='ddp'"
            )
    for (label, _, options), (_, _, others) in zip(logged, first, strict=True):
        if options.get("reduce_fx", "mean") != "mean":
            raise ValueError(
                f"strategy='dp' logs means over the rows of a batch, got reduce_fx={options['reduce_fx']!r} for "
                f"{label!r}; use strategy='ddp'"
            )
        own, other = ({**given, "batch_size": given.get("batch_size") is not None} for given in (options, others))
        if different := sorted(name for name in {*own, *other} if own.get(name) != other.get(name)):
            raise ValueError(
                f"the replicas of strategy='dp' logged {label!r} with different options, {', '.join(different)}; give "
                "the same for any rows, or use strategy='ddp'"
            )


def _check(model: pl.LightningModule) -> None:
    """Refuse a model that cannot run on replicas."""
    if not model.automatic_optimization:
        raise MisconfigurationException(
            "strategy='dp' runs training_step on several copies of the model, so it cannot step optimizers itself "
            "(manual optimization); use strategy='ddp'"
        )
    if metrics := [name for name, module in model.named_modules() if isinstance(module, Metric)]:
        raise MisconfigurationException(
            f"strategy='dp' cannot update the torchmetrics {', '.join(metrics)} on copies of the model; log plain "
            "values, or use strategy='ddp'"
        )
