"""A schedule that runs the backward passes of micro-batches before that of their common loss."""

import random
from functools import partial
from typing import Any

import pytest
import torch
from stage_parts import pipelined
from torch import Tensor, nn

from strategies.pipeline.stage.layers import PassContext


class Scaling(torch.autograd.Function):
    """The identity, whose gradient is that of the result times a factor; ``None`` gives no gradient at all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float | None) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None if ctx.factor is None else ctx.factor * grad, None


@pytest.mark.parametrize("factor", [1.0, -3.0, 0.0, None])
def test_the_gradient_of_the_loss_scales_all_gradients(factor: float | None) -> None:
    torch.manual_seed(0)
    layer, rows = nn.Linear(3, 2), torch.randn(4, 3)
    (wanted,) = torch.autograd.grad(layer(rows).square().mean(), layer.weight)
    with pipelined(module := nn.Sequential(layer), microbatches=2, schedule="1f1b") as pipeline:
        codes = [partial(lambda part: module(part).square().mean(), part) for part in rows.chunk(2)]
        loss = pipeline.interleave(codes, [0.5, 0.5], PassContext.capture("cpu"))
        Scaling.apply(loss, factor).backward()
    torch.testing.assert_close(layer.weight.grad, wanted * (factor or 0.0))


def test_code_that_draws_leaves_the_random_state_of_the_process() -> None:
    torch.manual_seed(0)
    random.seed(0)
    python_state, drawn = random.getstate(), []

    def code(part: Tensor) -> Tensor:
        drawn.append(torch.rand(1).item() + random.random())
        return module(part).square().mean()

    with pipelined(module := nn.Sequential(nn.Linear(3, 2)), microbatches=2, schedule="1f1b") as pipeline:
        codes = [partial(code, part) for part in torch.ones(4, 3).chunk(2)]
        state = torch.get_rng_state()
        pipeline.interleave(codes, [0.5, 0.5], PassContext.capture("cpu"))
        assert torch.equal(torch.get_rng_state(), state) and random.getstate() == python_state
    assert drawn[0] != drawn[1]
