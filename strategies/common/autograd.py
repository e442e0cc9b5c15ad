"""A computation with a backward pass of its own, as one node of the autograd graph."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from strategies.common.torch_compat import is_computed_in_this_pass, tree_flatten, tree_unflatten

Tree = TypeVar("Tree")

Backward = Callable[[Sequence[Tensor | None], Sequence[Tensor]], Sequence[Tensor | None]]


def with_backward(outputs: Tree, wanted: Sequence[bool], inputs: Sequence[Tensor], backward: Backward) -> Tree:
    """Give results that were computed without autograd a place in its graph.

    Args:
        outputs: The results, tensors in any nesting.
        wanted: For each tensor among the outputs, whether it requires a gradient.
        inputs: The tensors that require a gradient and from which the outputs were computed; may be empty.
        backward: Takes the gradient of each output that requires one (``None`` if there is none) and the inputs;
            returns the gradients of the inputs.

    Returns:
        ``outputs`` with tensors that are results of one node of the graph.
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
