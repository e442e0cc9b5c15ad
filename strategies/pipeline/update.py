"""The user's optimizers over all stages: steps, gradients and state, as if every parameter were on the driver.

The optimizer objects are those that the user made; they step what lives on the driver. Each worker holds the same
optimizers restricted to its own parameters. ``k`` is the optimizer's place in the list.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from strategies.optimizer import hyperparameters, norms_of_gradients, parameters_of
from strategies.pipeline.remote import RemoteStage


class PipelineOptimizers:
    """Carries what happens to the user's optimizers to the stages.

    Args:
        optimizers: The optimizers that were shipped.
        remotes: The stages on workers.
    """

    def __init__(self, optimizers: list[Optimizer], remotes: list[RemoteStage]) -> None:
        self.optimizers, self._remotes = optimizers, remotes
        self._shipped = [_group_sizes(optimizer) for optimizer in optimizers]

    def step_remotes(self, k: int) -> None:
        """Steps the workers' parts with the hyperparameters that the optimizer has now, without waiting.

        Raises:
            RuntimeError: If the optimizer has got other parameters since the start.
        """
        optimizer = self.optimizers[k]
        if _group_sizes(optimizer) != self._shipped[k]:
            raise RuntimeError(
                f"{type(optimizer).__name__} has parameter groups of {_group_sizes(optimizer)} parameters, but the "
                f"pipeline started with {self._shipped[k]}; groups cannot be added while it runs (add_param_group). "
                "Give all parameters to the optimizer from the start and freeze those that are not to be trained yet."
            )
        values = hyperparameters(self.optimizers[k])
        for remote in self._remotes:
            remote.start("step", k, values)

    def zero_all_grads_remotes(self, set_to_none: bool) -> None:
        """Clears the gradients of every parameter of the workers before whatever they do next."""
        for remote in self._remotes:
            remote.later("zero_all_grads", set_to_none)

    def zero_grad_remotes(self, k: int, set_to_none: bool) -> None:
        """Clears the workers' gradients before whatever they do next."""
        for remote in self._remotes:
            remote.later("zero_grad", k, set_to_none)

    def clip_grad_norm(self, k: int, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the gradients of all stages so that their common norm is at most ``max_norm``.

        The norm is put together from the norms of single parameters in the order of ``torch.nn.utils.clip_grad_norm_``.

        Returns:
            The total norm before, a scalar.
        """
        own = parameters_of(self.optimizers[k])
        replies = [remote.start("grad_norms", k, norm_type) for remote in self._remotes]
        norms = {number: n for number, n in enumerate(norms_of_gradients(own, norm_type)) if n is not None}
        for remote, reply in zip(self._remotes, replies, strict=True):
            norms.update(remote.result(reply))
        if not norms:
            return torch.zeros(())
        device = next((p.device for p in own if not p.is_meta), torch.device("cpu"))
        total = torch.linalg.vector_norm(torch.stack([norms[n].to(device) for n in sorted(norms)]), norm_type)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for parameter in own:
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.device))
        for remote in self._remotes:
            remote.later("scale_grads", k, factor.cpu())
        return total

    def clip_grad_value(self, k: int, limit: float) -> None:
        """Clamps every element of the gradients of all stages to ``[-limit, limit]``."""
        torch.nn.utils.clip_grad_value_(parameters_of(self.optimizers[k]), limit)
        for remote in self._remotes:
            remote.later("clip_grad_values", k, limit)

    def state_dict(self, k: int) -> dict[str, Any]:
        """The state dict that the optimizer would have if every parameter were here, gathered stage by stage."""
        optimizer = self.optimizers[k]
        state = optimizer.state_dict()
        for remote in self._remotes:
            state["state"].update(remote.call("optimizer_states", k))
        state["state"] = dict(sorted(state["state"].items()))
        return state

    def load_state_dict(self, k: int, state: dict[str, Any]) -> None:
        """Loads a whole state dict: each stage gets the states of its parameters."""
        optimizer = self.optimizers[k]
        remote_numbers = {number for number, p in enumerate(parameters_of(optimizer)) if p.is_meta}
        own = {number: s for number, s in state["state"].items() if number not in remote_numbers}
        optimizer.load_state_dict({**state, "state": own})
        for remote in self._remotes:
            remote.call("load_optimizer_states", k, state["state"])

    def fetch(self, remote: RemoteStage) -> None:
        """Puts a worker's states into the user's optimizers; called once its parameters are here again."""
        for k, optimizer in enumerate(self.optimizers):
            parameters = parameters_of(optimizer)
            states = remote.rescue("optimizer_states", k)
            optimizer.state.update({parameters[number]: state for number, state in states.items()})


def _group_sizes(optimizer: Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]
