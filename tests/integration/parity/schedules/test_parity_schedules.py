"""Every schedule trains as one process does: several chunks of layers per stage, and backward passes in two parts."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run
from parity import WIDTH, Outcome, Small, batches, compare, fit, one_device
from parity_layers import Unembed
from schedule_choices import SEVERAL_CHUNKS_OR_SPLIT
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss
from torch.utils.checkpoint import checkpoint

from strategies import RPCSequentialStrategy
from strategies.pipeline import Namespace, pop, skippable, stash
from strategies.pipeline.schedule.custom import write_csv
from strategies.pipeline.schedule.tables import interleaved
from strategies.pipeline.stage.layers import has_large_weights
from strategies.pipeline.stage.weight_gradients import LARGE_BYTES

UNEVEN = (8, 5, 1, 7)


class Checkpointed(nn.Sequential):
    """Recomputes its layers by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square() / 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0]


class Own(nn.Module):
    """A custom function, a weight that is used twice, a frozen one, and a slope that needs a gradient of a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = Squares.apply(self.twice(torch.tanh(self.twice(x))) + self.frozen(x))
        with torch.enable_grad():
            at = torch.tanh(x)
            at = at if at.requires_grad else at.requires_grad_()  # while the layers run to be recomputed
            (slope,) = torch.autograd.grad(self.twice(at).square().sum(), at, create_graph=True)
        return x + slope / 10


class Scaled(nn.Linear):
    """The weight of the product is no parameter itself."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight / self.weight.norm(), self.bias)


def twelve_layers() -> list[nn.Module]:
    """Layers of many kinds; dropout draws the same numbers wherever it runs."""
    return [
        nn.Linear(WIDTH, WIDTH),
        nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.2)),
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH, bias=False)),
        nn.Sequential(nn.Unflatten(1, (1, 1, WIDTH)), nn.Conv2d(1, 2, 3, padding=1), nn.Flatten()),
        nn.Linear(2 * WIDTH, WIDTH),
        Own(),
        nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.1, batch_first=True),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
        Scaled(WIDTH, WIDTH),
        nn.Sequential(nn.Unflatten(1, (WIDTH, 1)), nn.Conv1d(WIDTH, WIDTH, 1, groups=2), nn.Flatten()),
        nn.Tanh(),
        nn.Linear(WIDTH, 2),
    ]


class Around(Small):
    """Trains code before and after the call, and on both sides of it."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(*twelve_layers())
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.before(batch[0])
        loss = mse_loss(self.after(self(x)) + x[:, :2], batch[1])
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss


class AroundCheckpointed(Around):
    """One of the layers recomputes itself. Its import of torch's compiler takes seconds in each process."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module[7] = Checkpointed(*self.sequential_module[7])


def reference(make: Any, **arguments: Any) -> Outcome:
    """One stage with the same micro-batches; other tests compare that with a plain process."""
    strategy = RPCSequentialStrategy(schedule="1f1b", microbatches=4, checkpoint=arguments.pop("checkpoint", "never"))
    return fit(make, strategy, 1, train=partial(batches, UNEVEN), max_epochs=1, **arguments)


def trained(make: Any, devices: int, options: dict[str, Any], **arguments: Any) -> Outcome:
    settings = {"microbatches": 4, "checkpoint": "never", "balance": "even", **options}
    return fit(
        make, RPCSequentialStrategy(**settings), devices, train=partial(batches, UNEVEN), max_epochs=1, **arguments
    )


def check(
    make: Any,
    half: int = 0,
    modes: tuple[str, ...] = ("never",),
    numbers: tuple[int, ...] = (2, 3),
    **arguments: Any,
) -> None:
    """Trains under each schedule in one of the given ways; the other half has the other one, if there are two."""
    ways = list(itertools.product(modes, numbers))
    expected = {mode: reference(make, checkpoint=mode, **arguments) for mode in modes}
    for k, schedule in enumerate(SEVERAL_CHUNKS_OR_SPLIT.values()):
        mode, devices = ways[(k + half) % len(ways)]
        compare(trained(make, devices, {"schedule": schedule, "checkpoint": mode}, **arguments), expected[mode])


HALVES = pytest.mark.parametrize(
    "half", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.nightly)]
)
"""Each schedule runs with one of two numbers of stages, or the like, before a merge, and with the other each night."""


def check_two_stages() -> None:
    val = partial(batches, (8, 5, 7))
    expected = reference(Around, val=val)
    for options in ({"schedule": "interleaved"}, {"schedule": "zbv"}):
        compare(trained(Around, 2, options, val=val), expected)


def test_chunks_and_split_backward_passes() -> None:
    run(check_two_stages, timeout_seconds=120)


@HALVES
def test_two_and_three_stages(half: int) -> None:
    run(check, AroundCheckpointed, half, timeout_seconds=150)


@HALVES
def test_recomputation(half: int) -> None:
    run(check, AroundCheckpointed, half, ("always", "except_last"), (3,), timeout_seconds=150)


class Updates(nn.Module):
    """A linear layer and an embedding of buffers that each forward pass updates."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(WIDTH, WIDTH), nn.Embedding(9, WIDTH)
        self.register_buffer("memory", torch.ones(1, WIDTH))
        self.register_buffer("step", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.memory.mul_(0.9)
        self.step.add_(1).remainder_(9)
        return torch.tanh(x + self.linear(self.memory) + self.table(self.step))


class Updating(Small):
    """Changes the inputs of layers of the last stage before their weight gradients are due."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module.insert(5, Updates())


def check_buffers() -> None:
    compare(trained(Updating, 2, {"schedule": "zb-h1"}), reference(Updating))


def test_buffers_that_layers_update() -> None:
    run(check_buffers)


class Tied(Small):
    """The last layer uses the weight of the first one, and the code before the call that of the second."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(8)]
        layers[5].weight = layers[0].weight
        self.sequential_module = nn.Sequential(*layers, Unembed(layers[0].weight))
        self.tied = layers[1].weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return mse_loss(self(torch.tanh(linear(batch[0], self.tied)))[:, :2], batch[1])


class Normed(Small):
    """Batch norms, whose running statistics follow the order of the micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))]
        self.sequential_module = nn.Sequential(*layers, nn.Linear(WIDTH, 2))


class Looping(Small):
    """Calls its blocks by itself, with a condition and from the last to the first."""

    def __init__(self) -> None:
        super().__init__()
        del self.sequential_module
        self.blocks, self.last = nn.ModuleList(Conditioned() for _ in range(9)), nn.Linear(WIDTH, 2)
        self.example_input_array = torch.zeros(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        condition = x.square()
        for block in reversed(self.blocks):
            x = block(x, condition)
        return self.last(x)


class Conditioned(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return x + torch.tanh(super().forward(x)) * condition


@skippable(stash=["skip"])
class Stash(nn.Linear):
    """Keeps its input for a later layer."""

    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x)
        return torch.tanh(super().forward(x))


@skippable(pop=["skip"])
class Pop(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return super().forward(x) + skip


class Recurrent(nn.GRU):
    """Takes ``[rows, WIDTH]`` as a sequence, and returns all outputs, ``[rows, WIDTH, 2]``, and the last state."""

    def __init__(self) -> None:
        super().__init__(1, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        outputs, state = super().forward(x.unsqueeze(2))
        return outputs, state.transpose(0, 1)


class JoinStates(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, WIDTH)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        outputs, state = pair
        return super().forward(outputs.mean(1) + state[:, 0])


class Skipping(Small):
    """Two skip connections, one within the other, that cross stages, and a recurrent layer that returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        outer, inner = Namespace(), Namespace()
        self.sequential_module = nn.Sequential(
            Stash(WIDTH, WIDTH).isolate(outer),
            nn.Linear(WIDTH, WIDTH),
            Stash(WIDTH, WIDTH).isolate(inner),
            Recurrent(),
            JoinStates(),
            nn.Linear(WIDTH, WIDTH),
            Pop(WIDTH, WIDTH).isolate(inner),
            nn.Tanh(),
            Pop(WIDTH, WIDTH).isolate(outer),
            nn.Linear(WIDTH, 2),
        )


def check_norms(half: int) -> None:
    for deferred in (False, True):
        train = partial(batches, (8, 8))
        options = {"microbatches": 4, "deferred_batch_norm": deferred}
        expected = fit(Normed, RPCSequentialStrategy(schedule="1f1b", **options), 1, train=train, max_epochs=1)
        for schedule in list(SEVERAL_CHUNKS_OR_SPLIT.values())[(deferred + half) % 2 :: 2]:
            strategy = RPCSequentialStrategy(balance="even", schedule=schedule, **options)
            compare(fit(Normed, strategy, 2, train=train, max_epochs=1), expected)


@HALVES
def test_ties(half: int) -> None:
    run(check, Tied, half, timeout_seconds=150)


@HALVES
def test_blocks(half: int) -> None:
    run(check, Looping, half, timeout_seconds=150)


@HALVES
def test_skip_connections_and_recurrent_layers(half: int) -> None:
    run(check, Skipping, half, timeout_seconds=150)


@HALVES
def test_batch_norms(half: int) -> None:
    run(check_norms, half, timeout_seconds=150)


def check_clipping() -> None:
    """Accumulated batches, and clipping by the norm of all stages."""
    check(Around, numbers=(3,), accumulate_grad_batches=2, gradient_clip_val=0.05)


@pytest.mark.slow
def test_clipping_and_accumulation() -> None:
    run(check_clipping, timeout_seconds=150)


def check_own_tables(folder: str) -> None:
    expected = reference(Around)
    path = Path(folder) / "table.csv"
    write_csv(interleaved(2, 4), path)
    for table in (str(path), path, interleaved):
        compare(trained(Around, 2, {"schedule": table}), expected)


@pytest.mark.slow
def test_tables_of_ones_own(tmp_path: Path) -> None:
    run(check_own_tables, str(tmp_path), timeout_seconds=100)


class Large(Small):
    """A large weight in each of two stages, whose gradient is added in place under every schedule."""

    def __init__(self) -> None:
        super().__init__()
        rows = LARGE_BYTES // 8 // WIDTH + 1  # float64
        large = nn.Linear(WIDTH, rows), nn.Linear(rows, WIDTH)
        self.sequential_module = nn.Sequential(nn.Linear(WIDTH, WIDTH), *large, nn.Linear(WIDTH, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return mse_loss(self(batch[0]), batch[1])


def check_large() -> None:
    assert all(has_large_weights([layer]) for layer in Large().double().sequential_module[1:3])
    plain = fit(Large, one_device(), 1, train=partial(batches, UNEVEN), max_epochs=1)
    for name in ("1f1b", "gpipe"):
        compare(trained(Large, 2, {"schedule": name, "balance": [2, 2]}), plain)


@pytest.mark.slow
def test_large_weights() -> None:
    run(check_large, timeout_seconds=150)
