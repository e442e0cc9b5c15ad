"""Gradient clipping over all stages of a pipeline, and the norms of gradients on which it rests.

driver    norms of the gradients of each stage, replica and part ──▶ total norm ──▶ factor ──▶ gradients of all stages
"""

import warnings
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from strategies.optim.gradients import clamp_gradients, clipping_factor, norms_of_gradients, scale_gradients
from strategies.optim.restricted import parameters_of
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.optim.optimizers import PipelineOptimizers
from strategies.sharding.divided_layers import tensor_group


def clip_grad_norm(
    optimizers: PipelineOptimizers, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale the gradients of all stages so that their total norm is at most ``max_norm``.

    Combines the norms of single parameters in the order of ``torch.nn.utils.clip_grad_norm_``.

    Args:
        optimizers: The optimizers of the pipeline.
        optimizer: The optimizer whose parameters are clipped.
        max_norm: The largest total norm.
        norm_type: The p of the p-norm.

    Returns:
        The norm before clipping, a scalar.
    """
    k, own = optimizers.number_of(optimizer), parameters_of(optimizer)
    optimizers.prepare()
    norms = _norms(optimizers, k, norm_type)
    if optimizers.shared_steps is not None:
        norms = optimizers.shared_steps.all_norms(norms, own)
    if optimizers.divided is not None:
        norms |= optimizers.divided.whole_norms(own, norms, norm_type, tensor_group())
    if not norms:
        return torch.zeros(())
    device = next((p.device for p in own if not p.is_meta), torch.device("cpu"))
    total = torch.linalg.vector_norm(torch.stack([norms[n].to(device) for n in sorted(norms)]), norm_type)
    if not (optimizers.skips_infinite_steps or total.isfinite()):
        _warn(optimizers, total, [own[number] for number in sorted(norms) if not norms[number].isfinite()])
    factor = clipping_factor(total, max_norm)
    scale_gradients(own, factor)
    for remote in optimizers.remotes:
        remote.send(StageCommands.change_grads, k, partial(scale_gradients, factor=factor.cpu()))
    return total


def clip_grad_value(optimizers: PipelineOptimizers, optimizer: Optimizer, limit: float) -> None:
    """Clamp every element of the gradients of all stages to ``[-limit, limit]``."""
    optimizers.prepare()
    clamp_gradients(parameters_of(optimizer), limit)
    for remote in optimizers.remotes:
        clamp = partial(clamp_gradients, limit=limit)
        remote.send(StageCommands.change_grads, optimizers.number_of(optimizer), clamp)


def check_equal_gradients(optimizers: PipelineOptimizers) -> None:
    """Check that the pipelines that divide parameters have the same gradients of all other parameters.

    Raises:
        RuntimeError: If they have not: they have computed with different batches, or a plan lacks a layer.
    """
    divided = optimizers.divided
    assert divided is not None
    for k, optimizer in enumerate(optimizers.optimizers):
        own, norms = parameters_of(optimizer), _norms(optimizers, k, 2.0)
        if (number := divided.first_different(own, norms, tensor_group())) is not None:
            raise RuntimeError(
                "the pipelines of tensor_parallel_size compute different gradients for "
                f"{optimizers.locate(own[number])}, of which each has the whole. Either they got different batches "
                "(each runs the whole script: draw the data from a fixed seed), or this layer lies between a layer "
                "with the style 'colwise' and one with 'rowwise', and needs the style "
                "'replicated_with_grad_allreduce' in the plan."
            )


def _norms(optimizers: PipelineOptimizers, k: int, norm_type: float) -> dict[int, Tensor]:
    """Return the norms of the gradients in this pipeline, by the number of the parameter in an optimizer."""
    answers = [remote.ask(StageCommands.grad_norms, k, norm_type) for remote in optimizers.remotes]
    here = norms_of_gradients(parameters_of(optimizers.optimizers[k]), norm_type)
    norms = {number: norm for number, norm in enumerate(here) if norm is not None}
    for answer in answers:
        norms.update(answer.wait())
    return norms


def _warn(optimizers: PipelineOptimizers, total: Tensor, culprits: list[Tensor]) -> None:
    listed = [optimizers.locate(parameter) for parameter in culprits[:3]]
    more = f" and {len(culprits) - 3} more" if len(culprits) > 3 else ""
    warnings.warn(
        f"the norm of the gradients is {total.item()}: not finite are those of {'; '.join(listed)}{more}",
        stacklevel=3,
    )
