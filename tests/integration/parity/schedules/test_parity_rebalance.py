"""Layers that move to other stages in mid-run: losses and weights equal to the last bit those of a run without it."""

import os
import re
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from block_loops import TimmViT
from harness import run
from parity import WIDTH, Outcome, Small, batches, compare, fit, on_cpus
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import WeightAveraging
from pytorch_lightning.profilers import PyTorchProfiler
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from strategies import Recovery, RPCSequentialStrategy
from strategies.pipeline import is_recomputing

pytestmark = on_cpus


class Everything(Small):
    """Dropout, running statistics, a tied parameter, and a layer with a counter of its own."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        last.weight = first.weight
        middle = [nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2)]
        self.sequential_module = nn.Sequential(first, *middle, Counts(), last, nn.Linear(WIDTH, 2))
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sgd":
            optimizer: Any = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        else:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)]


class Counts(nn.Linear):
    """Counts its forward passes in an attribute, without recomputations, whose number depends on the stage."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += not is_recomputing()
        return super().forward(x)


class Moves(Callback):
    """Moves layers at the end of epoch 0, and after the second batch of epoch 1."""

    def __init__(self, balances: list[list[int]]) -> None:
        self.balances = balances
        self.seen: list[list[int]] = []

    def on_train_epoch_end(self, trainer: Any, model: Any) -> None:
        if trainer.current_epoch == 0:
            self.move(trainer, model, 0)

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 1):
            self.move(trainer, model, 1)

    def move(self, trainer: Any, model: Any, number: int) -> None:
        before = {name: parameter for name, parameter in model.named_parameters()}
        values = {name: value.clone() for name, value in model.state_dict().items()}
        grads = {name: grad if (grad := p.grad) is None else grad.clone() for name, p in model.named_parameters()}
        trainer.strategy.rebalance(self.balances[number])
        assert trainer.strategy.balance == self.balances[number]
        for name, parameter in model.named_parameters():
            assert parameter is before[name], name
        for name, value in model.state_dict().items():
            assert torch.equal(value, values[name]), name
        for name, parameter in model.named_parameters():
            grad = parameter.grad
            assert (grad is None) == (grads[name] is None) and (grad is None or torch.equal(grad, grads[name])), name
        pipeline = trainer.strategy.pipeline
        here = {id(p) for p in pipeline.stages[-1].parameters()}
        assert {id(p) for p in pipeline.module.parameters() if not p.is_meta} == here
        self.seen.append(trainer.strategy.balance)


def trained(make: Callable[[], Any], strategy: dict[str, Any], devices: int, **arguments: Any) -> Outcome:
    settings: dict[str, Any] = {
        "max_epochs": 3,
        "train": lambda: batches([8, 8, 8, 6]),
        "val": lambda: batches([6, 6]),
        **arguments,
    }
    return fit(make, RPCSequentialStrategy(**{"microbatches": 3, **strategy}), devices, **settings)


CASES: dict[str, tuple[dict[str, Any], int, list[list[int]], str, int]] = {
    "gpipe": ({"balance": [3, 3, 3]}, 3, [[1, 4, 4], [5, 2, 2]], "sgd", 1),
    "1f1b": ({"balance": [3, 3, 3], "schedule": "1f1b"}, 3, [[5, 2, 2], [1, 2, 6]], "adam", 2),
    "interleaved": ({"balance": [2, 2, 2, 3], "schedule": "interleaved"}, 2, [[1, 3, 3, 2], [3, 2, 1, 3]], "sgd", 2),
    "zbv": ({"balance": [2, 2, 2, 3], "schedule": "zbv"}, 2, [[1, 3, 3, 2], [3, 2, 1, 3]], "adam", 1),
}
"""Arguments of the strategy, processes, the balances to which layers move, the optimizer, and accumulated batches.

The two uses of the tied parameter stay on one process or on two: gradients of two uses on one process are added in
another order than those of two processes.
"""


def moved(name: str) -> None:
    strategy, devices, balances, optimizer, accumulated = CASES[name]
    make = partial(Everything, optimizer)
    without = trained(make, strategy, devices, accumulate_grad_batches=accumulated)
    moves = Moves(balances)
    outcome = trained(make, strategy, devices, accumulate_grad_batches=accumulated, callbacks=[moves])
    compare(outcome, without, 0.0)
    assert moves.seen == balances
    assert outcome.model.sequential_module[6].calls == without.model.sequential_module[6].calls > 0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "1f1b" else pytest.mark.slow) for name in CASES]
)
def test_nothing_changes_but_the_place(name: str) -> None:
    run(moved, name)


class Averages(WeightAveraging):
    """Keeps an average of the weights, and of the running statistics."""

    def __init__(self) -> None:
        super().__init__(use_buffers=True)


def with_clipping_and_average() -> None:
    options = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 1}
    strategy, devices, balances, *_ = CASES["1f1b"]
    make = partial(Everything, "adam")
    without = trained(make, strategy, devices, callbacks=[Averages()], **options)
    compare(trained(make, strategy, devices, callbacks=[Averages(), Moves(balances)], **options), without, 0.0)


@pytest.mark.slow
def test_with_clipping_by_norm_and_averaged_weights() -> None:
    run(with_clipping_and_average)


def saved_and_resumed() -> None:
    strategy, devices, balances, *_ = CASES["gpipe"]
    make = partial(Everything, "adam")
    without = trained(make, strategy, devices)
    saving: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": "saved", "max_epochs": 2}
    first = trained(make, strategy, devices, callbacks=[Moves(balances)], **saving)
    path = first.trainer.checkpoint_callback.best_model_path
    resumed = trained(make, {**strategy, "schedule": "gpipe", "balance": [4, 4, 1]}, devices, ckpt_path=path)
    assert resumed.losses == without.losses[len(first.losses) :]
    resumed.losses = without.losses
    resumed.model.sequential_module[6].calls = without.model.sequential_module[6].calls
    compare(resumed, without, 0.0)


@pytest.mark.slow
def test_a_checkpoint_written_later_is_resumed_with_any_balance() -> None:
    run(saved_and_resumed)


class Loop(Small):
    """A model that calls its blocks itself."""

    def __init__(self) -> None:
        super().__init__()
        del self.sequential_module
        self.net = TimmViT()

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images = batch[0].repeat(1, 32).view(-1, 3, 8, 8)
        loss = self.net(images).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        pass


class KillsWorker(Callback):
    """Kills a worker once, in epoch 2."""

    def __init__(self) -> None:
        self.has_killed = False

    def on_train_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (2, 2) and not self.has_killed:
            self.has_killed = True
            found = re.search(r"process (\d+)", trainer.strategy.pipeline.remotes[0].process.description)
            assert found is not None
            os.kill(int(found[1]), signal.SIGKILL)


def loop_with_a_lost_worker_and_background_saves() -> None:
    strategy = {"balance": [2, 2], "schedule": "1f1b", "microbatches": 2}
    saving: dict[str, Any] = {"enable_checkpointing": True, "val": None}
    without = trained(Loop, strategy, 2, default_root_dir="without", **saving)
    moves, kills = Moves([[1, 3], [3, 1]]), KillsWorker()
    options = {**strategy, "recovery": Recovery(1), "async_save": True}
    outcome = trained(Loop, options, 2, default_root_dir="with", callbacks=[moves, kills], **saving)
    assert kills.has_killed and outcome.trainer.strategy.balance == [3, 1]
    compare(outcome, without, 0.0)


@pytest.mark.slow
def test_loops_lost_workers_and_background_saves() -> None:
    run(loop_with_a_lost_worker_and_background_saves)


class Remembers(nn.Linear):
    """A layer whose output depends on a list and on a tensor that it changes."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.sums: list[float] = []
        self.average = torch.zeros(WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.sums = [*self.sums[-5:], x.sum().item()]
            self.average = 0.9 * self.average + 0.1 * x.mean(0)
        return super().forward(x + sum(self.sums) / 10 + self.average)


class WithMemory(Everything):
    """A model with such layers."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.sequential_module[3], self.sequential_module[6] = Remembers(), Remembers()


def with_memory() -> None:
    strategy, devices, balances, *_ = CASES["1f1b"]
    make, strategy = partial(WithMemory, "sgd"), {**strategy, "checkpoint": "never"}
    without = trained(make, strategy, devices)
    compare(trained(make, strategy, devices, callbacks=[Moves(balances)]), without, 0.0)


@pytest.mark.slow
def test_objects_and_tensors_of_layers_that_are_no_buffers_move_too() -> None:
    run(with_memory)


class Refused(Callback):
    """Tries to move layers where or in a way that is not possible."""

    def __init__(self, balance: list[int], kind: type[Exception], match: str, hook: str) -> None:
        self.balance, self.kind, self.match, self.hook = balance, kind, match, hook
        self.was_refused = False

    def _try(self, hook: str, trainer: Any) -> None:
        if hook == self.hook and not self.was_refused:
            with pytest.raises(self.kind, match=self.match):
                trainer.strategy.rebalance(self.balance)
            self.was_refused = True

    def on_train_epoch_end(self, trainer: Any, model: Any) -> None:
        self._try("on_train_epoch_end", trainer)

    def on_before_zero_grad(self, trainer: Any, model: Any, optimizer: Any) -> None:
        self._try("on_before_zero_grad", trainer)


class LooksAtItself(nn.Linear):
    """A layer that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.lock = threading.Lock()


class CannotLeave(Everything):
    """A model one layer of which can be on the driver only."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.sequential_module[6] = LooksAtItself()


def refused(name: str) -> None:
    strategy, devices, *_ = CASES[name]
    impossible = [
        Refused([3, 3, 2], MisconfigurationException, "provided balance sum: 8", "on_train_epoch_end"),
        Refused([4, 5], MisconfigurationException, "is for 2 stages, but there are 3", "on_train_epoch_end"),
        Refused(
            [1, 4, 4], RuntimeError, r"between steps only \(in hooks .* waits for its backward", "on_before_zero_grad"
        ),
        Refused([1, 6, 2], MisconfigurationException, "layer 6, a LooksAtItself, cannot be sent", "on_train_epoch_end"),
    ]
    make = partial(CannotLeave, "sgd")
    without = trained(make, strategy, devices)
    outcome = trained(make, strategy, devices, callbacks=impossible)
    assert all(callback.was_refused for callback in impossible)
    assert outcome.trainer.strategy.balance == [3, 3, 3]
    compare(outcome, without, 0.0)
    with pytest.raises(RuntimeError, match="the pipeline is not running"):
        outcome.trainer.strategy.rebalance([1, 4, 4])


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_what_cannot_be_moved_stays_where_it_is(name: str) -> None:
    """Under ``1f1b``, all backward passes of a step have run when Lightning clears the gradients."""
    run(refused, name)


class BuiltLater(Small):
    """A model that the driver need not hold."""

    def __init__(self) -> None:
        super().__init__()
        del self.sequential_module

    def configure_model(self) -> None:
        self.sequential_module = nn.Sequential(nn.Linear(WIDTH, 2048), nn.Linear(2048, 2))


def refused_before_a_worker_starts() -> None:
    strategy = {"balance": [3, 3], "rebalance": "auto"}
    with pytest.raises(MisconfigurationException, match="rebalance='auto' ends workers, whose traces PyTorchProfiler"):
        trained(Small, strategy, 2, profiler=PyTorchProfiler(dirpath="traces"))
    with pytest.raises(MisconfigurationException, match="the default for a model that was built in configure_model"):
        trained(BuiltLater, {**strategy, "balance": [1, 1]}, 2)


def test_runs_in_which_layers_cannot_move() -> None:
    run(refused_before_a_worker_starts)
