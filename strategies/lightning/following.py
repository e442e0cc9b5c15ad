"""Lets the stages of a pipeline follow the user's optimizer objects, through whichever of their methods is called."""

from collections.abc import Callable, Iterable

from pytorch_lightning.core.optimizer import LightningOptimizer
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from strategies.pipeline.optim.optimizers import PipelineOptimizers, follow_optimizer


def follow(
    optimizers: PipelineOptimizers,
    wrappers: Iterable[LightningOptimizer],
    after_method: Callable[[], None],
) -> list[Callable[[], None]]:
    """Makes every step, every ``zero_grad`` and every other method of the optimizers reach the other stages.

    Args:
        optimizers: The optimizers over all stages.
        wrappers: What Lightning puts around them, with a ``zero_grad`` of its own.
        after_method: Called after each call of a method that an optimizer's class adds to torch's.

    Returns:
        Functions that end this.
    """
    undo: list[Callable[[], None]] = []
    listed = list(wrappers)
    for own in optimizers.optimizers:
        around = [wrapper for wrapper in listed if wrapper.optimizer is own]
        undo += follow_optimizer(
            own, optimizers, holders=around, refused=MisconfigurationException, after_method=after_method
        )
    return undo
