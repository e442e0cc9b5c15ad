"""Lets the stages of a pipeline follow the user's optimizer objects, through whichever of their methods is called."""

from collections.abc import Callable, Iterable
from typing import Any

from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch.optim import LBFGS, Optimizer

from strategies.pipeline.update import PipelineOptimizers


def check_optimizer(optimizer: Optimizer) -> None:
    """Checks that each process can step its own parameters by itself.

    Raises:
        MisconfigurationException: If it cannot.
    """
    if isinstance(optimizer, LBFGS):
        raise MisconfigurationException(
            "RPCSequentialStrategy cannot run LBFGS: it evaluates the loss several times within a step and needs all "
            "parameters in one process. Use an optimizer that makes one update from one gradient, such as AdamW."
        )


def follow(optimizers: PipelineOptimizers, k: int, wrappers: Iterable[Optimizer]) -> Callable[[], None]:
    """Makes every step and ``zero_grad`` of optimizer ``k`` reach the other stages.

    Args:
        optimizers: The optimizers over all stages.
        k: Which one.
        wrappers: Further objects that stand for it, with a ``zero_grad`` of their own.

    Returns:
        A function that ends this.
    """
    own = optimizers.optimizers[k]
    handle = own.register_step_pre_hook(_StepAlong(optimizers, k))
    holders = [own, *wrappers]
    for holder in holders:
        vars(holder)["zero_grad"] = _ZeroGradAlong(optimizers, k, holder.zero_grad)

    def undo() -> None:
        handle.remove()
        for holder in holders:
            vars(holder).pop("zero_grad", None)

    return undo


class _StepAlong:
    """A step pre-hook that steps the workers' parts once the gradients are there.

    Lightning computes them in a closure that the optimizer calls within its step; without one they are there already.
    The workers then step at the same time as the driver.
    """

    def __init__(self, optimizers: PipelineOptimizers, k: int) -> None:
        self._optimizers, self._k = optimizers, k

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            self._optimizers.step_remotes(self._k)
            return None
        return args[:1], {**kwargs, "closure": _Once(closure, self._optimizers, self._k)}


class _Once:
    """A closure that is followed by the workers' step, and that can be called once in a step."""

    def __init__(self, closure: Callable[[], Any], optimizers: PipelineOptimizers, k: int) -> None:
        self._closure: Callable[[], Any] | None = closure
        self._optimizers, self._k = optimizers, k

    def __call__(self) -> Any:
        if self._closure is None:
            kind = type(self._optimizers.optimizers[self._k]).__name__
            raise MisconfigurationException(
                f"{kind} evaluates the loss several times within a step, which a pipeline cannot follow. Use an "
                "optimizer that makes one update from one gradient, such as AdamW."
            )
        closure, self._closure = self._closure, None
        result = closure()
        self._optimizers.step_remotes(self._k)
        return result


class _ZeroGradAlong:
    """``zero_grad`` of the driver's parameters and of the workers'."""

    def __init__(self, optimizers: PipelineOptimizers, k: int, original: Callable[..., None]) -> None:
        self._optimizers, self._k, self._original = optimizers, k, original

    def __call__(self, set_to_none: bool = True) -> None:
        self._original(set_to_none)
        self._optimizers.zero_grad_remotes(self._k, set_to_none)
