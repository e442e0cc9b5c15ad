"""What ``schedule="1f1b"`` is for: a stage keeps the activations of a few micro-batches, however many there are."""

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from harness import run
from parity import WIDTH, Small, batches, fit, on_cpus
from parity_layers import MeasuresMemory
from procfs import MEBI
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from strategies import RPCSequentialStrategy
from strategies.pipeline.schedule.tables import one_f_one_b
from strategies.planning.simulator import simulate


class _Count(torch.autograd.Function):
    """The identity, whose place in the graph is counted as long as it is there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counter: "Counter") -> Tensor:
        ctx.counter, ctx.token = counter, Token()
        counter.entered(ctx.token)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.counter.waiting -= 1
        return grad, None


class Token:
    """Lives as long as the graph that it is part of."""


class Counter(nn.Module):
    """Counts how many micro-batches wait for their backward pass, and how many have a graph; brings home the most."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = self.most_waiting = self.most_alive = 0
        self.alive: Any = None  # made where it is used: it cannot be pickled

    def forward(self, x: Tensor) -> Tensor:
        return _Count.apply(x, self) if torch.is_grad_enabled() else x

    def entered(self, token: Token) -> None:
        self.alive = weakref.WeakSet() if self.alive is None else self.alive
        self.alive.add(token)
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        self.most_alive = max(self.most_alive, len(self.alive))

    def get_extra_state(self) -> tuple[int, int, int]:
        return self.waiting, self.most_waiting, self.most_alive

    def set_extra_state(self, state: tuple[int, int, int]) -> None:
        self.waiting, self.most_waiting, self.most_alive = state


MICROBATCHES = 20


class Counts(Small):
    """Counts in each of three stages, and in the code before and after them; the loss also sees the input."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(3) for layer in (Counter(), nn.Linear(WIDTH, WIDTH))]
        self.sequential_module = nn.Sequential(*layers)
        self.before = nn.Sequential(nn.Linear(WIDTH, WIDTH), Counter())
        self.after = Counter()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.before(batch[0])
        y = self.after(self(x) + x)
        return {"loss": mse_loss(y[:, :2], batch[1]), "y": y}

    def counts(self) -> dict[str, list[tuple[int, int, int]]]:
        layers = list(self.sequential_module)[::2]
        return {
            "inside": [layer.get_extra_state() for layer in layers],
            "around": [self.before[1].get_extra_state(), self.after.get_extra_state()],
        }


def counted(stages: int) -> dict[str, list[tuple[int, int, int]]]:
    strategy = RPCSequentialStrategy(
        [6 // stages] * stages, microbatches=MICROBATCHES, checkpoint="never", schedule="1f1b"
    )
    train = partial(batches, (MICROBATCHES, MICROBATCHES, 2))
    return fit(Counts, strategy, stages, train=train, max_epochs=1).model.counts()


def counted_everywhere() -> list[Any]:
    return [counted(stages) for stages in (1, 3)]


@pytest.mark.slow
def test_micro_batches_kept_on_each_stage_and_around_them() -> None:
    one, three = run(counted_everywhere)
    assert simulate(one_f_one_b(3, MICROBATCHES)).peak_activations == [3, 2, 1]
    assert three["inside"] == [(0, 3, 3), (0, 2, 2), (0, 1, 1)]  # none waits in the end; the most that ever did
    assert one["inside"] == [(0, 1, 1)] * 3
    for stages, counts in ((1, one), (3, three)):
        (_, _, before), (_, after, alive_after) = counts["around"]
        assert after == 1 and alive_after == 1  # the graph of a loss ends with its backward pass
        assert stages <= before <= 2 * stages + 1  # sent ahead, and not answered yet
        assert before < MICROBATCHES / 2


# Memory in bytes

ROWS, STAGES, MANY, FEW = 64, 2, 32, 4
"""Rows of a micro-batch, and micro-batches of a step."""

ACTIVATION_WIDTH = MEBI // 4 // ROWS
NUM_ACTIVATIONS = 8


class Large(Small):
    """On stage 0, a micro-batch keeps 8 activations of 1 MiB; so large is its input, which wants a gradient, too."""

    def __init__(self) -> None:
        super().__init__()
        self.widens = nn.Linear(WIDTH, ACTIVATION_WIDTH)
        activations = [nn.Tanh() for _ in range(NUM_ACTIVATIONS)]
        self.sequential_module = nn.Sequential(
            MeasuresMemory(ROWS), *activations, nn.Linear(ACTIVATION_WIDTH, 2), nn.Linear(2, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.sequential_module(self.widens(x))


def growth_bytes(schedule: str, microbatches: int) -> int:
    balance = [NUM_ACTIVATIONS + 2, 1]
    strategy = RPCSequentialStrategy(balance, microbatches=microbatches, checkpoint="never", schedule=schedule)
    sizes = (microbatches, ROWS * microbatches, ROWS * microbatches, ROWS * microbatches)  # first a small one
    outcome = fit(Large, strategy, STAGES, train=lambda: batches(sizes), precision="32-true", max_epochs=1)
    return int(outcome.model.sequential_module[0].growth)


def all_growths() -> dict[Any, int]:
    assert FEW == 2 * STAGES
    runs = [("1f1b", FEW), ("1f1b", MANY), ("gpipe", MANY)]
    return {(schedule, number): growth_bytes(schedule, number) for schedule, number in runs}


@on_cpus
@pytest.mark.slow
def test_memory_of_a_worker_does_not_grow_with_the_micro_batches() -> None:
    """The most bytes that the first worker's process has ever held, over what it held before the first large step."""
    growth = run(all_growths, timeout_seconds=150)
    print({name: f"{bytes_ / MEBI:.1f} MiB" for name, bytes_ in growth.items()})
    assert growth["1f1b", FEW] >= STAGES * NUM_ACTIVATIONS * MEBI
    # 28 more micro-batches cost less than the activations of four: what arrives ahead, and what the allocator keeps.
    assert growth["1f1b", MANY] <= growth["1f1b", FEW] + 4 * NUM_ACTIVATIONS * MEBI
    assert growth["gpipe", MANY] > 4 * growth["1f1b", MANY]  # it would be seen
