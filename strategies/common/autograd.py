"""A computation with a backward pass of its own, as one node of autograd."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from strategies.common.torch_compat import is_computed_in_this_pass

Backward = Callable[[Sequence[Tensor | None], Sequence[Tensor]], Sequence[Tensor | None]]


def with_backward(
    outputs: Sequence[Tensor], wanted: Sequence[bool], inputs: Sequence[Tensor], backward: Backward
) -> tuple[Tensor, ...]:
    """Gives results that were computed without autograd a place in its graph.

    Args:
        outputs: The results.
        wanted: Which of them want a gradient.
        inputs: The tensors that they were computed from and that want a gradient; there need not be any.
        backward: Takes the gradient of each output that wants one, ``None`` where nothing came, and the inputs; returns
            the gradients of the inputs.

    Returns:
        Tensors that stand for ``outputs``.
    """
    anchor = torch.zeros((), requires_grad=True)  # there is a backward part even if no input wants a gradient
    return _Node.apply(backward, outputs, wanted, anchor, *inputs)


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
