"""BatchNorm in pipelines of two and three stages trains as in one process that is fed the same micro-batches.

The reference runs in one process, without a line of the pipeline, and takes all updates of the running statistics from
BatchNorm itself.
"""

from collections import defaultdict
from typing import Any

import torch
from harness import run
from parity import WIDTH, Outcome, Small, batches, compare, fit
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from strategies import RPCSequentialStrategy

MICROBATCHES = 3
SIZES = (8, 7, 2, 5)
"""Numbers of rows: 3, 3, 2, 3 micro-batches, some of a single row."""

CHANNELS, LENGTH = 4, 3

BEFORE = 5
"""What ``num_batches_tracked`` says at the beginning."""


class Normed(nn.Module):
    """``[rows, CHANNELS, LENGTH]`` to the same; what comes out depends on the running statistics in evaluation only."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(CHANNELS, **options)
        self.linear = nn.Linear(LENGTH, LENGTH)
        for name, buffer in self.norm.named_buffers():  # they show whoever sets them back
            buffer.fill_(BEFORE) if name == "num_batches_tracked" else buffer.uniform_(0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x).tanh())


class Model(Small):
    """BatchNorm of every kind, on each stage however the layers are divided."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(
            nn.Sequential(nn.Linear(WIDTH, CHANNELS * LENGTH), nn.Unflatten(1, (CHANNELS, LENGTH)), Normed()),
            Normed(momentum=None),
            Normed().eval(),  # stays so, as where the batches are too small for statistics
            Normed(momentum=0.3, affine=False),
            Normed(momentum=None, track_running_stats=False),
            nn.Sequential(Normed(momentum=None), nn.Flatten(), nn.Linear(CHANNELS * LENGTH, 2)),
        )
        self.example_input_array = torch.randn(6, WIDTH)
        self.initial = {name: buffer.clone() for name, buffer in self.named_buffers()}

    def on_train_start(self) -> None:
        """Balancing, starting and a sanity check of the validation are over, and have changed nothing."""
        state = self.state_dict()
        assert len(self.initial) == 5 * 3
        for name, buffer in self.initial.items():
            assert torch.equal(state[name], buffer.to(state[name].dtype)), name

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1:
            with torch.no_grad():
                self(batch[0] * 2)  # counts, for BatchNorm
        return self.loss(batch)


class Each(Model):
    """In one process: the micro-batches one after another."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.sequential_module(part) for part in parts(x)])


class Deferred(Model):
    """In one process: the micro-batches, on copies of the buffers, then all that entered a layer at once."""

    def forward(self, x: Tensor) -> Tensor:
        entered: dict[_BatchNorm, list[Tensor]] = defaultdict(list)
        norms = [m for m in self.modules() if isinstance(m, _BatchNorm)]
        hooks = [m.register_forward_pre_hook(lambda m, args: entered[m].append(args[0].detach())) for m in norms]
        copies = {name: buffer.clone() for name, buffer in self.sequential_module.named_buffers()}
        out = torch.cat([functional_call(self.sequential_module, copies, part) for part in parts(x)])
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for norm in norms:
                norm(torch.cat(entered[norm]))
        return out


def parts(x: Tensor) -> tuple[Tensor, ...]:
    return x.tensor_split(min(MICROBATCHES, len(x)))


def data() -> DataLoader:
    return batches(SIZES)


def train(stages: int, **options: Any) -> Outcome:
    """As a pipeline whose balance is found by looking at the layers."""
    strategy = RPCSequentialStrategy(microbatches=MICROBATCHES, **options)
    outcome = fit(Model, strategy, stages, train=data, val=data)
    assert len(strategy.balance) == stages
    return outcome


def assert_as_in_one_process(reference: type[Model], rows: list[dict[str, Any]], updates: int) -> None:
    """Compares losses, parameters, buffers, optimizer states and the validation loss."""
    single = fit(reference, SingleDeviceStrategy("cpu"), 1, train=data, val=data)
    counts = {name: int(b) for name, b in single.buffers.items() if name.endswith("num_batches_tracked")}
    frozen = [count for name, count in counts.items() if name.startswith("sequential_module.2.")]
    assert sorted(counts.values()) == frozen + [BEFORE + updates] * 4 and frozen == [BEFORE]
    for row in rows:
        compare(train(**row), single)


CALLS = len(SIZES) + 1
"""In an epoch; one of them without gradients."""


def deferred() -> None:
    rows = [
        {"stages": 1, "checkpoint": "never"},
        {"stages": 2, "checkpoint": "except_last"},
        {"stages": 3, "checkpoint": "always", "balance_mode": "balance_by_time"},
    ]
    assert_as_in_one_process(Deferred, [{**row, "deferred_batch_norm": True} for row in rows], 2 * CALLS)


def test_deferred_statistics_are_updated_once_a_batch() -> None:
    run(deferred)


def each() -> None:
    rows = [
        {"stages": 1, "checkpoint": "never"},
        {"stages": 2, "checkpoint": "always", "balance_mode": "balance_by_time"},
        {"stages": 3, "checkpoint": "except_last"},
    ]
    assert_as_in_one_process(Each, rows, 2 * (3 + 3 + 3 + 2 + 3))


def test_statistics_are_updated_once_a_micro_batch() -> None:
    run(each)
