"""A pipeline of one stage, which starts no process, against the same layers called plainly, in float64."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from stage_parts import CPU, assert_same_gradients, pipelined
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from strategies.common.random_seeds import RandomStateKeeper, Seeds
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.schedule.tables import ActionTable, gpipe, one_f_one_b, recomputed, zb_h1
from strategies.pipeline.stage.edges import Mailbox
from strategies.pipeline.stage.layers import RECOMPUTE_MODES as MODES
from strategies.pipeline.stage.layers import is_recomputing
from strategies.pipeline.transport.link import Arrived


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def num_kept(pipeline: Pipeline) -> int:
    assert pipeline._running is not None
    return pipeline._running.executor.stage.num_kept


def total(value: Any) -> Tensor:
    """A loss of all outputs that weighs each element differently."""
    losses = [
        (t * torch.linspace(1, 2, t.numel()).view_as(t)).square().sum()
        for t in tree_leaves(value)
        if isinstance(t, Tensor) and t.requires_grad
    ]
    return sum(losses[1:], losses[0])


def assert_alike(layers: nn.Sequential, x: Any, **settings: Any) -> None:
    """Outputs, and gradients of parameters and inputs, twice in a row, are those of the plain layers."""
    plain = copy.deepcopy(layers)
    with pipelined(layers, **settings) as pipeline:
        for _ in range(2):
            given, same = leaves_of(x), leaves_of(x)
            # A layer that works in place must not find a leaf that requires a gradient.
            output = layers(tree_map(unleafed, given))
            expected = plain(tree_map(unleafed, same))
            torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
            for actual, wanted in zip(tree_leaves(output), tree_leaves(expected), strict=True):
                # What a layer detaches is only seen when it is run with gradients, so not before it is recomputed.
                assert not getattr(wanted, "requires_grad", False) or actual.requires_grad
            total(output).backward()
            total(expected).backward()
            for actual, wanted in zip(tree_leaves(given), tree_leaves(same), strict=True):
                if isinstance(wanted, Tensor):
                    torch.testing.assert_close(actual.grad, wanted.grad, rtol=1e-10, atol=1e-10)
            assert_same_gradients(layers, plain)
            assert num_kept(pipeline) == 0


def leaves_of(x: Any) -> Any:
    return tree_map(lambda t: t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t, x)


def unleafed(leaf: Any) -> Any:
    return leaf * 1 if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


class Layer(nn.Module):
    """Calls a function; for layers of one line."""

    def __init__(self, function: Any, *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.inner = function, nn.ModuleList(modules)

    def forward(self, x: Any) -> Any:
        return self.function(x, *self.inner)


class Counted(nn.Linear):
    """Counts its forward passes, and notes the rows of each."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(x.shape[0])
        return super().forward(x)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2))


EVERY_WAY = [(mode, pipelined) for mode in MODES for pipelined in (True, False)]
in_every_way = pytest.mark.parametrize(("checkpoint", "pipelined_backward"), EVERY_WAY)


# Parity


@pytest.mark.parametrize(("rows", "microbatches"), [(8, 4), (7, 4), (3, 8), (1, 4), (5, 1)])
@in_every_way
def test_an_mlp(rows: int, microbatches: int, checkpoint: str, pipelined_backward: bool) -> None:
    x = torch.randn(rows, 3)
    ways = {"microbatches": microbatches, "checkpoint": checkpoint, "pipelined_backward": pipelined_backward}
    assert_alike(mlp(), x, **ways)
    assert_alike(mlp(), x.requires_grad_(), **ways)


@pytest.mark.parametrize(("checkpoint", "pipelined_backward"), EVERY_WAY)
def test_a_first_layer_that_works_in_place(checkpoint: str, pipelined_backward: bool) -> None:
    ways = {"checkpoint": checkpoint, "pipelined_backward": pipelined_backward}
    for wants_gradient in (True, False):
        # Not a ReLU first: run twice on the same tensor by mistake, it would give the same.
        layers = nn.Sequential(Layer(lambda x: x.add_(1)), nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
        assert_alike(layers, torch.randn(7, 3).requires_grad_(wants_gradient), **ways)


@in_every_way
def test_tuples_none_and_integers(checkpoint: str, pipelined_backward: bool) -> None:
    layers = nn.Sequential(
        Layer(lambda x, embed: (embed(x["tokens"]), None, x["mask"], x["scale"]), nn.Embedding(7, 3)),
        Layer(lambda x, linear: (linear(x[0]) * x[3], x[1], x[2]), nn.Linear(3, 4)),
        Layer(lambda x: {"logits": x[0] * x[2][:, None], "nothing": x[1], "best": x[0].argmax(-1)}),
    )
    x = {"tokens": torch.randint(7, (9,)), "mask": torch.rand(9) > 0.5, "scale": torch.tensor(0.5)}
    assert_alike(layers, x, checkpoint=checkpoint, pipelined_backward=pipelined_backward)


@in_every_way
def test_some_inputs_want_a_gradient(checkpoint: str, pipelined_backward: bool) -> None:
    layers = nn.Sequential(
        Layer(lambda x, linear: (linear(x[0]) + x[1], x[2]), nn.Linear(3, 3)), Layer(lambda x: x[0] * x[1])
    )
    x = (torch.randn(7, 3), torch.randn(7, 3).requires_grad_(), torch.randn(7, 1).requires_grad_())
    assert_alike(layers, x, checkpoint=checkpoint, pipelined_backward=pipelined_backward)


@in_every_way
def test_an_input_that_is_not_used(checkpoint: str, pipelined_backward: bool) -> None:
    layers = nn.Sequential(Layer(lambda x, linear: linear(x[0]), nn.Linear(3, 3)), nn.Tanh())
    x = (torch.randn(7, 3).requires_grad_(), torch.randn(7, 1).requires_grad_())
    assert_alike(layers, x, checkpoint=checkpoint, pipelined_backward=pipelined_backward)


@in_every_way
def test_an_output_that_the_loss_does_not_use(checkpoint: str, pipelined_backward: bool) -> None:
    layers = nn.Sequential(nn.Linear(3, 4), Layer(lambda x, a, b: (a(x), b(x)), nn.Linear(4, 2), nn.Linear(4, 2)))
    plain, x = copy.deepcopy(layers), torch.randn(7, 3)
    total(plain(x)[1]).backward()
    with pipelined(layers, checkpoint=checkpoint, pipelined_backward=pipelined_backward) as pipeline:
        total(layers(x)[1]).backward()
        assert num_kept(pipeline) == 0
    assert_same_gradients(layers, plain)
    assert layers[1].inner[0].weight.grad is None


@pytest.mark.parametrize(("checkpoint", "pipelined_backward"), EVERY_WAY)
def test_an_output_that_needs_no_gradient(checkpoint: str, pipelined_backward: bool) -> None:
    layers = nn.Sequential(nn.Linear(3, 4), Layer(lambda x: (x.detach(), x * 2, torch.ones_like(x))))
    assert_alike(layers, torch.randn(7, 3), checkpoint=checkpoint, pipelined_backward=pipelined_backward)


@in_every_way
def test_frozen_layers(checkpoint: str, pipelined_backward: bool) -> None:
    layers = mlp()
    layers[0].requires_grad_(False)
    assert_alike(layers, torch.randn(7, 3), checkpoint=checkpoint, pipelined_backward=pipelined_backward)
    assert layers[0].weight.grad is None


def test_nothing_wants_a_gradient() -> None:
    layers = mlp().requires_grad_(False)
    with pipelined(layers) as pipeline:
        assert not layers(torch.randn(7, 3)).requires_grad
        assert num_kept(pipeline) == 0


def test_one_layer_at_several_places() -> None:
    tanh, linear = nn.Tanh(), nn.Linear(3, 3)
    assert_alike(nn.Sequential(linear, tanh, nn.Linear(3, 3), tanh, linear, tanh), torch.randn(7, 3))


@in_every_way
def test_two_calls_before_one_backward_pass(checkpoint: str, pipelined_backward: bool) -> None:
    layers = mlp()
    plain, a, b = copy.deepcopy(layers), torch.randn(7, 3), torch.randn(5, 3)
    (total(plain(a)) * total(plain(b))).backward()
    with pipelined(layers, checkpoint=checkpoint, pipelined_backward=pipelined_backward) as pipeline:
        (total(layers(a)) * total(layers(b))).backward()
        assert num_kept(pipeline) == 0
    assert_same_gradients(layers, plain)


def test_a_call_on_its_own_output() -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    plain, x = copy.deepcopy(layers), torch.randn(7, 3)
    total(plain(plain(x))).backward()
    with pipelined(layers):
        total(layers(layers(x))).backward()
    assert_same_gradients(layers, plain)


def test_a_second_backward_pass_of_the_same_output_is_refused() -> None:
    layers = mlp()
    with pipelined(layers):
        loss = total(layers(torch.randn(7, 3)))
        loss.backward(retain_graph=True)
        with pytest.raises(
            RuntimeError, match=r"has already run through the pipeline.*add the losses up and call backward once"
        ):
            loss.backward()


def test_gradients_that_are_not_added_to_grad_are_refused() -> None:
    """The stages elsewhere would add to ``.grad`` nonetheless."""
    layers, x = mlp(), torch.randn(7, 3).requires_grad_()
    message = r"torch\.autograd\.grad and backward\(inputs=\.\.\.\) cannot go through a pipeline.*call backward\(\)"
    with pipelined(layers):
        with pytest.raises(RuntimeError, match=message):
            torch.autograd.grad(total(layers(x)), x)
        with pytest.raises(RuntimeError, match=message):
            total(layers(x)).backward(inputs=[x])
        with pytest.raises(RuntimeError, match=message):
            torch.autograd.grad(total(layers(x)), x, create_graph=True)


def test_a_gradient_of_a_gradient_is_refused() -> None:
    layers, x = mlp(), torch.randn(7, 3).requires_grad_()
    with pipelined(layers):
        total(layers(x)).backward(create_graph=True)
        assert x.grad is not None
        with pytest.raises(RuntimeError, match="differentiate twice"):
            x.grad.square().sum().backward()


def test_gradients_accumulate() -> None:
    layers = mlp()
    plain, batches = copy.deepcopy(layers), [torch.randn(rows, 3) for rows in (7, 4)]
    with pipelined(layers):
        for x in batches:
            total(layers(x)).backward()
            total(plain(x)).backward()
    assert_same_gradients(layers, plain)


def test_autocast_of_the_caller() -> None:
    seen = []
    layers = nn.Sequential(nn.Linear(3, 4), Layer(lambda x: (seen.append(x.dtype), x)[1])).float()
    with pipelined(layers, checkpoint="always"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = layers(torch.randn(4, 3, dtype=torch.float32))
        output.float().sum().backward()
    assert output.dtype == torch.bfloat16
    assert seen == [torch.bfloat16] * 8  # forward and recomputed


# What is recomputed, and what is kept


class SwitchesItselfOff(nn.Module):
    """Drops in its first forward pass only; a recomputed pass must drop, or not, as the first one did."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.linear(x))
        if not is_recomputing():
            self.drop.eval()
        return y


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_layer_that_changes_its_own_mode(checkpoint: str) -> None:
    layers = nn.Sequential(SwitchesItselfOff())
    with pipelined(layers, checkpoint=checkpoint, microbatches=3):
        output = layers(torch.randn(6, 4))
        output.sum().backward()
    dropped = (output[:2].detach() == 0).sum(0)
    assert layers[0].linear.bias.grad.tolist() == [4 + 2 * (2 - int(number)) for number in dropped]


class Scaled(nn.Linear):
    """Multiplies by a number and counts its calls."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.scale, self.calls = 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (super().forward(x) * self.scale).tanh()


@in_every_way
def test_attributes_that_change_between_a_call_and_its_backward_pass(checkpoint: str, pipelined_backward: bool) -> None:
    """Each micro-batch is recomputed with the number of its own call, and the layer goes on counting."""
    layers, x = nn.Sequential(Scaled(3), nn.Dropout(0.0), nn.Linear(3, 3)), torch.randn(8, 3)
    plain, again = copy.deepcopy(layers), {"always": 4, "except_last": 3, "never": 0}[checkpoint]

    def backward(layers: nn.Sequential) -> None:
        outputs = []
        for scale in (0.1, 0.2):
            layers[0].scale = scale
            outputs.append(layers(x))
            layers[0].scale, layers[1].p = 3.0, 0.9
            outputs.append(layers.eval()(x))
            layers.train()
            layers[1].p = 0.0
        layers[1].p = 0.5
        total(outputs).backward()
        layers[1].p = 0.0

    with pipelined(layers, checkpoint=checkpoint, pipelined_backward=pipelined_backward):
        for number in (1, 2):
            backward(layers)
            backward(plain)
            assert_same_gradients(layers, plain)
            assert layers[0].scale == 3.0
            assert layers[0].calls == 4 * number * (4 + again)


@in_every_way
def test_a_dropout_that_works_in_place_once_its_rate_is_raised(checkpoint: str, pipelined_backward: bool) -> None:
    x, grads = torch.randn(8, 3), []
    for mode in (checkpoint, "never"):
        torch.manual_seed(1)
        layers = nn.Sequential(nn.Dropout(0.0, inplace=True), nn.Tanh(), nn.Linear(3, 3))
        with pipelined(layers, checkpoint=mode, pipelined_backward=pipelined_backward):
            for layers[0].p in (0.0, 0.0, 0.5, 0.5):
                total(layers(x)).backward()
        grads.append(layers[2].weight.grad)
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_a_layer_that_works_in_place_in_a_later_pass_only_is_refused(checkpoint: str) -> None:
    """The input is lost from which the micro-batch would be recomputed; the next call keeps a copy."""
    writes: list[bool] = []
    layers = nn.Sequential(Layer(lambda x: x.mul_(2) if writes else x), nn.Tanh(), nn.Linear(3, 3))
    plain, x = copy.deepcopy(layers), torch.randn(8, 3)
    with pipelined(layers, checkpoint=checkpoint):
        total(layers(x)).backward()
        layers.zero_grad()
        writes.append(True)
        message = r"layers 0 to 2 \(Layer, Tanh, Linear\) have changed their input in place.*checkpoint='never'"
        with pytest.raises(RuntimeError, match=message):
            layers(x)
        total(layers(x)).backward()
        total(plain(x.clone())).backward()
    assert_same_gradients(layers, plain)


@pytest.mark.parametrize(
    ("make", "kept_by_last"),
    [(gpipe, [3]), (one_f_one_b, [0, 1, 2, 3]), (zb_h1, [0, 1, 2, 3])],
)
def test_what_is_recomputed(make: Callable[[int, int], ActionTable], kept_by_last: list[int]) -> None:
    """Each stage keeps the last micro-batch, and those whose backward pass is its next action."""
    rows = make(3, 4)
    for i, row in enumerate(rows):
        kept = kept_by_last if i == 2 else [3]
        assert recomputed(row, "except_last", 4) == {(m, i) for m in range(4) if m not in kept}
        assert recomputed(row, "always", 4) == {(m, i) for m in range(4)}
        assert recomputed(row, "never", 4) == set()


@pytest.mark.parametrize(("checkpoint", "recomputed"), [("always", 4), ("except_last", 3), ("never", 0)])
@pytest.mark.parametrize("pipelined_backward", [True, False])
def test_number_of_forward_passes(checkpoint: str, recomputed: int, pipelined_backward: bool) -> None:
    counted = Counted(3)
    layers = nn.Sequential(counted, nn.Tanh())
    x = torch.randn(7, 3)
    with pipelined(layers, checkpoint=checkpoint, pipelined_backward=pipelined_backward) as pipeline:
        output = layers(x)
        assert counted.rows == [2, 2, 2, 1]
        assert num_kept(pipeline) == 4
        counted.rows.clear()
        output.sum().backward()
        # Backward goes from the last micro-batch to the first.
        assert counted.rows == [1, 2, 2, 2][4 - recomputed :]
        counted.rows.clear()
        with torch.no_grad():
            layers(x)
        with torch.inference_mode():
            layers(x)
        assert counted.rows == [2, 2, 2, 1] * 2
        assert num_kept(pipeline) == 0
        layers.eval()
        assert torch.equal(layers(x), output)


def test_a_forward_pass_whose_backward_never_comes_leaves_nothing() -> None:
    layers = mlp()
    with pipelined(layers) as pipeline:
        output = layers(torch.randn(7, 3))
        assert num_kept(pipeline) == 4
        del output
        total(layers(torch.randn(7, 3))).backward()
        assert num_kept(pipeline) == 0


def test_an_exception_leaves_the_module_as_it_was() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ZeroDivisionError("in a layer")

    layers = nn.Sequential(nn.Linear(3, 3), Layer(fail))
    with pipelined(layers), pytest.raises(ZeroDivisionError, match="in a layer"):
        layers(torch.randn(7, 3))
    assert "forward" not in vars(layers)
    del layers[1]
    assert layers(torch.randn(7, 3)).shape == (7, 3)


def test_finish_twice_and_without_start() -> None:
    layers = mlp()
    hooks = {name: len(value) for name, value in vars(layers).items() if name.endswith("_hooks")}
    with pipelined(layers, deferred_batch_norm=True) as pipeline:
        pass
    pipeline.close()
    Pipeline(layers, [4], [CPU], Settings(microbatches=2)).close()
    assert "forward" not in vars(layers)
    assert {name: len(value) for name, value in vars(layers).items() if name.endswith("_hooks")} == hooks


def test_state_dict_within_and_without() -> None:
    layers = mlp()
    before = {name: value.clone() for name, value in layers.state_dict().items()}
    with pipelined(layers):
        assert list(layers.state_dict()) == list(before)
        layers.load_state_dict({name: value + 1 for name, value in before.items()})
    for name, value in layers.state_dict().items():
        assert torch.equal(value, before[name] + 1)


# Random numbers


def with_dropout() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5))


def test_masks_are_the_same_with_and_without_recomputing() -> None:
    x, results = torch.randn(7, 3), []
    for checkpoint, pipelined_backward in EVERY_WAY:
        torch.manual_seed(1)
        layers = with_dropout()
        with pipelined(layers, checkpoint=checkpoint, pipelined_backward=pipelined_backward):
            outputs = [layers(x) for _ in range(2)]
            total(outputs).backward()
        results.append([*(t.detach() for t in outputs), layers[0].weight.grad])
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_masks_differ_between_micro_batches_layers_and_passes() -> None:
    layers = nn.Sequential(nn.Dropout(0.5), Layer(lambda x: x), nn.Dropout(0.5))
    masks: list[Tensor] = []
    for dropout in (layers[0], layers[2]):
        dropout.register_forward_hook(lambda module, args, output: masks.append(output != 0))
    with pipelined(layers, microbatches=2):
        for _ in range(2):
            layers(torch.ones(2, 500))
    layerwise = [*masks[0::2], *(second for first, second in zip(masks[0::2], masks[1::2], strict=True))]
    assert len(layerwise) == 8  # two layers, two micro-batches, two passes
    first = masks[0::2]
    for k, mask in enumerate(first):
        assert 0.3 < mask.double().mean() < 0.7
        assert all(not torch.equal(mask, other) for other in first[:k])
    for mask, both in zip(first, masks[1::2], strict=True):
        assert not torch.equal(mask, both)  # the second layer dropped others


def test_the_seed_decides() -> None:
    outputs = []
    for seed in (1, 1, 2):
        layers = nn.Sequential(nn.Dropout(0.5))
        pipeline = Pipeline(layers, [1], [CPU], Settings(microbatches=2), seeds=Seeds(seed))
        pipeline.start()
        outputs.append(layers(torch.ones(4, 50)))
        pipeline.close()
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("checkpoint", MODES)
def test_the_random_state_of_the_process_is_left_alone(checkpoint: str) -> None:
    layers = with_dropout()
    before = torch.get_rng_state()
    with pipelined(layers, checkpoint=checkpoint):
        total(layers(torch.ones(7, 3))).backward()
    assert torch.equal(torch.get_rng_state(), before)


# BatchNorm


def with_batch_norm(momentum: float | None = 0.1) -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(3, momentum=momentum), nn.Linear(3, 4), nn.Tanh())


@pytest.mark.parametrize("momentum", [0.1, None])
@in_every_way
def test_deferred_statistics(momentum: float | None, checkpoint: str, pipelined_backward: bool) -> None:
    """They are those of one update over the mini-batch; outputs and gradients stay those of the micro-batches."""
    layers = with_batch_norm(momentum)
    per_micro_batch, whole = copy.deepcopy(layers), copy.deepcopy(layers)
    ways = {"checkpoint": checkpoint, "pipelined_backward": pipelined_backward}
    with pipelined(layers, microbatches=3, deferred_batch_norm=True, **ways):
        for number, rows in enumerate((11, 7), start=1):
            x = torch.randn(rows, 3) * 3 + 2
            output = layers(x)
            total(output).backward()
            whole(x)
            expected = torch.cat([per_micro_batch(part) for part in x.tensor_split(3)])
            total(expected).backward()
            torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
            assert layers[0].num_batches_tracked == number
    assert_same_gradients(layers, per_micro_batch)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        actual, wanted = getattr(layers[0], name), getattr(whole[0], name)
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


@in_every_way
def test_statistics_are_updated_once_a_micro_batch_if_not_deferred(checkpoint: str, pipelined_backward: bool) -> None:
    layers = with_batch_norm()
    plain, x = copy.deepcopy(layers), torch.randn(11, 3) + 1
    with pipelined(layers, microbatches=3, checkpoint=checkpoint, pipelined_backward=pipelined_backward):
        total(layers(x)).backward()
    for part in x.tensor_split(3):
        plain(part)
    for actual, wanted in zip(layers.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)
    assert layers[0].track_running_stats


class ReadsItsStatistics(nn.BatchNorm1d):
    """Scales its output in training by a running statistic, as batch renormalisation does."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.running_var.clone()
        return super().forward(x) * scale


@pytest.mark.parametrize("deferred", [False, True])
@in_every_way
def test_a_layer_that_reads_running_statistics(checkpoint: str, pipelined_backward: bool, deferred: bool) -> None:
    """A micro-batch is recomputed with the statistics of its forward pass: if deferred, those before the batch."""
    layers = nn.Sequential(ReadsItsStatistics(3), nn.Linear(3, 4), nn.Tanh())
    plain, x = copy.deepcopy(layers), torch.randn(11, 3) * 3
    if deferred:
        plain[0].momentum = 0.0
    ways = {"checkpoint": checkpoint, "pipelined_backward": pipelined_backward}
    with pipelined(layers, microbatches=3, deferred_batch_norm=deferred, **ways):
        output = layers(x)
        total(output).backward()
    expected = torch.cat([plain(part) for part in x.tensor_split(3)])
    total(expected).backward()
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    assert_same_gradients(layers, plain)


class MovesItsCentre(nn.Module):
    """Subtracts a centre, which moves after every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("centre", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.weight - self.centre).square()
        self.calls += 1
        if self.calls % 2 == 0:
            self.centre += 1
        return y


@in_every_way
@pytest.mark.parametrize("microbatches", [2, 3])
def test_a_buffer_that_changes_in_some_micro_batches_only(
    checkpoint: str, pipelined_backward: bool, microbatches: int
) -> None:
    layers, x = nn.Sequential(MovesItsCentre(), nn.Linear(3, 4)), torch.randn(11, 3)
    plain = copy.deepcopy(layers)
    ways = {"checkpoint": checkpoint, "pipelined_backward": pipelined_backward}
    for _ in range(2):
        with pipelined(layers, microbatches=microbatches, **ways):  # each time with new stages, as after a repair
            for _ in range(3):
                output = layers(x)
                total(output).backward()
                expected = torch.cat([plain(part) for part in x.tensor_split(microbatches)])
                total(expected).backward()
                torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
                assert_same_gradients(layers, plain)


def test_deferred_statistics_of_images() -> None:
    layers = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    whole, x = copy.deepcopy(layers), torch.randn(7, 1, 5, 5)
    with pipelined(layers, microbatches=3, deferred_batch_norm=True):
        layers(x)
    whole(x)
    for actual, wanted in zip(layers.buffers(), whole.buffers(), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


def test_evaluation_uses_the_statistics_and_leaves_them() -> None:
    layers = with_batch_norm().eval()
    plain, before = copy.deepcopy(layers), [b.clone() for b in layers.buffers()]
    x = torch.randn(7, 3)
    with pipelined(layers, deferred_batch_norm=True):
        torch.testing.assert_close(layers(x), plain(x), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(layers.buffers(), before, strict=True))


def test_statistics_that_are_not_tracked() -> None:
    layers = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 2))
    plain, x = copy.deepcopy(layers), torch.randn(6, 3)
    with pipelined(layers, microbatches=2, deferred_batch_norm=True):
        output = layers(x)
    torch.testing.assert_close(output, torch.cat([plain(part) for part in x.split(3)]), rtol=1e-12, atol=1e-12)
    assert not list(layers.buffers())


def test_a_mailbox_gives_what_was_put_in_without_its_graph() -> None:
    x = torch.ones(2, requires_grad=True)
    mail, copying = Mailbox(), Mailbox(copies=True)
    for box in (mail, copying):
        box.send((x * 2, {}), 0, 1, requires_grad=[False])
        assert box.has(0, 1) and not box.has(0, 0)
        value, _ = box.receive(0, 1)
        assert not value.requires_grad and value.grad_fn is None and not box.has(0, 1)
    copying.send(x, 0, 0)
    assert copying.receive(0, 0).data_ptr() != x.data_ptr()
    mail.expect(Arrived("later"), 1, 0)
    assert mail.receive(1, 0) == "later"
    mail.send(x, 2, 0)
    mail.expect(Arrived(x), 2, 1)
    mail.discard(2)
    for m in range(2):
        with pytest.raises(KeyError):
            mail.receive(2, m)


def test_random_states_are_restored_at_the_end_of_the_outermost_context() -> None:
    keeper = RandomStateKeeper(torch.device("cpu"))
    before = torch.get_rng_state()
    with keeper.preserving():
        with keeper.preserving():
            keeper.keep()
            torch.manual_seed(7)
        assert torch.initial_seed() == 7
    assert torch.equal(torch.get_rng_state(), before)
