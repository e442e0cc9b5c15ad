"""What Lightning's precision plug-in does to gradients (clipping, loss scaling), done to those of every stage."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from strategies.common.patching import replaced
from strategies.lightning.compat import is_stand_in, unwrapped
from strategies.pipeline.optim.optimizers import PipelineOptimizers


def follow_precision(
    precision: Any, optimizers: PipelineOptimizers, after_backward: Callable[[], None]
) -> list[Callable[[], Any]]:
    """Makes clipping and the gradient scaler of a precision plug-in reach the other stages.

    Args:
        precision: The plug-in.
        optimizers: The optimizers over all stages.
        after_backward: Called after each backward pass, ahead of the hook ``on_after_backward``.

    Returns:
        Functions that end this.
    """
    backward = precision.backward

    def backward_and_after(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        after_backward()

    undo = [
        replaced(precision, "backward", backward_and_after),
        clips_by(precision, "clip_grad_by_norm", optimizers.clip_grad_norm),
        clips_by(precision, "clip_grad_by_value", optimizers.clip_grad_value),
    ]
    scaler = getattr(precision, "scaler", None)
    if scaler is not None:
        optimizers.skips_infinite_steps = True
        undo.append(replaced(scaler, "_unscale_grads_", partial(_unscale_everywhere, optimizers, scaler)))
    return undo


def clips_by(precision: Any, name: str, clip: Callable[[Optimizer, float], Any]) -> Callable[[], None]:
    """Makes a method of a precision plug-in clip by ``clip(optimizer, limit)``; returns what ends this."""
    here = getattr(precision, name)

    def clips(optimizer: Any, clip_val: float) -> None:
        if is_stand_in(optimizer):  # has no parameters in any process
            here(optimizer, clip_val)
        else:
            clip(unwrapped(optimizer), clip_val)

    return replaced(precision, name, clips)


def _unscale_everywhere(
    optimizers: PipelineOptimizers,
    scaler: torch.amp.GradScaler,
    optimizer: Optimizer,
    inv_scale: Tensor,
    found_inf: Tensor,
    allow_fp16: bool,
) -> dict[torch.device, Tensor]:
    """Stands for ``GradScaler._unscale_grads_``, the one place that both of its ways to unscale go through.

    Returns:
        For each device a scalar, not zero if some gradient is infinite or not a number, on whichever stage.
    """
    remote = optimizers.start_unscaling(unwrapped(optimizer), inv_scale.cpu(), allow_fp16)
    found = type(scaler)._unscale_grads_(scaler, optimizer, inv_scale, found_inf, allow_fp16)
    total = sum(reply() for reply in remote)
    # The scaler wants an answer for at least one device, also if no parameter of the optimizer lives here.
    found.setdefault(found_inf.device, found_inf).add_(total).clamp_(max=1.0)  # fused optimizers take 1 only as a yes
    return found
