"""The engine over three processes, without Lightning: what passes between stages, and failures that come last."""

import copy
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import run
from parity_layers import Migrates
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from strategies.pipeline import driver
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.control.parts import PartKind
from strategies.pipeline.control.shelf import captured
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.optim.optimizers import PipelineOptimizers, follow_optimizer
from strategies.pipeline.stage.layers import PassContext

CPU = torch.device("cpu")


class Fork(nn.Module):
    """Passes on more than a tensor: whole numbers, nothing, and a tensor whose length depends on the values."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {
            "x": x * 2,
            "signs": (x > 0).long(),
            "nothing": None,
            "positive": (x > 0).sum(1, keepdim=True).expand(-1, 3),
        }


class Join(nn.Module):
    def forward(self, given: dict[str, Any]) -> Tensor:
        assert given["nothing"] is None
        return given["x"] + given["signs"] + given["positive"].sum(1, keepdim=True)


class Cut(nn.Module):
    """Ends the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


class WithPrototypes(nn.Linear):
    """Returns a weight beside the rows."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.weight


class FailsInBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(self.fail)
        return x

    def fail(self, grad: Tensor) -> None:
        raise ArithmeticError("in the last backward pass")


@contextmanager
def three_stages(layers: list[nn.Module], **settings: Any) -> Iterator[tuple[nn.Sequential, nn.Sequential, Pipeline]]:
    """A pipeline of the layers, and the same layers in this process alone."""
    torch.manual_seed(0)
    module = nn.Sequential(*layers).double()
    plain = copy.deepcopy(module)
    pipeline = Pipeline(module, [1, 2, len(layers) - 3], [CPU] * 3, Settings(microbatches=3, **settings))
    pipeline.start()
    try:
        yield module, plain, pipeline
    finally:
        pipeline.close()


def compare(module: nn.Sequential, plain: nn.Sequential, pipeline: Pipeline, x: Tensor) -> None:
    """Gradients of the input and of every parameter, and that no stage keeps anything afterwards."""
    results = []
    for each in (module, plain):
        given = x.clone().requires_grad_()
        for _ in range(2):
            each(given).square().mean().backward()
        results.append(given.grad)
    ours, expected = results
    if expected is None:
        assert ours is None
    else:
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
    grads = {name: grad for remote in pipeline.remotes for name, grad in captured(remote, PartKind.GRADS).items()}
    grads |= {name: p.grad for name, p in module.named_parameters() if not p.is_meta}
    for name, p in plain.named_parameters():
        if p.grad is None:
            assert grads[name] is None, name
        else:
            torch.testing.assert_close(grads[name], p.grad, rtol=1e-9, atol=1e-9)
    assert [remote.ask(StageCommands.num_kept).wait() for remote in pipeline.remotes] == [0, 0]


def what_passes_between_stages(modes: list[str]) -> None:
    fork_and_join: list[nn.Module] = [nn.Linear(4, 4), Fork(), Join(), nn.ReLU(inplace=True), nn.Linear(4, 2)]
    for mode in modes:
        with three_stages(fork_and_join, checkpoint=mode) as (module, plain, pipeline):
            for rows in (7, 3, 2, 1):
                compare(module, plain, pipeline, torch.randn(rows, 4, dtype=torch.float64))
                module.zero_grad()
                plain.zero_grad()
            with torch.no_grad():  # a batch that is larger than any before, and longer
                x = torch.randn(50, 4, dtype=torch.float64)
                torch.testing.assert_close(module(x), plain(x))
        cut: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4), Cut(), nn.Linear(4, 4), nn.Linear(4, 2)]
        with three_stages(cut, checkpoint=mode) as (module, plain, pipeline):
            compare(module, plain, pipeline, torch.randn(5, 4, dtype=torch.float64))
            module(torch.randn(5, 4, dtype=torch.float64))  # its backward pass never comes
            assert [remote.ask(StageCommands.num_kept).wait() for remote in pipeline.remotes] == [0, 0]


@pytest.mark.parametrize(
    "modes",
    [["except_last"], pytest.param(["never", "always"], marks=pytest.mark.slow)],
    ids=["except_last", "others"],
)
def test_what_passes_between_stages(modes: list[str]) -> None:
    run(what_passes_between_stages, modes)


def gradients_from_before_the_start() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    plain, x = copy.deepcopy(module), torch.randn(5, 4, dtype=torch.float64)
    for each in (module, plain):
        each(x).sum().backward()
    pipeline = Pipeline(module, [1, 2, 1], [CPU] * 3, Settings(microbatches=3))
    pipeline.start()
    try:
        compare(module, plain, pipeline, x)
    finally:
        pipeline.close()


def test_gradients_from_before_the_start_are_accumulated_as_in_one_process() -> None:
    run(gradients_from_before_the_start)


NUM_INTERLEAVED = 12


def most_suspended(graphs: frozenset[int]) -> int:
    """Run 12 micro-batches under 1f1b; those with numbers in ``graphs`` have an input that requires a gradient.

    Returns:
        The most micro-batches whose code had begun and not got the output of the module.
    """
    layers: list[nn.Module] = [nn.Linear(4, 4) for _ in range(4)]
    suspended = most = 0

    def code(m: int, module: nn.Module, scale: Tensor, row: Tensor) -> Tensor:
        nonlocal suspended, most
        suspended += 1
        most = max(most, suspended)
        output = module(row * scale if m in graphs else row)
        suspended -= 1
        return output.square().mean() * scale if m in graphs else output.square().mean()

    with three_stages(layers, schedule="1f1b") as (module, plain, pipeline):
        for _ in range(2):  # the gradients of the second pass are added to those of the first one
            rows = torch.randn(NUM_INTERLEAVED, 2, 4, dtype=torch.float64)
            scales = [torch.tensor(0.5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
            codes = [partial(code, m, module, scales[0], row) for m, row in enumerate(rows)]
            weights = [1 / NUM_INTERLEAVED] * NUM_INTERLEAVED
            loss = pipeline.interleave(codes, weights, PassContext.capture("cpu"))
            assert loss is not None
            loss.backward()
            interleaved = most
            expected = sum(code(m, plain, scales[1], row) for m, row in enumerate(rows)) / NUM_INTERLEAVED
            expected.backward()
            torch.testing.assert_close(loss, expected)
            if graphs:
                torch.testing.assert_close(scales[0].grad, scales[1].grad)
        grads = {name: grad for remote in pipeline.remotes for name, grad in captured(remote, PartKind.GRADS).items()}
        grads |= {name: p.grad for name, p in module.named_parameters() if not p.is_meta}
        for name, p in plain.named_parameters():
            torch.testing.assert_close(grads[name], p.grad, rtol=1e-9, atol=1e-9)
        assert [remote.ask(StageCommands.num_kept).wait() for remote in pipeline.remotes] == [0, 0]
    return interleaved


def suspended_micro_batches() -> list[int]:
    torch.manual_seed(1)
    return [most_suspended(frozenset(graphs)) for graphs in (range(NUM_INTERLEAVED), (), (4, 6, 11))]


def test_no_more_micro_batches_are_suspended_than_the_schedule_says() -> None:
    """With a graph before the call of the module in all micro-batches, in none, and in some."""
    assert run(suspended_micro_batches) == [3, 3, 3]


def failure_in_the_last_backward_pass() -> list[bool]:
    layers: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4), FailsInBackward(), nn.Linear(4, 2)]
    with (
        pytest.raises(ArithmeticError, match="in the last backward pass"),
        three_stages(layers) as (module, _, _),
    ):
        module(torch.randn(6, 4, dtype=torch.float64)).sum().backward()
    return [p.is_meta for p in module.parameters()]


def test_an_output_without_rows_is_refused_in_training_and_whole_in_evaluation() -> None:
    run(outputs_without_rows)


def outputs_without_rows() -> None:
    for last in (WithPrototypes(4, 6), nn.LSTM(4, 4)):  # the latter returns [length, rows, features], if x is one row
        with three_stages([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), last]) as (module, plain, _):
            x = torch.randn(6, 2, 4).double()
            with pytest.raises(ValueError, match=r"output\[1\].* of shape .* for a micro-batch of 2 rows.*'1f1b'"):
                module(x)
            for part in (module.eval(), plain.eval()):
                part.requires_grad_(False)
            with torch.no_grad():
                for _ in range(2):
                    torch.testing.assert_close(module(x), plain(x))


def test_failure_in_the_last_backward_pass_is_told_and_loses_nothing() -> None:
    assert not any(run(failure_in_the_last_backward_pass))


class Centers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centers", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.centers


def assigned_buffers() -> None:
    """A tensor that is assigned to a buffer is in the next state dict, and below the next one that is loaded."""
    with three_stages([Centers(), *(nn.Linear(3, 3) for _ in range(3))]) as (module, _, _):
        one = torch.ones(3, dtype=torch.float64)
        module[0].centers = one
        assert module.state_dict()["0.centers"].eq(1).all()
        module[0].centers = 2 * one
        module.load_state_dict({**module.state_dict(), "0.centers": 3 * one})
        module(one.expand(6, 3))
        assert module.state_dict()["0.centers"].eq(3).all()


def test_assigned_buffers() -> None:
    run(assigned_buffers)


def states_of_two_versions() -> None:
    """Into the module and into a model that contains it: a state of the old version, then one of the new version."""
    with three_stages([Migrates(3) for _ in range(4)]) as (module, plain, _):
        for ours, expected in ((module, plain), (nn.Sequential(module), nn.Sequential(plain))):
            new = expected.state_dict()
            old = {name.replace("weight", "matrix"): torch.randn_like(value) for name, value in new.items()}
            for given in (old, new):
                for each in (ours, expected):
                    each.load_state_dict(given)
                got, wanted = ours.state_dict(), expected.state_dict()
                assert got._metadata == wanted._metadata
                assert list(got) == list(wanted) and all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_layers_migrate_an_old_state_once_and_a_new_one_never() -> None:
    run(states_of_two_versions)


class Counts(Migrates):
    """Counts its rows in its extra state."""

    rows = 0

    def forward(self, x: Tensor) -> Tensor:
        self.rows += len(x)
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return {"rows": self.rows}

    def set_extra_state(self, state: Any) -> None:
        self.rows = state["rows"]


def extra_states() -> None:
    with three_stages([Counts(3) for _ in range(4)]) as (module, plain, pipeline):
        x = torch.randn(5, 3, dtype=torch.float64)
        assert torch.allclose(module(x), plain(x), rtol=1e-9)
        whole = pipeline.states[0].whole()
    for each in (module, whole):
        assert [layer.rows for layer in each] == [layer.rows for layer in plain]
        assert all(torch.equal(value, plain.get_parameter(name)) for name, value in each.named_parameters())


def test_extra_states_come_back_from_layers_that_migrate_old_weights() -> None:
    run(extra_states)


def within_a_checkpoint() -> None:
    """The second call, in the backward pass, would be another pass with other random numbers."""
    with three_stages([nn.Dropout(0.5), *(nn.Linear(3, 3) for _ in range(3))]) as (module, _, _):
        x = torch.ones(6, 3, dtype=torch.float64, requires_grad=True)
        for use_reentrant in (False, True):
            with pytest.raises(RuntimeError, match=r"pipelined module is called within torch\.utils\.checkpoint"):
                checkpoint(module, x, use_reentrant=use_reentrant)
            module.eval()
            with torch.no_grad():
                assert checkpoint(module, x, use_reentrant=use_reentrant).shape == (6, 3)
            module.train()


def test_a_call_within_a_checkpoint_is_refused() -> None:
    run(within_a_checkpoint)


def interrupted_end() -> None:
    """Ctrl-C while the layers return is raised when all of them are here."""
    take_back, interrupts = PipelineOptimizers.take_back, [True]

    def interrupted(self: PipelineOptimizers, *args: Any) -> None:
        if interrupts.pop() if interrupts else False:
            raise KeyboardInterrupt
        take_back(self, *args)

    module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    optimizer, expected = torch.optim.AdamW(module.parameters()), copy.deepcopy(module).state_dict()
    pipeline = Pipeline(module, [1, 1, 1], [CPU] * 3, Settings(), optimizers=[optimizer])
    pipeline.start()
    with patch.object(PipelineOptimizers, "take_back", interrupted), pytest.raises(KeyboardInterrupt):
        pipeline.close()
    torch.testing.assert_close(module.state_dict(), expected, rtol=0, atol=0)


def test_an_interrupted_end() -> None:
    run(interrupted_end)


class Grows(nn.Linear):
    """Its outputs are too large to be sent before they are received."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).repeat(1, 2**15)


class FailsOnGrown(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 3:
            raise ArithmeticError("grown")
        return super().forward(x)


class FailsOnGrownGradients(Grows):
    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        if output.requires_grad:
            output.register_hook(self.fail)
        return output

    def fail(self, grad: Tensor) -> None:
        raise ArithmeticError("grown")


class Same(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Shrinks(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :3])


LARGE: dict[str, list[type[nn.Linear]]] = {
    "worker 1": [Grows, FailsOnGrown, nn.Linear],
    "driver": [Grows, Same, FailsOnGrown],
    "worker 0, backward": [FailsOnGrownGradients, Shrinks, nn.Linear],
}


def large_values(case: str, microbatches: int) -> None:
    """A process fails and takes no more values. A process that sends to it stops waiting, and its layers return."""
    module = nn.Sequential(*(kind(3, 3) for kind in LARGE[case]))
    expected = copy.deepcopy(dict(module.named_parameters()))
    pipeline = Pipeline(module, [1, 1, 1], [CPU] * 3, Settings(microbatches=microbatches, rpc_timeout_sec=10))
    pipeline.start()
    with pytest.raises(ArithmeticError, match="grown"):
        module(torch.ones(32, 3)).sum().backward()
        module(torch.ones(32, 3))
    pipeline.close()
    torch.testing.assert_close(dict(module.named_parameters()), expected, rtol=0, atol=0)


@pytest.mark.parametrize("case", LARGE)
def test_a_failure_while_large_values_are_sent(case: str) -> None:
    for microbatches in (4, 8):
        run(large_values, case, microbatches)


class KeepsLocks(torch.optim.SGD):
    """Keeps what cannot be sent."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        if Path("locks").exists():
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["lock"] = Lock()


class OnlySaves(nn.Linear):
    """Adds to its state dict what nothing loads."""

    def get_extra_state(self) -> str:
        return "version 2"


def states_that_do_not_return() -> None:
    """A state of an optimizer that cannot be sent is an error, but parameters return. Extra states may stay away."""
    module = nn.Sequential(OnlySaves(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    for optimizer in (KeepsLocks(module.parameters(), 1.0), torch.optim.SGD(module.parameters(), 1.0)):
        expected = copy.deepcopy(module)
        pipeline = Pipeline(module, [1, 1, 1], [CPU] * 3, Settings(), optimizers=[optimizer])
        follow_optimizer(optimizer, pipeline.optimizers)
        pipeline.start()
        for layers in (module, expected):
            layers(torch.ones(4, 3)).sum().backward()
        Path("locks").touch()
        optimizer.step()
        torch.optim.SGD(expected.parameters(), 1.0).step()
        is_error = isinstance(optimizer, KeepsLocks)
        with pytest.raises(RuntimeError, match=r"cannot pickle .*lock") if is_error else nullcontext():
            pipeline.close()
        module.zero_grad()
        torch.testing.assert_close(list(module.parameters()), list(expected.parameters()))


def test_states_that_do_not_return() -> None:
    run(states_that_do_not_return)


class ReturnsSlowly(nn.Linear):
    """Takes its time before its state can return."""

    def get_extra_state(self) -> None:
        if Path("slowly").exists():
            Path("returns").touch()
            time.sleep(60)

    def set_extra_state(self, state: None) -> None:
        pass


def interrupt_twice() -> None:
    while not Path("returns").exists():
        time.sleep(0.01)
    for _ in range(2):
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)


def interrupted_rebalance() -> None:
    """The second Ctrl-C ends workers that do not answer, but their end is not what is raised."""
    module = nn.Sequential(ReturnsSlowly(3, 3), *(nn.Linear(3, 3) for _ in range(3)))
    pipeline = Pipeline(module, [1, 1, 2], [CPU] * 3, Settings())
    pipeline.start()
    Path("slowly").touch()
    Thread(target=interrupt_twice, daemon=True).start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pipeline.rebalance([1, 2, 1])
    assert time.monotonic() - begin < 30


def test_an_interrupted_rebalance() -> None:
    run(interrupted_rebalance)


def no_room_here() -> None:
    """After an error that was caught, layers cannot return to make a new start: they stay where they are."""
    with three_stages([nn.Linear(3, 3), FailsInBackward(), *(nn.Linear(3, 3) for _ in range(2))]) as (module, *_):
        x = torch.randn(3, 3, dtype=torch.float64)
        expected = module(x)
        with pytest.raises(ArithmeticError):
            expected.sum().backward()
            module(x)
        with patch.object(driver, "bring_back", side_effect=MemoryError), pytest.raises(MemoryError):
            module(x)
        assert all(parameter.is_meta for parameter in module[0].parameters())
        torch.testing.assert_close(module(x), expected, rtol=0, atol=0)


def test_a_start_after_an_error_that_could_not_be_made() -> None:
    run(no_room_here)


def no_room_to_rebalance() -> None:
    """Layers that cannot return, so that they could move, stay where they are."""
    with three_stages([nn.Linear(3, 3) for _ in range(4)]) as (module, plain, pipeline):
        x = torch.randn(3, 3, dtype=torch.float64)
        with patch.object(driver, "bring_back", side_effect=MemoryError), pytest.raises(MemoryError):
            pipeline.rebalance([2, 1, 1])
        assert all(parameter.is_meta for parameter in module[0].parameters())
        compare(module, plain, pipeline, x)
        assert pipeline.balance == [1, 2, 1]


def test_layers_that_cannot_return_do_not_move() -> None:
    run(no_room_to_rebalance)
