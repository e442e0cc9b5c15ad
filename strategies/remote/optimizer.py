"""The caller's half of an optimizer whose parameters are on another process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from strategies.optim.restricted import hyperparameters


class RemoteOptimizer(Optimizer):
    """An optimizer on the process of a remote module; made by ``RemoteModule.optimizer``.

    Its ``param_groups`` have the hyperparameters, which schedulers may change and which go along with each step, and
    parameters without values. With several callers a step happens once, when all have asked for it.

    Args:
        call: Runs a command of :class:`~strategies.remote.host.Host` and returns its result.
        number: The optimizer's among those of the module.
        shapes: Those of its parameters.
        options: Its hyperparameters.
    """

    def __init__(
        self, call: Callable[..., Any], number: int, shapes: list[torch.Size], options: dict[str, Any]
    ) -> None:
        self._call, self._number = call, number
        super().__init__([nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes], options)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps there, and waits for it; returns what ``closure`` did."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._call("step", self._number, hyperparameters(self))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the module, when all callers have asked for it."""
        self._call("zero_grad", set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer there, with the hyperparameters as they are here."""
        state = self._call("optimizer_state_dict", self._number)
        for group, own in zip(state["param_groups"], hyperparameters(self), strict=True):
            group.update(own)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict`, or an optimizer of the same parameters in one process, returned."""
        self.param_groups[0].update(self._call("load_optimizer_state_dict", self._number, state_dict))
