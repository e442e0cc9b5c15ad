"""Data parallelism within one process: ``torch.nn.DataParallel`` over several GPUs, a thread each.

    batch ── split by rows ──▶ GPU 0: replica, step ── loss, logs ──┐
                           └─▶ GPU 1: replica, step ── loss, logs ──┴─▶ means over rows, on GPU 0

``DDPStrategy`` is faster, and works on CPUs and several hosts too. This one is for scripts and notebooks that must stay
one process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ParallelStrategy
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.parallel import DataParallel
from torch.optim import Optimizer
from torchmetrics import Metric

from strategies.base import StrategyPlugin
from strategies.common.torch_compat import tree_flatten, tree_leaves, tree_unflatten
from strategies.lightning.checks import is_external


class DataParallelStrategy(StrategyPlugin, ParallelStrategy):
    """Each step of the model runs on all GPUs of this process, on a share of the rows of the batch each.

    What it does at each point of the contract: ``setup_environment`` starts nothing; ``setup`` moves the model to the
    first GPU, from which ``DataParallel`` copies it for each step; ``barrier`` has nobody to wait for;
    ``pre_backward`` and ``post_optimizer_step`` have nothing to do, since there is one copy of every gradient;
    ``save_checkpoint`` writes what one process has; ``teardown`` lets go of the wrapper.

    Losses, logged values and other scalars that a step returns are means over the replicas, weighted by rows; tensors
    of one row a sample are put together again. A batch is made of tensors, tuples, lists and dicts. What a step sets on
    ``self`` is lost with its replica.

    Args:
        parallel_devices: The GPUs; the Trainer's by default.

    Raises:
        MisconfigurationException: When the Trainer is built, without several GPUs; at the start of ``fit``, for
            manual optimization, and for torchmetrics within the model, whose states live on one GPU.
    """

    def __init__(self, parallel_devices: list[torch.device] | None = None) -> None:
        super().__init__(parallel_devices=parallel_devices)
        self._replicas: DataParallel | None = None

    @property
    def is_distributed(self) -> bool:
        """Whether samplers have to divide the data."""
        return False

    @property
    def world_size(self) -> int:
        return 1

    @property
    def root_device(self) -> torch.device:
        """The GPU with the model; gradients are added up there."""
        assert self.parallel_devices
        return self.parallel_devices[0]

    def _configure_launcher(self) -> None:
        # Called when the Trainer is built: the devices are known.
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
        """Start nothing."""
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        """Move the model to the first GPU and wrap it."""
        model = self.lightning_module
        assert model is not None
        _check(model)
        self.model_to_device()
        super().setup(trainer)
        self._replicas = _Replicas(_Step(model), device_ids=self.parallel_devices)

    def model_to_device(self) -> None:
        """Move the model to the first GPU."""
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    def barrier(self, name: str | None = None) -> None:
        """Nobody to wait for."""

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Nothing: autograd goes back to the model through its copies."""

    def post_optimizer_step(self, optimizer: Optimizer) -> None:
        """Nothing: the next step copies the new weights."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Any, storage_options: Any | None = None
    ) -> None:
        """Write what one process has."""
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def teardown(self) -> None:
        """Let go of the wrapper."""
        self._replicas = None
        super().teardown()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's, on all GPUs."""
        with self.precision_plugin.train_step_context():
            return self._step("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's, on all GPUs."""
        with self.precision_plugin.val_step_context():
            return self._step("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's, on all GPUs."""
        with self.precision_plugin.test_step_context():
            return self._step("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's, on all GPUs."""
        with self.precision_plugin.predict_step_context():
            return self._step("predict_step", *args, **kwargs)

    def _step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        assert self._replicas is not None and self.lightning_module is not None
        kind = self.root_device.type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        ran = self._replicas(name, autocast, *args, **kwargs)
        parts: list[Part] = ran if isinstance(ran, list) else [ran]  # there may be rows for one device only
        rows = [part.rows for part in parts]
        for logged in zip(*(part.logged for part in parts), strict=True):
            (label, _, options), *_ = logged
            if options.get("reduce_fx", "mean") != "mean":
                raise ValueError(
                    f"strategy='dp' logs means over the rows of a batch, got reduce_fx={options['reduce_fx']!r} for "
                    f"{label!r}; use strategy='ddp'"
                )
            if options.get("batch_size") is not None:
                options = {**options, "batch_size": sum(own["batch_size"] for _, _, own in logged)}
            value = merged([value for _, value, _ in logged], rows, self.root_device)
            self.lightning_module.log(label, value, **options)
        return merged([part.output for part in parts], rows, self.root_device)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What was given."""
        return obj

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """What was given: it is that of all replicas already."""
        return tensor


@dataclass
class Part:
    """What one replica's step gave.

    Attributes:
        rows: How many rows of the batch it had.
        logged: Name, value and options of each call of ``log``.
        output: What the step returned.
    """

    rows: int
    logged: list[tuple[str, Any, dict[str, Any]]]
    output: Any


class _Step(nn.Module):
    """Calls a step of a model; of this module ``DataParallel`` makes the replicas."""

    def __init__(self, model: pl.LightningModule) -> None:
        super().__init__()
        self.model = model

    def forward(self, name: str, autocast: tuple[bool, torch.dtype], *args: Any, **kwargs: Any) -> Part:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not tensors:
            raise TypeError(
                f"strategy='dp' cannot split a batch of type {type(args[0]).__name__ if args else 'nothing'}: it takes "
                "tensors, and tuples, lists and dicts of them. Use strategy='ddp'."
            )
        device, logged = tensors[0].device, []

        def log(*args: Any, **kwargs: Any) -> None:
            options = signature(pl.LightningModule.log).bind(self.model, *args, **kwargs).arguments
            del options["self"]
            logged.append((options.pop("name"), options.pop("value"), dict(options)))

        # Of a replica these are gone after the step; the model itself is only called if there is but one device.
        vars(self.model).update(log=log, _device=device)
        try:
            # A new thread has autocast's defaults.
            with torch.autocast(device.type, dtype=autocast[1], enabled=autocast[0]):
                output = getattr(self.model, name)(*args, **kwargs)
        finally:
            del vars(self.model)["log"]
        return Part(len(tensors[0]) if tensors[0].ndim else 1, logged, output)


class _Replicas(DataParallel):
    """Gives what each replica gave, instead of gathering it."""

    def gather(self, outputs: Any, output_device: Any) -> list[Part]:
        return list(outputs)


def merged(values: Sequence[Any], rows: Sequence[int], device: torch.device) -> Any:
    """Puts together what replicas gave.

    Args:
        values: What each gave: nestings of tensors, numbers and other objects, alike in all.
        rows: How many rows each had.
        device: Where the result is to be.

    Returns:
        The same nesting: of scalars and numbers the means, weighted by rows; of other tensors all rows, in order; of
        other objects the first replica's.

    Raises:
        ValueError: If the nestings differ.
    """
    flat = [tree_flatten(value) for value in values]
    specs = [spec for _, spec in flat]
    kinds = [[isinstance(leaf, Tensor) for leaf in leaves] for leaves, _ in flat]
    if any(spec != specs[0] for spec in specs) or any(kind != kinds[0] for kind in kinds):
        raise ValueError("the replicas of strategy='dp' gave results of different structure; return the same from each")
    total = sum(rows)

    def merge(leaves: tuple[Any, ...]) -> Any:
        first = leaves[0]
        if len(leaves) == 1:
            return first
        if isinstance(first, Tensor) and first.ndim:
            return torch.cat([leaf.to(device) for leaf in leaves])
        if isinstance(first, Tensor):
            return sum(leaf.to(device) * (number / total) for leaf, number in zip(leaves, rows, strict=True))
        if isinstance(first, int | float) and not isinstance(first, bool):
            return sum(leaf * number for leaf, number in zip(leaves, rows, strict=True)) / total
        return first

    return tree_unflatten([merge(leaves) for leaves in zip(*(leaves for leaves, _ in flat), strict=True)], specs[0])


def _check(model: pl.LightningModule) -> None:
    """Refuse what replicas cannot do."""
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
