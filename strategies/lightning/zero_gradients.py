"""Who uses gradients between the backward pass and the step: Lightning's precision plug-in, and hooks of the user."""

from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.common.patching import replaced
from strategies.lightning.gradients import clips_by
from strategies.sharding.optimizers import ShardedOptimizers

_HOOKS = ("on_after_backward", "on_before_optimizer_step")
_HOOKS_OF_MODELS = (*_HOOKS, "configure_gradient_clipping", "backward")


def gradient_hooks(trainer: Any, model: pl.LightningModule) -> list[str]:
    """The hooks that the model or a callback has for reading or changing gradients."""
    of_model = [name for name in _HOOKS_OF_MODELS if is_overridden(name, model)]
    return of_model + [
        f"{type(callback).__name__}.{name}"
        for callback in trainer.callbacks
        for name in _HOOKS
        if is_overridden(name, callback)
    ]


def steps_may_run_in_backward(trainer: Any, model: pl.LightningModule, precision: Any) -> bool:
    """Whether nothing looks at gradients between the backward pass and the step."""
    scales = getattr(precision, "scaler", None) is not None
    looks = scales or trainer.gradient_clip_val or is_overridden("optimizer_step", model)
    return model.automatic_optimization and not (looks or gradient_hooks(trainer, model))


def follow_precision(precision: Any, sharded: ShardedOptimizers) -> list[Callable[[], Any]]:
    """Makes clipping and the gradient scaler count the gradients of all ranks.

    Returns:
        Functions that end this.
    """
    undo: list[Callable[[], Any]] = [clips_by(precision, "clip_grad_by_norm", sharded.clip_grad_norm)]
    scaler: torch.amp.GradScaler | None = getattr(precision, "scaler", None)
    if scaler is not None:

        def unscale(optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
            # Both ways to unscale go through this method. A rank may have nothing to unscale.
            found = type(scaler)._unscale_grads_(scaler, optimizer, inv_scale, found_inf, allow_fp16)
            sharded.any_rank(found.setdefault(found_inf.device, found_inf))
            return found

        undo.append(replaced(scaler, "_unscale_grads_", unscale))
    return undo


def check_dense(model: nn.Module) -> None:
    """Checks that gradients can travel in buffers.

    Raises:
        MisconfigurationException: If a layer makes sparse ones.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise MisconfigurationException(
                f"Layer {name} makes sparse gradients, which do not fit into buckets. Leave out sparse=True, "
                "or use strategy='ddp'."
            )
