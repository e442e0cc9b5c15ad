"""Lets stages in other processes follow the user's optimizer object, through whichever of its methods is called."""

from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer

from strategies.common.patching import replaced
from strategies.optim.restricted import CarriedMethod, added_methods


def take_methods_along(own: Optimizer, carry: Callable[..., Any], holders: Iterable[Any]) -> list[Callable[[], None]]:
    """Makes calls of the methods that an optimizer's class adds to torch's, such as ``eval``, reach every process.

    Args:
        own: The user's optimizer.
        carry: See :class:`~strategies.optim.restricted.CarriedMethod`.
        holders: What is around it, and has the same methods.

    Returns:
        Functions that end this.
    """
    undo = []
    for name in added_methods(own):
        method = CarriedMethod(own, name, carry)
        undo += [replaced(holder, name, method) for holder in (own, *holders)]
    return undo
