"""The costs of blocks and of the rest of a model: what is counted, and that the model is left as it was."""

import random
from typing import Any

import pytest
import torch
from sleep_layer import READ_SECONDS, only_sleep_takes_time, slept
from torch import Tensor, nn

from strategies.pipeline.partition.model_costs import BySize, ByTime, Costs, Example, costs_of, costs_of_parameters

CPU = torch.device("cpu")
ROWS, WIDTH, OUTPUTS = 4, 6, 50
FLOAT_BYTES = 4


class Block(nn.Module):
    """Returns a pair; sleeps in the forward and in the backward pass."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.seconds, self.seen = seconds, []

    def forward(self, hidden: Tensor, scale: float, *, bias: Tensor) -> tuple[Tensor, None]:
        self.seen.append(scale)
        hidden = hidden + self.dropout(self.norm(self.linear(hidden))) * scale + bias
        return slept(hidden, self.seconds, self.seconds), None


class Model(nn.Module):
    """An embedding, blocks that get more than the hidden state, and a wide head."""

    def __init__(self, seconds: tuple[float, ...] = (0.0, 0.0, 0.0), head_seconds: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.bias = nn.Linear(3, WIDTH), nn.BatchNorm1d(WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(Block(each) for each in seconds)
        self.head, self.head_seconds = nn.Linear(WIDTH, OUTPUTS), head_seconds
        self.kept: list[Tensor] = []
        self.num_gradients = 0
        self.bias.register_hook(self._count)

    def _count(self, gradient: Tensor) -> None:
        self.num_gradients += 1

    def forward(self, x: Tensor, *, target: Tensor | None = None) -> Any:
        hidden = self.norm(self.embed(x))
        for number, layer in enumerate(self.layers):
            hidden, _ = layer(hidden, number + 1.0, bias=self.bias)
        self.kept.append(hidden)
        self.last = hidden
        logits = self.head(slept(hidden, self.head_seconds, self.head_seconds))
        if target is None:
            return logits
        return {"loss": nn.functional.cross_entropy(logits, target), "logits": logits}


def measured(model: nn.Module, measure: BySize | ByTime, *, microbatches: int = 1, target: bool = False) -> Costs:
    value: dict[str, Any] = {"x": torch.rand(ROWS, 3)}
    if target:
        value["target"] = torch.zeros(ROWS, dtype=torch.long)
    return costs_of(model, model.layers, Example(model, value, microbatches), measure, CPU)


def quick() -> ByTime:
    return ByTime(budget_seconds=0.001)


def test_time_of_forward_and_backward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    only_sleep_takes_time(monkeypatch)
    seconds, reads = (1.0, 3.0, 2.0), 20 * READ_SECONDS
    costs = measured(Model(seconds, head_seconds=4.0), quick())
    forward, backward = zip(*costs.layers, strict=True)
    assert [*forward, *backward] == pytest.approx([*seconds, *seconds], abs=reads)
    assert costs.driver == pytest.approx(8.0, abs=reads)
    assert not costs.not_measured
    costs = measured(Model(seconds), quick())
    assert [*map(sum, costs.layers), costs.driver] == pytest.approx([2.0, 6.0, 4.0, 0.0], abs=reads)


def parameter_bytes(*modules: nn.Module) -> int:
    return sum(p.nbytes for module in modules for p in module.parameters())


def test_bytes_of_parameters_and_activations() -> None:
    model = Model()
    model.embed.requires_grad_(False)
    costs = measured(model, BySize(param_scale=0.0))
    # Kept by the driver: the embedding, the BatchNorm's output and statistics, the copy before the head, the logits.
    hidden, statistics, logits = ROWS * WIDTH * FLOAT_BYTES, 2 * WIDTH * FLOAT_BYTES, ROWS * OUTPUTS * FLOAT_BYTES
    assert costs.driver == hidden + hidden + statistics + hidden + logits
    assert len(set(costs.layers)) == 1
    # Of 2 micro-batches in the example, a stage holds one, and the driver's part as many as it is told.
    halves = measured(model, BySize(param_scale=0.0, held=1), microbatches=2)
    assert halves.driver == costs.driver / 2 and halves.layers == [layer / 2 for layer in costs.layers]
    assert measured(model, BySize(param_scale=0.0, held=8), microbatches=2).driver == costs.driver * 4
    # Parameters: a frozen one is held once.
    scaled = measured(model, BySize(param_scale=3.0))
    outside = parameter_bytes(model.embed) + 3 * (parameter_bytes(model.norm, model.head) + model.bias.nbytes)
    assert scaled.driver - costs.driver == outside
    assert scaled.layers[0] - costs.layers[0] == 3 * parameter_bytes(model.layers[0])


def test_the_loss_counts_where_forward_returns_it() -> None:
    logits = ROWS * OUTPUTS * FLOAT_BYTES
    without, with_loss = (measured(Model(), BySize(param_scale=0.0), target=target) for target in (False, True))
    # The log of the softmax is as large as the logits, which are kept too, because the model returns them.
    assert logits <= with_loss.driver - without.driver < 1.2 * logits


def state_of(model: nn.Module) -> tuple[list[Tensor], list[Any]]:
    """Returns copies of all tensors, and what identifies the objects that the model consists of."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    attributes = [[(key, id(value)) for key, value in vars(module).items()] for module in model.modules()]
    seen = [len(module.seen) for module in model.modules() if isinstance(module, Block)]
    objects = [[(name, id(tensor), id(tensor.grad)) for name, tensor in tensors.items()], attributes, seen]
    copies = [tensor.detach().clone() for tensor in tensors.values()]
    return [*copies, torch.get_rng_state()], [*objects, random.getstate(), torch.is_grad_enabled()]


def check_unchanged(model: nn.Module, before: tuple[list[Tensor], list[Any]]) -> None:
    tensors, objects = state_of(model)
    assert objects == before[1]
    assert all(torch.equal(now, then) for now, then in zip(tensors, before[0], strict=True))


@pytest.mark.parametrize("measure", [BySize(), quick()], ids=["size", "time"])
@pytest.mark.parametrize("rows", [1, ROWS])
def test_a_model_is_unchanged(measure: BySize | ByTime, rows: int) -> None:
    model = Model()
    model.layers[1].eval()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    model.layers[0].linear.weight.grad = torch.ones(WIDTH, WIDTH)
    value = torch.rand(rows, 3)
    given, before, version = value.clone(), state_of(model), model.norm.running_mean._version
    costs_of(model, model.layers, Example(model, value), measure, CPU)
    check_unchanged(model, before)
    assert model.num_gradients == 0 and model.kept == [] and not hasattr(model, "last")
    assert model.norm.running_mean._version == version and torch.equal(value, given)
    assert torch.equal(model.head.weight.grad, torch.ones(OUTPUTS, WIDTH))


@pytest.mark.parametrize("measure", [BySize(), quick()], ids=["size", "time"])
def test_a_model_is_unchanged_after_an_error(measure: BySize | ByTime) -> None:
    model = Model()
    before = state_of(model)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        costs_of(model, model.layers, Example(model, {"y": 1}), measure, CPU)
    model.head.weight.grad = before_head = torch.ones(1, OUTPUTS).T.expand(OUTPUTS, WIDTH)
    with pytest.raises(IndexError):  # in the loss, behind the blocks
        costs_of(model, model.layers, Example(model, {"x": torch.eye(3), "target": torch.full((3,), 99)}), measure, CPU)
    assert model.head.weight.grad is before_head
    model.head.weight.grad = None
    check_unchanged(model, before)


class Momentum(nn.Module):
    """Updates an average of a layer in place, in code around layers that count their calls."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(4, WIDTH, max_norm=0.1), layers
        self.student, self.teacher = nn.Linear(WIDTH, 2), torch.jit.script(nn.Linear(WIDTH, 2))
        self.pairs = [*zip(self.student.parameters(), self.teacher.parameters(), strict=True)]

    @torch.no_grad()
    def _update(self) -> None:
        for student, teacher in self.pairs:
            teacher.mul_(0.9).add_(student, alpha=0.1)
        self.teacher.bias.data.add_(1)

    def forward(self, x: Tensor) -> Tensor:
        self._update()
        hidden = self.words(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.student(hidden) - self.teacher(hidden)


class SequentialMomentum(Momentum):
    def forward(self, x: Tensor) -> Tensor:
        self._update()
        hidden = self.layers(self.words(x))
        return self.student(hidden) - self.teacher(hidden)


@pytest.mark.parametrize("measure", [BySize(), quick()], ids=["size", "time"])
@pytest.mark.parametrize("kind", [Momentum, SequentialMomentum])
def test_parameters_that_a_model_changes_in_place_are_restored(kind: type[Momentum], measure: BySize | ByTime) -> None:
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    model = kind(nn.ModuleList(layers) if kind is Momentum else nn.Sequential(*layers))
    before = state_of(model)
    costs_of(model, model.layers, Example(model, torch.arange(4)), measure, CPU)
    check_unchanged(model, before)


@pytest.mark.parametrize("measure", [BySize(), quick()], ids=["size", "time"])
def test_what_a_hook_of_a_layer_collects_is_restored(measure: BySize | ByTime) -> None:
    model, calls = Sequential(), []  # copies of the layer share the hook, and so the list
    model.layers[1].register_forward_hook(lambda *args: calls.append(1))
    costs_of(model, model.layers, Example(model, torch.rand(ROWS, 3)), measure, CPU)
    assert calls == []


def test_a_block_that_is_not_called() -> None:
    model = Model()
    model.layers.append(Block())
    forward = model.forward

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([*model.layers, Block()])

        def forward(self, x: Tensor) -> Tensor:
            return forward(x)

    skips = Skips()
    with pytest.raises(
        ValueError, match=r"Skips.forward does not call blocks 4 on the example input, .*balance='even'"
    ):
        costs_of(skips, skips.layers, Example(skips, torch.rand(ROWS, 3)), BySize(), CPU)


class Sequential(nn.Module):
    """A Sequential between an embedding and a head."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head, self.seconds = nn.Linear(3, WIDTH), nn.Linear(WIDTH, OUTPUTS), seconds
        self.layers = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers(self.embed(x))
        if self.fails:
            raise RuntimeError("no labels")
        return slept(self.head(hidden), self.seconds, self.seconds)


def test_the_rest_of_a_model_around_a_sequential(monkeypatch: pytest.MonkeyPatch) -> None:
    only_sleep_takes_time(monkeypatch)
    model, x = Sequential(0.01), torch.rand(ROWS, 3)
    example = Example(model, x, microbatches=2)
    sizes = costs_of(model, model.layers, example, BySize(held=2, param_scale=0.0), CPU)
    # The embedding, and the logits twice: the sleep copies them, and keeps nothing.
    assert sizes.driver == ROWS * (WIDTH + OUTPUTS) * FLOAT_BYTES
    assert sizes.layers[1:] == [ROWS // 2 * WIDTH * FLOAT_BYTES] * 2
    driver = costs_of(model, model.layers, example, quick(), CPU).driver
    assert driver == pytest.approx(0.02, abs=20 * READ_SECONDS)


def test_a_model_behind_the_sequential_that_cannot_run_counts_by_its_parameters() -> None:
    model, x = Sequential(), torch.rand(ROWS, 3)
    model.fails = True
    before = state_of(model)
    costs = costs_of(model, model.layers, Example(model, x), BySize(param_scale=1.0), CPU)
    assert costs.driver == parameter_bytes(model.embed, model.head)
    assert costs.not_measured == "Sequential.forward raises RuntimeError: no labels"
    assert costs_of(model, model.layers, Example(model, x), quick(), CPU).driver == 0
    check_unchanged(model, before)


def test_costs_of_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(50, WIDTH), nn.Embedding(20, WIDTH)
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
            self.head = nn.Linear(WIDTH, 50)
            self.head.weight = self.tokens.weight
            self.shared = self.layers[0]

    model = Tied()
    sizes = costs_of_parameters(model, model.layers, by_time=False)
    assert sizes.layers == [2 * parameter_bytes(model.layers[0])] * 2
    assert sizes.driver == 2 * parameter_bytes(model.positions, model.head)
    assert costs_of_parameters(model, model.layers, by_time=True).driver == 2 * parameter_bytes(model.head)
