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
        modules: Whose ``zero_grad`` is that of all stages: the model, the pipelined module, and what lies between.

    Returns:
        Functions that end this.
    """
    plain = [module for module in modules if type(module).zero_grad is nn.Module.zero_grad]
    undo = [
        replaced(module, "zero_grad", partial(_zero_grad_everywhere, module, optimizers.zero_all_grads_remotes))
        for module in plain
    ]
    listed = list(wrappers)
    for own in optimizers.optimizers:
        undo.append(own.register_step_pre_hook(_StepAlong(optimizers)).remove)
        around = [wrapper for wrapper in listed if wrapper.optimizer is own]
        holders: list[Any] = [own, *around]
        for holder in holders:
            both = partial(_zero_grad_too, holder.zero_grad, partial(optimizers.zero_grad_remotes, own))
            undo.append(replaced(holder, "zero_grad", both))
        undo.append(replaced(own, "state_dict", partial(optimizers.state_dict, own)))
        undo.append(replaced(own, "load_state_dict", partial(optimizers.load_state_dict, own)))
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


def _zero_grad_everywhere(module: nn.Module, clear_remotes: Callable[[bool], None], set_to_none: bool = True) -> None:
    nn.ParameterList(p for p in module.parameters() if not p.is_meta).zero_grad(set_to_none)
    clear_remotes(set_to_none)


def _zero_grad_too(
    original: Callable[[bool], None], clear_remotes: Callable[[bool], None], set_to_none: bool = True
) -> None:
    original(set_to_none)
    clear_remotes(set_to_none)


def replaced(holder: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Sets a method of one object; returns what takes that back."""
    own = vars(holder)
    had, before = name in own, own.get(name)
    own[name] = method

    def undo() -> None:
        if had:
            own[name] = before
        else:
            own.pop(name, None)

    return undo
