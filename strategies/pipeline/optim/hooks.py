"""Steps, ``zero_grad``, other methods and the state of the user's optimizer object, carried to every stage."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch.optim import Optimizer

from strategies.common.patching import replaced
from strategies.optim.hooks import take_methods_along
from strategies.optim.restricted import CalledOnce, arguments_of_step, within_a_step
from strategies.pipeline.optim.optimizers import PipelineOptimizers


def take_along(
    own: Optimizer,
    optimizers: PipelineOptimizers,
    *,
    holders: Iterable[Any] = (),
    refused: type[Exception] = RuntimeError,
    after_method: Callable[[], None] = lambda: None,
) -> list[Callable[[], None]]:
    """Makes every step, every ``zero_grad``, other methods and the state of an optimizer those of all stages.

    Args:
        own: The user's optimizer.
        optimizers: Where it is one of those over all stages.
        holders: What is around it, with a ``zero_grad`` of its own.
        refused: The type of the error for an optimizer that cannot be followed.
        after_method: Called after each call of a method that the optimizer's class adds to torch's.

    Returns:
        Functions that end this.
    """
    undo = [own.register_step_pre_hook(_StepAlong(optimizers, refused)).remove]
    for holder in (own, *holders):
        both = partial(_zero_grad_too, holder.zero_grad, partial(optimizers.zero_grad_remotes, own))
        undo.append(replaced(holder, "zero_grad", both))

    def carry(*call: Any) -> Any:
        result = optimizers.call_method(*call)
        after_method()
        return result

    undo += take_methods_along(own, carry, holders)
    undo.append(replaced(own, "state_dict", partial(optimizers.state_dict, own)))
    undo.append(replaced(own, "load_state_dict", partial(optimizers.load_state_dict, own)))
    return undo


class _StepAlong:
    """A step pre-hook that steps the workers' parts once the gradients are there.

    A closure that the optimizer calls within its step may compute them; without one they are there already.
    The workers then step at the same time as the driver.
    """

    def __init__(self, optimizers: PipelineOptimizers, refused: type[Exception]) -> None:
        self._optimizers, self._refused = optimizers, refused

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if within_a_step(optimizer):
            return None
        closure, others = arguments_of_step(optimizer, args, kwargs)
        step = partial(self._optimizers.step_remotes, optimizer, others)
        if closure is None:
            step()
            return None
        return args[:1], {**others, "closure": CalledOnce(closure, step, partial(self._refusal, optimizer))}

    def _refusal(self, optimizer: Optimizer) -> Exception:
        return self._refused(
            f"{type(optimizer).__name__} evaluates the loss several times within a step, which a pipeline cannot "
            "follow. Use an optimizer that makes one update from one gradient, such as AdamW."
        )


def _zero_grad_too(
    original: Callable[[bool], None], clear_remotes: Callable[[bool], None], set_to_none: bool = True
) -> None:
    original(set_to_none)
    clear_remotes(set_to_none)
