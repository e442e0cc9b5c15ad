"""Norms of gradients that are distributed over processes, and clipping by them.

``clip_grad_norm`` puts them together: over the stages of a pipeline in :mod:`strategies.pipeline.optim.clipping`,
over ranks in :mod:`strategies.sharding.optimizers` and, under stage 3 of ZeRO, in
:mod:`strategies.sharding.row_optimizers`.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from strategies.common.torch_compat import norms_of


def norms_of_gradients(parameters: Iterable[Tensor], norm_type: float) -> list[Tensor | None]:
    """Return the norm of the gradient of each parameter, a scalar, or ``None`` if it has no gradient."""
    listed = list(parameters)
    grads = [p.grad for p in listed if p.grad is not None]
    norms = iter(norms_of(grads, norm_type) if grads else ())
    return [None if p.grad is None else next(norms) for p in listed]


def clipping_factor(total_norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor by which ``torch.nn.utils.clip_grad_norm_`` scales gradients of norm ``total_norm``."""
    return torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)


def scale_gradients(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply each gradient in place by ``factor``, a scalar that may be on another device."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.device))


def clamp_gradients(parameters: Iterable[Tensor], limit: float) -> None:
    """Clamp each element of the gradients to ``[-limit, limit]``.

    Unlike ``torch.nn.utils.clip_grad_value_``, this does not fail if no parameter has a gradient, because other
    processes may have the gradients.
    """
    if with_gradients := [parameter for parameter in parameters if parameter.grad is not None]:
        nn.utils.clip_grad_value_(with_gradients, limit)


def add_gradient(parameters: Iterable[Tensor], grad: Tensor) -> None:
    """Add a tensor, which may be on another device, to the gradient of each parameter."""
    for parameter in parameters:
        added = grad.to(parameter.device)
        parameter.grad = added if parameter.grad is None else parameter.grad + added
