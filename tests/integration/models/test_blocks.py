"""A model that loops over an ``nn.ModuleList`` in its own ``forward`` trains and evaluates as in one process."""

from typing import Any

import pytest
import torch
from harness import run
from parity import Outcome, Small, alike, batches, check, compare, fit, on_cpus
from pytorch_lightning import Callback
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from strategies import RPCSequentialStrategy

WIDTH = 6
UNEVEN = (8, 7, 2, 5)


class Block(nn.Module):
    """Mixes the positions of each row: ``[rows, 4, WIDTH]``; returns the hidden state and what the next block adds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.norm, self.kind = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), kind

    def forward(
        self, hidden: Tensor, condition: Tensor, before: Tensor | None = None, *, bias: Tensor, mask: Tensor
    ) -> Any:
        mixed = torch.softmax(bias.masked_fill(~mask, -1e9), -1) @ self.linear(hidden)
        hidden = self.norm(hidden + mixed + condition + (0 if before is None else before))
        return hidden, hidden.mean(-1, keepdim=True), None


class Blocks(nn.Module):
    """Gives its blocks a mask with rows, a bias for all rows, a condition with rows, and what the last block left."""

    def __init__(self, kinds: str = "abab") -> None:
        super().__init__()
        self.embed, self.condition = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(kind) for kind in kinds)
        self.bias, self.head = nn.Parameter(torch.randn(1, 4, 4)), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x).unflatten(-1, (4, WIDTH))
        condition, before = self.condition(x)[:, None], None
        eye = torch.eye(4, dtype=torch.bool, device=x.device)
        masks = {"a": (x[:, None, :4] > -0.5) | eye, "b": torch.ones_like(eye)[None]}
        left = []
        for layer in self.layers[: len(self.layers)]:
            hidden, before, nothing = layer(hidden, condition, before, bias=self.bias, mask=masks[layer.kind])
            assert nothing is None and hidden.shape[-1] == WIDTH
            left.append(before)
        return self.head(hidden[:, 0]) + torch.cat(left, 1).mean(1)


class Model(Small):
    """Keeps the loss of each batch, however often ``training_step`` runs for it."""

    def __init__(self) -> None:
        super().__init__()
        del self.sequential_module
        self.net = self.make()

    def make(self) -> nn.Module:
        return Blocks()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return mse_loss(self(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].item())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


class Frozen(Model):
    """Nothing before the blocks requires a gradient."""

    def make(self) -> nn.Module:
        net = Blocks()
        for part in (net.embed, net.condition, net.layers[0]):
            part.requires_grad_(False)
        net.bias.requires_grad_(False)
        return net


class Reversed(Model):
    """Calls its blocks from the last to the first, which the example shows."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.randn(4, WIDTH)

    def make(self) -> nn.Module:
        return Backwards()


class Backwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return self.head(x)


def data() -> Any:
    return batches(UNEVEN)


def pipelined(schedule: str, stages: list[int], make: Any = Model, **options: Any) -> None:
    strategy = {"schedule": schedule, "balance": "even", **options}
    outcomes: list[Outcome] = check(make, train=data, val=data, strategy=strategy, stages=stages)
    for outcome in outcomes[1:]:
        assert outcome.trainer.strategy.balance in ([4], [2, 2], [2, 1, 1], [1, 1, 2], [1, 2, 1])
        predicted = torch.cat(outcome.trainer.predict(outcome.model, data()))
        expected = torch.cat([outcome.model.double()(batch[0].double()) for batch in data()])
        torch.testing.assert_close(predicted.double().cpu(), expected.cpu(), rtol=1e-4, atol=1e-4)


def both_schedules() -> None:
    pipelined("gpipe", [3])
    pipelined("1f1b", [2])


def test_trains_as_one_process() -> None:
    run(both_schedules, timeout_seconds=300)


def more() -> None:
    pipelined("gpipe", [2])
    pipelined("1f1b", [3])
    for schedule in ("gpipe", "1f1b"):
        check(Reversed, train=data, val=data, strategy={"schedule": schedule, "balance": "by_size"}, stages=[3])
        pipelined(schedule, [2], Frozen, checkpoint="always")
        pipelined(schedule, [1])


@pytest.mark.slow
def test_other_numbers_of_stages_frozen_parts_and_recomputation() -> None:
    run(more, timeout_seconds=400)


class OwnTensors(nn.ModuleList):
    """A list of blocks with tensors of its own."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(blocks)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.register_buffer("shift", torch.ones(WIDTH))


class Scaled(Reversed):
    """The list of its blocks has tensors."""

    def make(self) -> nn.Module:
        return ScaledBackwards()


class ScaledBackwards(Backwards):
    def __init__(self) -> None:
        super().__init__()
        self.layers = OwnTensors(*self.layers)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.layers.scale + self.layers.shift)


class KeepsState(Callback):
    """Keeps the state of the model while the pipeline still runs."""

    def on_train_end(self, trainer: Any, model: Any) -> None:
        self.state = {name: value.clone() for name, value in model.state_dict().items()}


def own_tensors() -> None:
    keeps = KeepsState()
    strategy = RPCSequentialStrategy(balance=[2, 2], microbatches=3, module="net.layers")
    outcome = fit(Scaled, strategy, 2, train=data, callbacks=[keeps])
    compare(outcome, fit(Scaled, "auto", 1, train=data))
    alike(keeps.state, dict(outcome.model.state_dict()), 0)
    assert {"net.layers.scale", "net.layers.shift", "net.layers.0.0.weight"} < set(keeps.state)


def test_tensors_of_the_list_itself_are_saved() -> None:
    run(own_tensors)


class CompiledModel(Model):
    """Compiled as a whole; its blocks run on their stages all the same."""

    def make(self) -> nn.Module:
        made: Any = torch.compile(Blocks(), backend="eager")
        return made


def compiled() -> None:
    for schedule in ("gpipe", "1f1b"):
        with pytest.warns(UserWarning, match=r"net\._orig_mod\.layers is inside a module in torch\.compile"):
            strategy = RPCSequentialStrategy(balance=[2, 2], microbatches=3, schedule=schedule)
            outcome = fit(CompiledModel, strategy, 2, train=data, val=data)
        compare(outcome, fit(CompiledModel, "auto", 1, train=data, val=data))


class SavesWhole(Callback):
    """Runs the whole model within ``rpc_save_model``, at the end of the training."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_train_end(self, trainer: Any, model: Any) -> None:
        def save(trainer: Any, path: Any) -> None:
            with torch.no_grad():
                self.found.append(trainer.lightning_module(torch.ones(2, WIDTH, dtype=torch.float64)))

        trainer.strategy.rpc_save_model(trainer, save, "unused")


def saved_whole() -> None:
    saves = SavesWhole()
    outcome = fit(Model, RPCSequentialStrategy(balance=[2, 2], microbatches=3), 2, train=data, callbacks=[saves])
    expected = outcome.model(torch.ones(2, WIDTH, dtype=torch.float64))
    torch.testing.assert_close(saves.found[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [compiled, pytest.param(saved_whole, marks=on_cpus)])
def test_a_compiled_model_and_the_whole_model_in_mid_run(rows: Any) -> None:
    run(rows, timeout_seconds=300)


# What is refused


class FlatBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, heads: Tensor) -> Tensor:
        return hidden + self.linear(heads.unflatten(0, (len(hidden), -1)).sum(1))[:, None]


class Flat(nn.Module):
    """Gives its blocks a tensor whose first dimension is rows times heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(WIDTH, 4 * WIDTH), nn.ModuleList(FlatBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden, heads = self.embed(x).unflatten(-1, (4, WIDTH)), x.repeat_interleave(2, 0)
        for layer in self.layers:
            hidden = layer(hidden, heads)
        return hidden[:, 0, :2]


class FlatModel(Model):
    def make(self) -> nn.Module:
        return Flat()


def undecided() -> None:
    with pytest.raises(RuntimeError, match=r"argument '1' \(shape \[16, 6\]\) of block net.layers.0 .*schedule='1f1b'"):
        fit(FlatModel, RPCSequentialStrategy(balance=[1, 1], microbatches=2), 2, train=data)


def not_split() -> None:
    single = fit(FlatModel, "auto", 1, train=data, val=data)
    strategy = RPCSequentialStrategy(balance=[1, 1], microbatches=2, schedule="1f1b")
    compare(fit(FlatModel, strategy, 2, train=data, val=data), single)


@pytest.mark.slow
def test_an_evaluation_that_cannot_be_split() -> None:
    run(not_split, timeout_seconds=200)


@pytest.mark.slow
def test_an_argument_that_may_have_rows_is_refused_by_name() -> None:
    run(undecided, timeout_seconds=200)
