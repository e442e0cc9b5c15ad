"""The caller's half of an optimizer whose parameters are on another process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from strategies.optim.calls import hyperparameters
from strategies.remote.client import ModuleClient
from strategies.remote.commands import ModuleCommands


class RemoteOptimizer(Optimizer):
    """An optimizer on the process of a remote module; made by ``RemoteModule.optimizer``.

    Its ``param_groups`` have the hyperparameters, which schedulers may change and which go along with each step, and
    parameters without values. With several callers a step happens once, when all have asked for it.

    Args:
        client: The client of the module.
        number: The optimizer's among those of the module.
        shapes: Those of its parameters.
        options: Its hyperparameters.
    """

    def __init__(self, client: ModuleClient, number: int, shapes: list[torch.Size], options: dict[str, Any]) -> None:
        self._client, self._number = client, number
        super().__init__([nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes], options)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on the process of the module, and wait for it; returns the result of ``closure``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._client.call(ModuleCommands.step, self._number, hyperparameters(self))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the module, once all callers have asked for it."""
        self._client.call(ModuleCommands.zero_grad, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict from the process of the module, with the hyperparameters of this process."""
        state = self._client.call(ModuleCommands.optimizer_state_dict, self._number)
        for group, own in zip(state["param_groups"], hyperparameters(self), strict=True):
            group.update(own)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of :meth:`state_dict`, or of an optimizer of the same parameters in one process."""
        self.param_groups[0].update(
            self._client.call(ModuleCommands.load_optimizer_state_dict, self._number, state_dict)
        )
