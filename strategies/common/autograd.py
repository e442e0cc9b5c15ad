"""Autograd nodes with a custom backward function, and gradients that are added to ``.grad`` later."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from strategies.common.torch_compat import is_computed_in_this_pass, tree_flatten, tree_unflatten

Tree = TypeVar("Tree")

Backward = Callable[[Sequence[Tensor | None], Sequence[Tensor]], Sequence[Tensor | None]]


def with_backward(outputs: Tree, wanted: Sequence[bool], inputs: Sequence[Tensor], backward: Backward) -> Tree:
    """Insert results that were computed without autograd into the autograd graph.

    Args:
        outputs: The results, tensors in any nesting.
        wanted: For each tensor among the outputs, whether it requires a gradient.
        inputs: The tensors that require a gradient and from which the outputs were computed; may be empty.
        backward: Takes the gradient of each output that requires a gradient (``None`` if it has none) and the inputs;
            returns the gradients of the inputs.

    Returns:
        ``outputs`` with tensors that are the outputs of one node of the graph.
    """
    leaves, spec = tree_flatten(outputs)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    anchor = torch.zeros((), requires_grad=True)  # so that the node runs even if no input requires a gradient
    tensors = _Node.apply(backward, [leaves[place] for place in places], wanted, anchor, *inputs)
    for place, tensor in zip(places, tensors, strict=True):
        leaves[place] = tensor
    return cast(Tree, tree_unflatten(leaves, spec))


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        backward: Backward,
        outputs: Sequence[Tensor],
        wanted: Sequence[bool],
        anchor: Tensor,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.backward_part, ctx.wanted, ctx.inputs = backward, wanted, [t.detach() for t in inputs]
        ctx.set_materialize_grads(False)
        detached = tuple(t.detach() for t in outputs)
        ctx.mark_non_differentiable(*[t for t, flag in zip(detached, wanted, strict=True) if not flag])
        return detached

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        anchor = next(node for node, _ in ctx.next_functions if node is not None)
        if not is_computed_in_this_pass(anchor):
            raise RuntimeError(
                "torch.autograd.grad and backward(inputs=...) cannot go through a pipeline or a remote module, which "
                "add their gradients to .grad; call backward() on the loss"
            )
        wanted = [grad for grad, flag in zip(grads, ctx.wanted, strict=True) if flag]
        return None, None, None, None, *ctx.backward_part(wanted, ctx.inputs)


def scale_(grad: Tensor, factor: float) -> None:
    """Multiply a gradient in place. A factor of 0 gives zeros, also where the gradient is infinite or NaN."""
    if factor == 0.0:
        grad.zero_()
    elif factor != 1.0:
        grad.mul_(factor)


class GatheredGradients:
    """Gradients of one pass, kept separate from ``.grad`` until a later ``backward`` call determines their factor.

    Interleaved schedules compute gradients together with the loss. Training loops clear, accumulate and scale ``.grad``
    only after that, so ``.grad`` must not change until the loop calls ``backward``.

    Args:
        parameters: The parameters whose gradients are kept.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._grads: list[Tensor | None] = [None] * len(self._parameters)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Context in which ``.grad`` holds only these gradients; afterwards it holds its previous value again."""
        before = [parameter.grad for parameter in self._parameters]
        self._swap([None] * len(before))
        try:
            yield
        finally:
            self._grads = self._swap(before)

    @torch.no_grad()
    def release(self, factor: float, kept: float = 1.0) -> None:
        """Set ``.grad`` to ``kept * .grad + factor * gradients``. Can be called once.

        A factor of 0 also removes values that are not finite.
        """
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            if parameter.grad is not None:
                scale_(parameter.grad, kept)
            if grad is not None:
                scale_(grad, factor)
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
        self._grads = [None] * len(self._parameters)

    def _swap(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        before = [parameter.grad for parameter in self._parameters]
        for parameter, grad in zip(self._parameters, grads, strict=True):
            parameter.grad = grad
        return before
