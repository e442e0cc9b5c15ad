"""Weight gradients that wait equal those of a whole backward pass, and only those wait that may."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint

from strategies.pipeline.stage.layers import has_large_weights
from strategies.pipeline.stage.weight_gradients import LARGE_BYTES, DelayedWeights, WeightGradients

pytestmark = pytest.mark.usefixtures("float64")


class Attention(nn.MultiheadAttention):
    """Of one input, so that one product makes queries, keys and values."""

    def __init__(self) -> None:
        super().__init__(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x)[0]


class Addmm(nn.Module):
    """The linear layer of GPT-2 in ``transformers``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class Queried(nn.Module):
    """Attention pooling: a linear function with one output and no dimension for it."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.query)


LAYERS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Linear(4, 3), (2, 4)),
    (lambda: nn.Linear(4, 3, bias=False), (4,)),
    (lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 3)), (2, 5, 4)),
    (Addmm, (2, 4)),
    (Attention, (2, 5, 4)),
    (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 7)),
    (lambda: nn.Conv2d(4, 6, (3, 2), dilation=(1, 2), bias=False), (2, 4, 7, 6)),
    (lambda: nn.Conv3d(1, 2, 2, padding=(1, 0, 1)), (2, 1, 3, 4, 5)),
]


def gradients(layer: nn.Module, x: Tensor, delays: DelayedWeights | None) -> tuple[list[Tensor | None], int]:
    """The gradients of the input and of the parameters, and the number of parameters that had to wait."""
    x = x.clone().requires_grad_()
    if delays is None:
        layer(x * 1).square().sum().backward()
        return [x.grad, *(p.grad for p in layer.parameters())], 0
    with delays:
        y = layer(x * 1)
    delays.left = left = WeightGradients()
    y.square().sum().backward()
    delays.left = None
    num = sum(p.grad is None for p in layer.parameters())
    left.compute()
    return [x.grad, *(p.grad for p in layer.parameters())], num


def check(layer: nn.Module, x: Tensor, waiting: int, tolerance: float = 1e-12) -> None:
    expected, _ = gradients(copy.deepcopy(layer), x, None)
    actual, num = gradients(layer, x, DelayedWeights())
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert num == waiting


@pytest.mark.parametrize(("make", "shape"), LAYERS)
def test_gradients(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    layer = make()
    check(layer, torch.randn(shape), len(list(layer.parameters())))


def test_a_linear_function_with_one_output_does_not_wait() -> None:
    check(Queried(), torch.randn(2, 5, 4), 0)


@pytest.mark.parametrize("shape", [(), (1,), (1, 4)])
def test_a_linear_function_whose_bias_is_broadcast_does_not_wait(shape: tuple[int, ...]) -> None:
    layer = nn.Linear(4, 4)
    layer.bias = nn.Parameter(torch.randn(shape))
    check(layer, torch.randn(2, 4), 0)


def test_attention_uses_functions_that_the_user_has_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are replaced after the import, and is left alone if a tensor has its own rules."""
    layer, x, calls = Attention(), torch.randn(2, 5, 4), list[Tensor]()
    original = nn.functional.softmax

    def softmax(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(scores)
        return original(scores, *args, **kwargs)

    monkeypatch.setattr(nn.functional, "softmax", softmax)
    check(layer, x, 4)
    assert len(calls) >= 2  # a plain run, and one within the mode, in which torch calls it once more

    class Own(Tensor):
        functions: ClassVar[list[object]] = []

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.functions.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    own = x.as_subclass(Own)
    with DelayedWeights():
        nn.functional.multi_head_attention_forward(
            *(own, own, own, 4, 2, layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0),
            *(layer.out_proj.weight, layer.out_proj.bias),
        )
    assert nn.functional.multi_head_attention_forward in Own.functions


@pytest.mark.parametrize("padding", [None, 2, -1])
@pytest.mark.parametrize("rows", [4, 50])  # fewer and more than the table has
def test_embeddings(padding: int | None, rows: int) -> None:
    layer, weights = nn.Embedding(9, 3, padding_idx=padding), torch.randn(rows, 1)
    tokens = torch.randint(9, (rows, 2))
    tokens[0] = torch.tensor([2, 8])
    plain, delays = copy.deepcopy(layer), DelayedWeights()
    for _ in range(2):
        (plain(tokens).sum(2) * weights).square().sum().backward()
        with delays:
            y = layer(tokens)
        delays.left = left = WeightGradients()
        before = layer.weight.grad
        (y.sum(2) * weights).square().sum().backward()
        assert not left.tensors()  # a layer may change its tokens in place
        delays.left = None
        assert before is None or layer.weight.grad is before  # added in place
        torch.testing.assert_close(layer.weight.grad, plain.weight.grad, rtol=1e-12, atol=1e-12)


def test_embeddings_that_cannot_wait() -> None:
    """Settings with another gradient, or that change the weight in the forward pass."""
    settings: list[dict[str, object]] = [{"sparse": True}, {"scale_grad_by_freq": True}, {"max_norm": 0.5}]
    for kind in settings:
        layer = nn.Embedding(9, 3, **kind)
        plain, delays = copy.deepcopy(layer), DelayedWeights()
        tokens = torch.randint(9, (4, 2))
        plain(tokens).square().sum().backward()
        with delays:
            y = layer(tokens)
        delays.left = WeightGradients()
        y.square().sum().backward()
        assert torch.equal(layer.weight.grad.to_dense(), plain.weight.grad.to_dense()), kind
    with DelayedWeights(), pytest.raises(AssertionError, match="Padding_idx must be within num_embeddings"):
        embedding(tokens, layer.weight, padding_idx=9)


def test_a_sparse_and_a_delayed_gradient_of_one_weight() -> None:
    """An embedding with sparse gradients, whose weight a head uses, too."""
    table, tokens = nn.Embedding(9, 3, sparse=True), torch.randint(9, (4,))
    found = []
    for delays in (None, DelayedWeights()):
        table.weight.grad = None
        for _ in range(2):
            if delays is None:
                y = table(tokens) @ table.weight.T
            else:
                with delays:
                    y = nn.functional.linear(table(tokens), table.weight)
                delays.left = left = WeightGradients()
            y.square().sum().backward()
            if delays is not None:
                left.compute()
        found.append(table.weight.grad.to_dense())
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("make", "shape"), LAYERS)
@pytest.mark.parametrize("at_once", [False, True])
def test_micro_batches_add_up_in_place(make: Callable[[], nn.Module], shape: tuple[int, ...], at_once: bool) -> None:
    layer, delays = make(), DelayedWeights()
    plain, parameters = copy.deepcopy(layer), list(layer.parameters())
    waiting, kept = [], []
    for m in range(3):
        x = torch.randn(shape, requires_grad=True)
        plain(x).square().sum().backward()
        with delays:
            y = layer(x)
        delays.left = WeightGradients(at_once=at_once)
        y.square().sum().backward()
        waiting.append(delays.left)
        if at_once:
            kept.append([p.grad for p in parameters])
            assert m == 0 or all(now is first for now, first in zip(kept[m], kept[0], strict=True))
    assert at_once or all(p.grad is None for p in parameters)
    for left in waiting:
        left.compute()
    expected = [p.grad for p in plain.parameters()]
    torch.testing.assert_close([p.grad for p in parameters], expected, rtol=1e-12, atol=1e-12)


def test_a_hook_that_comes_after_the_forward_pass() -> None:
    layer, delays, seen = nn.Linear(4, 3), DelayedWeights(), list[Tensor]()
    with delays:
        y = layer(torch.randn(2, 4))
    layer.weight.register_post_accumulate_grad_hook(seen.append)
    delays.left = WeightGradients()
    y.sum().backward()
    assert len(seen) == 1 and seen[0] is layer.weight and layer.weight.grad is not None


def test_only_large_weights() -> None:
    small, large = nn.Linear(4, 4), nn.Linear(4, LARGE_BYTES // 4 // 8)  # float64
    assert has_large_weights([large]) and not has_large_weights([small])
    delays, x = DelayedWeights(LARGE_BYTES), torch.randn(2, 4)
    with delays:
        y = large(small(x))
    delays.left = left = WeightGradients()
    y.square().sum().backward()
    assert small.weight.grad is not None and large.weight.grad is None
    left.compute()
    plain = copy.deepcopy(large).requires_grad_()
    plain.zero_grad()
    plain(small(x)).square().sum().backward()
    torch.testing.assert_close(large.weight.grad, plain.weight.grad, rtol=1e-12, atol=1e-12)
    large.requires_grad_(False)
    assert not has_large_weights([large])


@pytest.mark.parametrize(("make", "shape"), LAYERS)
def test_without_waiting(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """A whole backward pass over the same graph, and one that goes on over it."""
    layer, x = make(), torch.randn(shape)
    plain = copy.deepcopy(layer)
    found = []
    for own, mode in ((plain, None), (layer, DelayedWeights())):
        given = x.clone().requires_grad_()
        if mode is None:
            y = own(given * 1)
        else:
            with mode:
                y = own(given * 1)
        (slope,) = torch.autograd.grad(y.square().sum(), given, create_graph=True)
        slope.square().sum().backward()
        found.append([given.grad, *(p.grad for p in own.parameters() if p.grad is not None)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


def test_frozen_parameters() -> None:
    layer = nn.Linear(4, 3)
    layer.bias.requires_grad_(False)
    check(layer, torch.randn(2, 4), 2)  # the bias never gets a gradient
    layer = nn.Linear(4, 3)
    layer.weight.requires_grad_(False)
    check(layer, torch.randn(2, 4), 1)


class FirstOutput(nn.Sequential):
    """Of a recurrent layer."""

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self[0](x)[0]
        return outputs


class SelfDecoder(nn.TransformerDecoderLayer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: FirstOutput(nn.RNN(4, 3, 2)), (5, 2, 4)),
        (lambda: FirstOutput(nn.GRU(4, 3, bidirectional=True)), (5, 2, 4)),
        (lambda: FirstOutput(nn.LSTM(4, 3, 2, proj_size=2)), (5, 2, 4)),
        (lambda: nn.GRUCell(4, 3), (2, 4)),
        (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (2, 4, 5, 6)),
        (lambda: nn.Sequential(nn.LayerNorm(4), nn.RMSNorm(4), nn.PReLU(2)), (3, 2, 4)),
        (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.BatchNorm1d(4), nn.InstanceNorm1d(4, affine=True)), (3, 4, 5)),
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), (2, 4)),
        (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, norm_first=True), (2, 5, 4)),
        (lambda: SelfDecoder(4, 2, 8, dropout=0.0), (5, 2, 4)),
    ],
)
def test_layers_of_which_no_or_only_some_weights_wait(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer, x = make(), torch.randn(shape)
    expected, _ = gradients(copy.deepcopy(layer), x, None)
    actual, _ = gradients(layer, x, DelayedWeights())
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_what_cannot_wait() -> None:
    """Hooks on parameters, weights that are computed, layers that recompute themselves, and ``torch.func``."""
    hooked = nn.Linear(4, 3)
    seen: list[Tensor] = []
    hooked.weight.register_hook(seen.append)
    check(hooked, torch.randn(2, 4), 0)
    assert len(seen) == 1
    check(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), torch.randn(2, 4), 0)

    class Recomputed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    check(Recomputed(4, 3), torch.randn(2, 4), 0)

    class Mapped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(super().forward)(x)

    check(Mapped(4, 3), torch.randn(2, 4), 0)


def test_a_weight_that_is_used_twice() -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.tanh(super().forward(x))) + x @ self.weight

    layer, x = Twice(4, 4), torch.randn(2, 4)
    check(layer, x, 1)  # the product computes its part of the gradient of the weight at once


def test_autocast() -> None:
    """The products are those that autocast computes, and so are their gradients."""
    torch.set_default_dtype(torch.float32)
    layer, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)), torch.randn(6, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(layer, x, 4, tolerance=0.02)
        with DelayedWeights():
            y = layer(x.requires_grad_())
    assert y.dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match=r"a layer differentiates a gradient \(create_graph=True\) under autocast"):
        torch.autograd.grad(y.float().sum(), x, create_graph=True)


def test_a_backward_pass_within_a_backward_pass_adds_nothing() -> None:
    """Such as that of a layer that finds a fixed point, whose hook on its output solves for the gradient."""
    found = []
    plain = nn.Linear(4, 4)
    for layer, delays in ((copy.deepcopy(plain), None), (plain, DelayedWeights())):
        x = torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()
        with delays or nullcontext():
            z = layer(x)
            again = z.detach().requires_grad_()
            once_more = layer(again)
        z.register_hook(partial(solved, once_more, again, layer.weight))
        if delays is not None:
            delays.left = WeightGradients(at_once=True)
        z.square().sum().backward()
        found.append([x.grad, *(p.grad for p in layer.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


def solved(output: Tensor, input: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    through, of_weight = torch.autograd.grad(output, (input, weight), grad, retain_graph=True)
    (only,) = torch.autograd.grad(output, input, grad, retain_graph=True)
    return grad + through + only + of_weight.sum()


def test_a_weight_that_its_layer_changes_in_place() -> None:
    """Autograd does not need the values of an embedding's weight either."""
    found = []
    plain = nn.Embedding(5, 3)
    for layer, delays in ((copy.deepcopy(plain), None), (plain, DelayedWeights())):
        outputs = []
        for microbatch in ([0, 1, 2], [2, 4, 0]):
            with torch.no_grad():
                layer.weight[0].zero_()
            with delays or nullcontext():
                outputs.append(layer(torch.tensor(microbatch)))
        if delays is not None:
            delays.left = WeightGradients(at_once=True)
        for output in outputs:
            output.square().sum().backward()
        found.append(layer.weight.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


class Updates(nn.Module):
    """A linear layer and an embedding of buffers that each forward pass updates."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(4, 4), nn.Embedding(5, 4)
        self.register_buffer("memory", torch.ones(1, 4))
        self.register_buffer("step", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.memory.mul_(1.5)
        self.step.add_(1)
        return torch.tanh(x + self.linear(self.memory) + self.table(self.step))


def test_buffers_that_the_next_forward_pass_updates() -> None:
    layer, delays, left = Updates(), DelayedWeights(), WeightGradients()
    plain = copy.deepcopy(layer)
    for x in torch.randn(3, 2, 4):
        plain(x).square().sum().backward()
        with delays:
            y = layer(x)
        left.compute()
        delays.left = left = WeightGradients()
        y.square().sum().backward()
    left.compute()
    expected = [p.grad for p in plain.parameters()]
    torch.testing.assert_close([p.grad for p in layer.parameters()], expected, rtol=1e-12, atol=1e-12)


def test_an_input_that_is_changed_before_the_weight_gradient() -> None:
    """Such as an element of a cache that is part of the graph."""
    layer, x, delays = nn.Linear(4, 3), torch.randn(2, 4, requires_grad=True), DelayedWeights()
    with delays:
        y = layer(x)
    delays.left = left = WeightGradients()
    y.sum().backward()
    x.detach().zero_()
    message = r"has been modified by an inplace operation: the input \[2, 4\] of a layer with a weight \[3, 4\]"
    with pytest.raises(RuntimeError, match=message):
        left.compute()


def test_a_bias_that_was_frozen_in_the_forward_pass() -> None:
    layer, delays = nn.Linear(4, 3), DelayedWeights()
    layer.bias.requires_grad_(False)
    with delays:
        output = layer(torch.ones(2, 4))
    layer.bias.requires_grad_(True)
    delays.left = WeightGradients(at_once=True)
    output.sum().backward()
    assert layer.weight.grad is not None and layer.bias.grad is None


def test_a_gradient_of_a_gradient_under_autocast_and_whole_backward_passes() -> None:
    """A gradient under autocast cannot be added in place, so a large weight is left to autograd."""
    torch.set_default_dtype(torch.float32)
    layer, x = nn.Linear(4, LARGE_BYTES // 4 // 4), torch.randn(2, 4, requires_grad=True)
    delays = DelayedWeights(LARGE_BYTES)
    delays.left = WeightGradients(at_once=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), delays:
        y = layer(x)
    (slope,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32


def test_a_compiled_function_sees_no_mode() -> None:
    layer = nn.Linear(4, 3)
    check(layer, torch.randn(2, 4), 2)
    compiled = torch.compile(copy.deepcopy(layer), backend="eager")
    expected = layer(torch.ones(2, 4))
    with DelayedWeights():
        torch.testing.assert_close(compiled(torch.ones(2, 4)), expected)
