"""Lets the stages of a pipeline follow the user's optimizer objects, through whichever of their methods is called."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from pytorch_lightning.core.optimizer import LightningOptimizer
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import Optimizer

from strategies.optimizer import within_a_step
from strategies.pipeline.update import PipelineOptimizers


def follow(
    optimizers: PipelineOptimizers, wrappers: Iterable[LightningOptimizer], modules: Iterable[nn.Module]
) -> list[Callable[[], None]]:
    """Makes every step and every ``zero_grad`` reach the other stages.

    Args:
        optimizers: The optimizers over all stages.
        wrappers: What Lightning puts around them, with a ``zero_grad`` of its own.
        modules: Whose ``zero_grad`` is that of all stages: the model, and the pipelined module.

    Returns:
        Functions that end this.
    """
    undo = [_also(modules, optimizers.zero_all_grads_remotes)]
    listed = list(wrappers)
    for own in optimizers.optimizers:
        undo.append(own.register_step_pre_hook(_StepAlong(optimizers)).remove)
        around = [wrapper for wrapper in listed if wrapper.optimizer is own]
        undo.append(_also([own, *around], partial(optimizers.zero_grad_remotes, own)))
    return undo


class _StepAlong:
    """A step pre-hook that steps the workers' parts once the gradients are there.

    Lightning computes them in a closure that the optimizer calls within its step; without one they are there already.
    The workers then step at the same time as the driver.
    """

    def __init__(self, optimizers: PipelineOptimizers) -> None:
        self._optimizers = optimizers

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if within_a_step(optimizer):
            return None
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            self._optimizers.step_remotes(optimizer)
            return None
        return args[:1], {**kwargs, "closure": _Once(closure, self._optimizers, optimizer)}


class _Once:
    """A closure that is followed by the workers' step, and that can be called once in a step."""

    def __init__(self, closure: Callable[[], Any], optimizers: PipelineOptimizers, optimizer: Optimizer) -> None:
        self._closure: Callable[[], Any] | None = closure
        self._optimizers, self._optimizer = optimizers, optimizer

    def __call__(self) -> Any:
        if self._closure is None:
            raise MisconfigurationException(
                f"{type(self._optimizer).__name__} evaluates the loss several times within a step, which a pipeline "
                "cannot follow. Use an optimizer that makes one update from one gradient, such as AdamW."
            )
        closure, self._closure = self._closure, None
        result = closure()
        self._optimizers.step_remotes(self._optimizer)
        return result


def _also(holders: Iterable[Any], clear_remotes: Callable[[bool], None]) -> Callable[[], None]:
    """Has ``zero_grad`` of each holder clear the workers' gradients too; returns what takes this back."""
    listed = list(holders)
    for holder in listed:

        def zero_grad(set_to_none: bool = True, *, original: Callable[[bool], None] = holder.zero_grad) -> None:
            original(set_to_none)
            clear_remotes(set_to_none)

        vars(holder)["zero_grad"] = zero_grad

    def undo() -> None:
        for holder in listed:
            vars(holder).pop("zero_grad", None)

    return undo
