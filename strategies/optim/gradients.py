"""Norms of gradients that several processes put together, and scaling by them."""

from collections.abc import Iterable

import torch
from torch import Tensor

from strategies.common.torch_compat import norms_of


def norms_of_gradients(parameters: Iterable[Tensor], norm_type: float) -> list[Tensor | None]:
    """The norm of the gradient of each parameter, a scalar; ``None`` where there is no gradient."""
    listed = list(parameters)
    grads = [p.grad for p in listed if p.grad is not None]
    norms = iter(norms_of(grads, norm_type) if grads else ())
    return [None if p.grad is None else next(norms) for p in listed]


def clipping_factor(total_norm: Tensor, max_norm: float) -> Tensor:
    """Return what ``torch.nn.utils.clip_grad_norm_`` multiplies gradients by whose common norm is ``total_norm``."""
    return torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)


def scale_gradients(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply the gradients that there are by a scalar, which may be on another device."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.device))
