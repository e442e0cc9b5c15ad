"""The user's optimizers under ZeRO stage 3. Each rank steps its rows of all parameters.

Outside of a step, the groups of an optimizer hold the divided parameters of the model. Within a step, plain tensors
with the rows of this rank replace them, so any optimizer works that updates each element independently::

    groups      DTensor [8, 5] ── before the step ─▶ rows [4, 5] ── after the step ─▶ DTensor [8, 5]
    state       of the rows, at all times
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from strategies.common.torch_compat import norms_of, tree_map_only
from strategies.optim.calls import MethodCall, follow_steps, same_result_on_ranks
from strategies.optim.gradients import clipping_factor
from strategies.optim.restricted import parameters_of
from strategies.sharding.model import ShardedModel
from strategies.sharding.rows import own_rows


def check_parameters(optimizer: Optimizer) -> None:
    """Check that an optimizer has only divided parameters.

    Raises:
        ValueError: If it has any other parameters.
    """
    others = [p for p in parameters_of(optimizer) if not isinstance(p, DTensor)]
    if others:
        raise ValueError(
            f"{type(optimizer).__name__} has {len(others)} parameters that are not divided parameters of the model. "
            "Under stage=3 build the optimizer in configure_optimizers, from self.parameters(), and do not keep an "
            "earlier optimizer or list of parameters."
        )


class RowOptimizers:
    """Optimizers of a divided model; each rank has the state of its rows.

    Args:
        optimizers: The same optimizers on every rank.
        model: The model.
        group: The ranks, on the backend of the device.

    Raises:
        ValueError: If an optimizer has a parameter that is not one of the model's.
    """

    def __init__(self, optimizers: Iterable[Optimizer], model: ShardedModel, group: ProcessGroup) -> None:
        self.optimizers, self.model, self._group = list(optimizers), model, group
        self._within: dict[Optimizer, tuple[list[list[Tensor]], dict[Tensor, Tensor]]] = {}
        for optimizer in self.optimizers:
            check_parameters(optimizer)
            for key, state in optimizer.state.items():  # some create states in their constructor
                optimizer.state[key] = tree_map_only(DTensor, lambda value: value.to_local(), state)
        self._undo = [
            follow_steps(optimizer, self._enter, is_divided=lambda: group.size() > 1) for optimizer in self.optimizers
        ]

    def close(self) -> None:
        """Stop following the steps of the optimizers. Optimizer states stay divided.

        The groups of the optimizers hold the original parameters again if the model has them.
        """
        for undo in self._undo:
            undo()
        self._undo = []
        for optimizer in self.optimizers:
            self._leave(optimizer)
        if not self.model.is_divided:
            self._replace(self.model.originals)

    def divide_again(self, model: ShardedModel) -> None:
        """Put the divided parameters of a model into the groups, in which :meth:`close` has put its original ones."""
        self.model = model
        self._replace({original: divided for divided, original in model.originals.items()})

    def _replace(self, names: dict[Tensor, Tensor]) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [names.get(p, p) for p in group["params"]]
            _rename(optimizer, names)

    # Steps

    def follow(self, loss: Tensor, *, communicate: bool) -> None:
        """Prepare a backward pass. It always reduces gradients, because whole gradients would not fit into memory."""
        self.model.before_backward()

    def after_step(self, optimizer: Optimizer) -> None:
        """Put the divided parameters back in the groups of an optimizer."""
        self._leave(optimizer)

    def _enter(self, optimizer: Optimizer, arguments: dict[str, Any] | None = None) -> None:
        self._leave(optimizer)  # after a step that failed
        if self.model.is_divided:
            self.model.reshard()
            check_parameters(optimizer)  # a group may have been added
        rows: dict[Tensor, Tensor] = {}
        for parameter in parameters_of(optimizer):
            local = self._rows(parameter)
            if local.numel():
                own = rows[parameter] = nn.Parameter(local, requires_grad=parameter.requires_grad)
                own.grad = None if parameter.grad is None else _local(parameter.grad)
                vars(own).update(vars(parameter))
        self._within[optimizer] = [group["params"] for group in optimizer.param_groups], rows
        for group in optimizer.param_groups:
            group["params"] = [rows[p] for p in group["params"] if p in rows]
        _rename(optimizer, rows)

    def _leave(self, optimizer: Optimizer) -> None:
        if optimizer not in self._within:
            return
        whole, rows = self._within.pop(optimizer)
        for group, parameters in zip(optimizer.param_groups, whole, strict=False):  # groups may have been added
            group["params"] = parameters
        _rename(optimizer, {own: parameter for parameter, own in rows.items()})
        with torch.no_grad():
            for parameter, own in rows.items():
                local = self._rows(parameter)
                if own.data_ptr() != local.data_ptr():  # the optimizer has replaced its memory
                    local.copy_(own)
                if own.grad is None:
                    parameter.grad = None

    def _rows(self, parameter: Tensor) -> Tensor:
        """Return this rank's rows, which share the memory of the parameter."""
        if isinstance(parameter, DTensor):
            return _local(parameter)
        return own_rows(parameter.detach(), parameter.shape, self._group.rank(), self._group.size())  # after fit

    def call_method(self, optimizer: Optimizer, call: MethodCall) -> Any:
        """Call a method of an optimizer for this rank's rows. Every rank calls this.

        Raises:
            RuntimeError: If the method returns different values on different ranks.
        """
        self._enter(optimizer)
        try:
            result = call.on(optimizer)
        finally:
            self._leave(optimizer)
        if not self.model.is_divided:  # after fit
            with torch.inference_mode(False), torch.no_grad():
                for parameter in parameters_of(optimizer):
                    for rank in range(self._group.size()):
                        rows = own_rows(parameter.data, parameter.shape, rank, self._group.size())
                        if rows.numel():
                            dist.broadcast(rows, group=self._group, group_src=rank)

        return same_result_on_ranks(optimizer, call, result, self._group)

    # Gradients

    def clip_grad_norm(self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their total norm is at most ``max_norm``.

        Returns:
            The norm before clipping, a scalar.
        """
        grads = [_local(p.grad) for p in parameters_of(optimizer) if p.grad is not None]
        device = grads[0].device if grads else None
        filled = [grad if grad.numel() else grad.new_zeros(1) for grad in grads]  # the largest of no values has no norm
        norms = torch.stack(norms_of(filled, norm_type)) if grads else torch.zeros(0, device=device)
        norms = norms.to(torch.promote_types(norms.dtype, torch.float32))
        if norm_type == float("inf"):
            dist.all_reduce(norms, dist.ReduceOp.MAX, group=self._group)
        else:
            norms = norms.pow(norm_type or 1.0)
            dist.all_reduce(norms, group=self._group)
            norms = norms.pow(1.0 / (norm_type or 1.0))
        total = torch.linalg.vector_norm(norms, norm_type)
        factor = clipping_factor(total, max_norm)
        for grad in grads:
            grad.mul_(factor.to(grad.device))
        return total

    def clip_grad_value(self, optimizer: Optimizer, max_value: float) -> None:
        """Limit the absolute value of each element of the gradients."""
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                _local(parameter.grad).clamp_(-max_value, max_value)

    def start_unscaling(self, optimizer: Optimizer, *_: Any) -> Any:
        """Make a gradient scaler divide this rank's rows. Returns a function to call afterwards with a scalar."""
        self._enter(optimizer)

        def finish(found: Tensor) -> None:
            self._leave(optimizer)
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)

        return finish


def _local(value: Any) -> Tensor:
    """Return this rank's part of a ``DTensor``, which shares its memory."""
    with torch.no_grad():
        local: Tensor = value.to_local() if isinstance(value, DTensor) else value
        return local.detach()


def _rename(optimizer: Optimizer, names: dict[Tensor, Tensor]) -> None:
    """Replace the parameters that key the state of an optimizer, in the same order."""
    state = {names.get(key, key) if isinstance(key, Tensor) else key: value for key, value in optimizer.state.items()}
    optimizer.state.clear()
    optimizer.state.update(state)
