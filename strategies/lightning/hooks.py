"""Every place where Relay replaces a method of one of Lightning's objects for the duration of a run.

Lightning has no public hook at these points. Each function replaces methods of single objects, never of classes, and
returns a function that restores them, which strategies call in ``teardown``; :func:`without_logs` is a context.
:func:`overridden_gradient_hooks` and :func:`steps_may_run_in_backward` find out which of Lightning's hooks the user has
overridden.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from strategies.common.patching import replaced
from strategies.common.torch_compat import replacing_unscale_grads, unscale_grads
from strategies.lightning.compat import (
    Callback,
    LightningModule,
    LightningOptimizer,
    MisconfigurationException,
    ModelCheckpoint,
    ModelSummary,
    Precision,
    PyTorchProfiler,
    Trainer,
    is_overridden,
    is_stand_in,
    replacing_slurm_handler,
    replacing_summary,
    unwrapped,
)
from strategies.pipeline.optim.clipping import clip_grad_norm, clip_grad_value
from strategies.pipeline.optim.optimizers import PipelineOptimizers, follow_optimizer

Undo = Callable[[], Any]
"""Restores what a function of this module has replaced."""


# Optimizers


def follow_optimizers(
    optimizers: PipelineOptimizers, wrappers: Iterable[LightningOptimizer], after_method: Callable[[], None]
) -> list[Undo]:
    """Make every step, every ``zero_grad`` and every other method of the user's optimizers reach all stages.

    Args:
        optimizers: The optimizers over all stages.
        wrappers: Lightning's wrappers around the user's optimizers, which define ``zero_grad`` themselves.
        after_method: Called after each call of a method that an optimizer's class adds to torch's.
    """
    undo: list[Undo] = []
    listed = list(wrappers)
    for own in optimizers.optimizers:
        around = [wrapper for wrapper in listed if wrapper.optimizer is own]
        undo += follow_optimizer(
            own, optimizers, holders=around, refused=MisconfigurationException, after_method=after_method
        )
    return undo


# Gradients: the precision plug-in and its scaler


@dataclass(frozen=True)
class GradientOperations:
    """The precision plug-in's operations on gradients, applied to the gradients of all processes.

    Attributes:
        clip_norm: Called with an optimizer and the largest norm, in place of ``clip_grad_by_norm``.
        start_unscaling: Called with an optimizer, the inverse of the loss scale, and whether float16 gradients are
            allowed, before this process divides its gradients. Returns a function that takes a scalar, which is not
            zero if a gradient of this process is infinite or NaN. The function makes the scalar nonzero if a gradient
            of another process is infinite or NaN.
        clip_value: Called with an optimizer and the largest value, in place of ``clip_grad_by_value``.
    """

    clip_norm: Callable[[Optimizer, float], Any]
    start_unscaling: Callable[[Optimizer, Tensor, bool], Callable[[Tensor], Any]]
    clip_value: Callable[[Optimizer, float], Any]


def follow_precision(precision: Precision, operations: GradientOperations) -> list[Undo]:
    """Make clipping and the gradient scaler of a precision plug-in reach the gradients of all processes."""
    undo: list[Undo] = [
        _clip_by(precision, "clip_grad_by_norm", operations.clip_norm),
        _clip_by(precision, "clip_grad_by_value", operations.clip_value),
    ]
    if (scaler := scaler_of(precision)) is not None:
        for name, method in replacing_unscale_grads(partial(_unscale_everywhere, operations, scaler)).items():
            undo.append(replaced(scaler, name, method))
    return undo


def operations_over_stages(optimizers: PipelineOptimizers) -> GradientOperations:
    """Return how clipping and unscaling reach the gradients of all stages of a pipeline."""

    def start_unscaling(optimizer: Optimizer, inv_scale: Tensor, allow_fp16: bool) -> Callable[[Tensor], Any]:
        replies = optimizers.start_unscaling(optimizer, inv_scale.cpu(), allow_fp16)

        def count_others(found: Tensor) -> None:
            # A fused optimizer skips its step only if the scalar is exactly 1.
            optimizers.anywhere(found.add_(sum(reply() for reply in replies)).clamp_(max=1.0))

        return count_others

    clip_by_norm, clip_by_value = partial(clip_grad_norm, optimizers), partial(clip_grad_value, optimizers)
    return GradientOperations(clip_by_norm, start_unscaling, clip_by_value)


def scaler_of(precision: Precision) -> torch.amp.GradScaler | None:
    """Return the gradient scaler of a precision plug-in, which only plug-ins for float16 have."""
    return getattr(precision, "scaler", None)


def after_backward(precision: Precision, function: Callable[[], None]) -> Undo:
    """Call a function after each backward pass, before ``on_after_backward`` of the model and the callbacks."""
    backward: Any = precision.backward

    def backward_and_function(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        function()

    return replaced(precision, "backward", backward_and_function)


def _clip_by(precision: Precision, name: str, clip: Callable[[Optimizer, float], Any]) -> Undo:
    lightnings = getattr(precision, name)

    def clip_unless_stand_in(optimizer: Any, clip_val: float) -> None:
        if is_stand_in(optimizer):  # has no parameters in any process
            lightnings(optimizer, clip_val)
        else:
            clip(unwrapped(optimizer), clip_val)

    return replaced(precision, name, clip_unless_stand_in)


def _unscale_everywhere(
    operations: GradientOperations,
    scaler: torch.amp.GradScaler,
    optimizer: Optimizer,
    inv_scale: Tensor,
    found_inf: Tensor,
    allow_fp16: bool,
) -> dict[torch.device, Tensor]:
    count_others = operations.start_unscaling(unwrapped(optimizer), inv_scale, allow_fp16)
    found = unscale_grads(scaler)(optimizer, inv_scale, found_inf, allow_fp16)
    # The scaler needs an entry for at least one device, even if this process has no gradient to divide.
    count_others(found.setdefault(found_inf.device, found_inf))
    return found


# Callbacks, the summary, the profiler, logged values


def run_hooks_within(
    callback: Callback, names: Sequence[str], context: Callable[[], AbstractContextManager[Any]]
) -> list[Undo]:
    """Run the methods that the class of a callback overrides within a context, which is made for each call."""

    def within(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with context():
            return hook(*args, **kwargs)

    overridden = [name for name in names if getattr(type(callback), name) is not getattr(Callback, name)]
    return [replaced(callback, name, partial(within, getattr(callback, name))) for name in overridden]


def before_file_exists(callback: ModelCheckpoint, function: Callable[[], None]) -> Undo:
    """Call a function each time before a ``ModelCheckpoint`` checks whether a file exists."""
    file_exists = callback.file_exists

    def function_and_file_exists(*args: Any) -> bool:
        function()
        return file_exists(*args)

    return replaced(callback, "file_exists", function_and_file_exists)


def show_summary(callback: ModelSummary, summary: Callable[[Trainer, LightningModule], Any]) -> Undo:
    """Make a summary callback show what ``summary`` returns."""
    return replaced(callback, *replacing_summary(summary))


def add_to_progress_bar(bar: Any, items: Callable[[], dict[str, str]]) -> Undo:
    """Add items to a progress bar, before other values: a narrow terminal cuts off the last ones."""
    get_metrics = bar.get_metrics
    return replaced(bar, "get_metrics", lambda *args: {**items(), **get_metrics(*args)})


def around_stop(profiler: PyTorchProfiler, stop: Callable[[Callable[[str], None], str], None]) -> Undo:
    """Call ``stop(original, action_name)`` in place of ``profiler.stop(action_name)``."""
    return replaced(profiler, "stop", partial(stop, profiler.stop))


Collect = Callable[[str, Any, dict[str, Any]], None]
"""Called with the name and the value that ``self.log`` received, and its other arguments by name."""


def collect_logs(model: LightningModule, collector: Callable[[], Collect | None]) -> Undo:
    """Make ``self.log`` of a model call what ``collector()`` returns, or Lightning's method if it returns ``None``.

    The model can still be copied and pickled, because ``log`` of the copy is a method of the copy.
    """
    others = list(signature(LightningModule.log).parameters)[3:]  # after self, name and value

    def log(self: LightningModule, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if (collect := collector()) is None:
            type(self).log(self, name, value, *args, **kwargs)
        else:
            collect(name, value, {**dict(zip(others, args, strict=False)), **kwargs})

    return replaced(model, "log", MethodType(log, model))


@contextmanager
def without_logs(model: LightningModule) -> Iterator[None]:
    """Context in which ``self.log`` of a model, and of LightningModules within it, does nothing."""
    with ExitStack() as ending:
        for module in model.modules():
            if isinstance(module, LightningModule):
                ending.callback(replaced(module, "log", lambda *args, **kwargs: None))
        yield


# Signals


def on_notice_of_slurm(trainer: Trainer, function: Callable[[], None]) -> Undo:
    """Call a function in place of Lightning's handler of the signal with which SLURM announces the end of a job."""
    return replaced(*replacing_slurm_handler(trainer, lambda *args: function()))


# Hooks of the user

_GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step")
_GRADIENT_HOOKS_OF_MODELS = (*_GRADIENT_HOOKS, "configure_gradient_clipping", "backward")


def overridden_gradient_hooks(trainer: Any, model: LightningModule) -> list[str]:
    """Return the names of the hooks in which the model or a callback may read or change gradients."""
    of_model = [name for name in _GRADIENT_HOOKS_OF_MODELS if is_overridden(name, model)]
    return of_model + [
        f"{type(callback).__name__}.{name}"
        for callback in trainer.callbacks
        for name in _GRADIENT_HOOKS
        if is_overridden(name, callback)
    ]


def steps_may_run_in_backward(trainer: Any, model: LightningModule, precision: Precision) -> bool:
    """Return whether nothing reads gradients between the backward pass and the optimizer's step."""
    reads = scaler_of(precision) is not None or trainer.gradient_clip_val or is_overridden("optimizer_step", model)
    return model.automatic_optimization and not (reads or overridden_gradient_hooks(trainer, model))
