"""Gradients that exist before their time: kept apart from ``.grad`` until a later backward pass says how they count.

Interleaved schedules compute gradients while the loss is being computed. Training loops clear and accumulate ``.grad``
after that and scale the loss, so what is there must stay as it is until they call ``backward``.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class GatheredGradients:
    """The gradients of one pass.

    Args:
        parameters: Whose gradients.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._grads: list[Tensor | None] = [None] * len(self._parameters)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Within this, ``.grad`` holds these gradients only; afterwards what was there before."""
        before = [parameter.grad for parameter in self._parameters]
        self._swap([None] * len(before))
        try:
            yield
        finally:
            self._grads = self._swap(before)

    @torch.no_grad()
    def release(self, factor: float) -> None:
        """Adds these gradients, times ``factor``, to ``.grad``; this can be done once."""
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            if grad is not None:
                scaled = grad if factor == 1.0 else grad.mul_(factor)
                parameter.grad = scaled if parameter.grad is None else parameter.grad.add_(scaled)
        self._grads = [None] * len(self._parameters)

    def _swap(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        before = [parameter.grad for parameter in self._parameters]
        for parameter, grad in zip(self._parameters, grads, strict=True):
            parameter.grad = grad
        return before
