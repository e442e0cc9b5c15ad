"""Lets the stages of a pipeline follow the user's optimizer objects, through whichever of their methods is called."""

from collections.abc import Callable, Iterable
from functools import partial

from pytorch_lightning.core.optimizer import LightningOptimizer
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import nn

from strategies.pipeline.along import replaced, take_along
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
        around = [wrapper for wrapper in listed if wrapper.optimizer is own]
        undo += take_along(own, optimizers, holders=around, refused=MisconfigurationException)
    return undo


def _zero_grad_everywhere(module: nn.Module, clear_remotes: Callable[[bool], None], set_to_none: bool = True) -> None:
    nn.ParameterList(p for p in module.parameters() if not p.is_meta).zero_grad(set_to_none)
    clear_remotes(set_to_none)
