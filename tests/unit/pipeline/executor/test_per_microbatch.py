"""A schedule that runs the backward passes of micro-batches before that of their common loss."""

import random
import time
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from stage_parts import pipelined
from torch import Tensor, nn
from undisturbed import until_undisturbed

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


class Storing(nn.Linear):
    """Stores a loss of its own in an attribute."""

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        self.own_loss = output.square().mean()
        return output


def loss_of(module: nn.Sequential, scale: nn.Parameter | None, part: Tensor) -> Tensor:
    """A loss of the output, of a weight of the last stage, of what a layer there has stored, and of the input."""
    x = part if scale is None else part * scale
    last, y = module[-1], module(x)
    return y.exp().mean() + last.weight.pow(4).sum() + last.own_loss + x.mean()


@pytest.mark.parametrize("trains_input", [False, True])
def test_gradients_are_those_of_a_loop_over_micro_batches(trains_input: bool) -> None:
    torch.manual_seed(0)
    module, rows = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Storing(3, 2)), torch.randn(9, 3)
    scale = nn.Parameter(torch.randn(3)) if trains_input else None
    own = [] if scale is None else [scale]
    plain, weights = deepcopy(module), [0.2, 0.3, 0.5]
    for part, weight in zip(rows.chunk(3), weights, strict=True):
        loss = loss_of(plain, scale, part)
        loss.backward(torch.full_like(loss, weight))
    wanted = [p.grad for p in (*plain.parameters(), *own)]
    for parameter in own:
        parameter.grad = None
    with pipelined(module, microbatches=3, schedule="1f1b", checkpoint="never") as pipeline:
        codes = [partial(loss_of, module, scale, part) for part in rows.chunk(3)]
        pipeline.interleave(codes, weights, PassContext.capture("cpu")).backward()
    found = [p.grad for p in (*module.parameters(), *own)]
    # With a graph before the call, the weight gets its gradients from two calls of autograd: sums in another order.
    tolerance = {} if trains_input else {"rtol": 0.0, "atol": 0.0}
    for grad, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(grad, expected, **tolerance)


class Slow(torch.autograd.Function):
    """The identity, whose backward pass sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grad, None


class SlowBackward(Storing):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(Slow.apply(input, 0.05))


def test_a_recorded_pass_computes_the_same_and_tells_the_loss_from_the_layers() -> None:
    torch.manual_seed(0)
    module, rows = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), SlowBackward(3, 2)), torch.randn(9, 3)

    def gradients(pipeline: Any) -> list[Tensor | None]:
        codes = [partial(loss_of, module, None, part) for part in rows.chunk(3)]
        pipeline.interleave(codes, [0.2, 0.3, 0.5], PassContext.capture("cpu")).backward()
        found = [p.grad for p in module.parameters()]
        module.zero_grad()
        return found

    def records_of_a_pass() -> list[Any]:
        with pipelined(module, microbatches=3, schedule="1f1b", checkpoint="never") as pipeline:
            alone = gradients(pipeline)
            recording = pipeline.start_recording(0)
            for recorded, expected in zip(gradients(pipeline), alone, strict=True):
                assert torch.equal(recorded, expected)
            recording.stop()
            taken = recording.take()
        assert taken is not None
        return [record for record in taken[-1].records if record.kind in ("F", "loss", "B")]

    def check_times(records: Any) -> None:
        for code, layers in zip(records[1::3], records[2::3], strict=True):
            assert layers.computed - layers.received >= 0.05 > code.computed - code.received

    records = until_undisturbed(records_of_a_pass, check_times)
    assert [(kind, m) for kind, m, *_ in records] == [(kind, m) for m in range(3) for kind in ("F", "loss", "B")]
    assert all(code.end <= layers.begin for code, layers in zip(records[1::3], records[2::3], strict=True))


def test_code_may_change_what_it_has_returned() -> None:
    torch.manual_seed(0)
    returned: list[Tensor] = []

    def code(part: Tensor) -> Tensor:
        for loss in returned:
            loss.detach().zero_()
        returned.append(module(part).square().mean())
        return returned[-1]

    module, rows = nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3)
    wanted = module(rows).square().mean().item()
    with pipelined(module, microbatches=2, schedule="1f1b") as pipeline:
        codes = [partial(code, part) for part in rows.chunk(2)]
        assert pipeline.interleave(codes, [0.5, 0.5], PassContext.capture("cpu")).item() == pytest.approx(wanted)
