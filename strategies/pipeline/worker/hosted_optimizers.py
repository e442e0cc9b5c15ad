"""A worker's part of the user's optimizers, and the commands that reach it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from strategies.common.activity import Activity
from strategies.common.torch_compat import unscale_grads
from strategies.common.trees import layouts, on_cpu
from strategies.optim.calls import MethodCall
from strategies.optim.gradients import norms_of_gradients, scale_gradients
from strategies.optim.restricted import load_states, parameters_of, part_of, set_hyperparameters
from strategies.pipeline.optim.replicas import SharedSteps
from strategies.pipeline.stage.layers import PassContext
from strategies.pipeline.stage.stage import Stage


class HostedOptimizers:
    """The commands of a stage that concern its optimizers, which are known by their numbers."""

    _activity: Activity
    _stage: Stage
    _optimizers: list[Optimizer]
    _numbers: list[list[int]]
    """For each optimizer, the numbers that the whole one gives to the parameters of this stage."""
    _shared_steps: SharedSteps | None

    def zero_grad(self, optimizer: int, set_to_none: bool) -> None:
        """Clears the gradients of an optimizer's parameters."""
        self._optimizers[optimizer].zero_grad(set_to_none)

    def step(
        self,
        optimizer: int,
        values: list[dict[str, Any]],
        scaling: dict[str, Tensor],
        dtype: torch.dtype,
        arguments: Mapping[str, Any],
    ) -> None:
        """Steps an optimizer with the driver's hyperparameters.

        Args:
            optimizer: Its number.
            values: The hyperparameters of each group.
            scaling: What a gradient scaler sets on an optimizer that unscales within its step.
            dtype: The driver's default type, that of the counters which some optimizers make.
            arguments: Those of ``step``.
        """
        torch.set_default_dtype(dtype)
        self._activity.doing = "optimizer step"
        own, shared = self._optimizers[optimizer], self._shared_steps
        set_hyperparameters(own, values)
        vars(own).update(scaling)
        if shared is not None:
            shared.before_step(own)
        own.step(**arguments)
        for name in scaling:
            delattr(own, name)
        if shared is not None:
            self._activity.doing = "exchange of values after an optimizer step"
            shared.after_step(own)

    def call_method(
        self, optimizer: int, call: MethodCall, values: list[dict[str, Any]], context: PassContext, grad: bool
    ) -> Any:
        """Calls a method of an optimizer that its class adds to torch's.

        Args:
            optimizer: Its number.
            call: The method and its arguments.
            values: The driver's hyperparameters of each group.
            context: The driver's settings.
            grad: Whether gradients are enabled on the driver.

        Returns:
            What the method returns, if it is plain.
        """
        self._activity.doing = f"method {call.name} of an optimizer"
        own, shared = self._optimizers[optimizer], self._shared_steps
        set_hyperparameters(own, values)
        if shared is not None:
            shared.before_step(own)
        with context.entered(grad=grad):
            result = call.on(own)
        if shared is not None:
            shared.after_step(own)
        return None if result is own else result

    def unscale_grads(self, optimizer: int, inv_scale: Tensor, allow_fp16: bool) -> float:
        """Divides the gradients of an optimizer's parameters by the loss scale.

        Returns:
            Zero if all of them are finite.
        """
        found, device = torch.zeros((), device=self._stage.device), self._stage.device
        scaler = torch.amp.GradScaler(device.type)
        found_by_device = unscale_grads(scaler)(self._optimizers[optimizer], inv_scale.to(device), found, allow_fp16)
        return sum(found.item() for found in found_by_device.values())

    def grad_norms(self, optimizer: int, norm_type: float) -> dict[int, Tensor]:
        """The norm of each gradient, by the parameter's number."""
        norms = norms_of_gradients(parameters_of(self._optimizers[optimizer]), norm_type)
        pairs = zip(self._numbers[optimizer], norms, strict=True)
        return {number: norm.cpu() for number, norm in pairs if norm is not None}

    def scale_grads(self, optimizer: int, factor: Tensor) -> None:
        """Multiplies the gradients of an optimizer's parameters."""
        scale_gradients(parameters_of(self._optimizers[optimizer]), factor)

    def clip_grad_values(self, optimizer: int, limit: float) -> None:
        """Clamps every element of the gradients of an optimizer's parameters."""
        torch.nn.utils.clip_grad_value_(parameters_of(self._optimizers[optimizer]), limit)

    def optimizer_states(self, optimizer: int) -> dict[int, dict[str, Any]]:
        """The states that this process has of an optimizer, by the parameter's number in the whole one, on the CPU."""
        own = self._optimizers[optimizer]
        pairs = zip(self._numbers[optimizer], parameters_of(own), strict=True)
        return {number: on_cpu(own.state[p]) for number, p in pairs if own.state.get(p)}

    def whole_optimizer_states(self, optimizer: int) -> dict[int, dict[str, Any]]:
        """The same of this stage, whose replicas may have divided it; on the first of them, and all of them ask."""
        return self._whole(self.optimizer_states(optimizer))

    def optimizer_layouts(self, optimizer: int) -> dict[int, dict[str, Any]]:
        """:meth:`whole_optimizer_states` with layouts in place of tensors."""
        return self._whole(layouts(self.optimizer_states(optimizer)))

    def load_optimizer_states(self, optimizer: int, states: Mapping[Any, Any]) -> None:
        """Loads, out of the states of a whole optimizer, those of this stage's parameters."""
        places = {number: place for place, number in enumerate(self._numbers[optimizer])}
        own = {places.get(key, key): state for key, state in part_of(states, self._numbers[optimizer]).items()}
        if self._shared_steps is not None:
            own = self._shared_steps.own_part(self._optimizers[optimizer], own)
        load_states(self._optimizers[optimizer], own)

    def _whole(self, states: dict[int, Any]) -> dict[int, Any]:
        return states if self._shared_steps is None else self._shared_steps.gathered(states)
