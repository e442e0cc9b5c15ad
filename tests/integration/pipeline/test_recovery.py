"""Workers that are killed in mid-run: others take over, nobody notices, and the results are the same."""

import contextlib
import copy
import gc
import json
import multiprocessing
import os
import pickle
import re
import signal
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
from harness import run
from procfs import is_alive, stop
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from strategies.common.errors import WorkerLost
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.control.parts import PartKind
from strategies.pipeline.control.shelf import captured
from strategies.pipeline.driver import ModelCopy, Pipeline
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.optim.optimizers import follow_optimizer
from strategies.pipeline.recovery import log, recovery
from strategies.pipeline.recovery.repairs import Recovery, Repair
from strategies.pipeline.stage.layers import PassContext
from strategies.pipeline.state.remote_operations import OnStages

CPU = torch.device("cpu")
STEPS, ROWS, WIDTH, CLASSES, MICROBATCHES = 6, 8, 6, 5, 3
BALANCES = {"gpipe": [3, 4, 6], "1f1b": [3, 4, 6], "zbv": [2, 2, 2, 2, 2, 3]}

Kill = tuple[str, int]
"""What a worker does when it is to be killed, and its rank."""


def strike(phase: str) -> None:
    """Ends this process if it is a worker that the test wants to end here, once."""
    name, _, rank = Path("/proc/self/comm").read_text().strip().rpartition("-")
    order = Path(f"kill-{phase}-{rank}")
    if name == "relay-worker" and order.exists():
        order.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


class Killable(nn.Module):
    """Ends its process where the test says so; keeps a list and a tensor that are no part of its ``state_dict``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []
        self.factor = 1.0
        self.seen: dict[str, Tensor] = {"mean": torch.zeros(())}

    def forward(self, x: Tensor) -> Tensor:
        strike("forward")
        self.calls.append(len(self.calls))
        self.seen["mean"] = 0.5 * self.seen["mean"] + x.detach().mean()
        if x.requires_grad:
            x.register_hook(lambda grad: strike("backward"))
        return x * self.factor

    def __getstate__(self) -> dict[str, Any]:
        strike("snapshot")
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        strike("recovery")
        super().__setstate__(state)


class KillableAdamW(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        strike("step")
        return super().step(closure)


class Model(nn.Module):
    """An embedding that is tied to the head, batch norms and dropout; a parameter outside of the layers."""

    def __init__(self) -> None:
        super().__init__()
        head, embedding = nn.Linear(WIDTH, CLASSES, bias=False), nn.Embedding(CLASSES, WIDTH)
        embedding.weight = head.weight
        self.layers = nn.Sequential(
            *(embedding, Killable(), nn.Linear(WIDTH, WIDTH), Killable(), nn.BatchNorm1d(WIDTH)),
            *(nn.Linear(WIDTH, WIDTH), Killable(), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
            *(nn.Dropout(0.2), Killable(), head),
        )
        self.scale = nn.Parameter(torch.ones(()))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.layers(x) * self.scale, y)


@dataclass
class Outcome:
    """What a training came to."""

    losses: dict[int, float] = field(default_factory=dict)
    repairs: list[Repair] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)


def batch(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(CLASSES, (ROWS,), generator=generator) for _ in range(2)]


def values_of(computed: Tensor) -> Any:
    """The values of a tensor that a stage has computed."""
    with OnStages():
        return computed.tolist()


class Training:
    """A training of three processes, whose workers are killed.

    Args:
        schedule: The schedule.
        recovery: How lost workers are replaced.
    """

    def __init__(self, schedule: str, recovery: Recovery | None = None) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.average = copy.deepcopy(self.model)
        weights = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = KillableAdamW(groups, lr=0.01)
        self.pipeline = Pipeline(
            self.model.layers,
            BALANCES[schedule],
            [CPU] * 3,
            Settings(microbatches=MICROBATCHES, schedule=schedule),
            optimizers=[self.optimizer],
            model=self.model,
            copies=[ModelCopy(self.average, self.average.layers)],
            recovery=recovery,
        )
        follow_optimizer(self.optimizer, self.pipeline.optimizers)

    def run(self, kills: Mapping[int, list[Kill]]) -> Outcome:
        """Trains; workers are killed in the steps that ``kills`` names."""
        pipeline, outcome = self.pipeline, Outcome()
        pipeline.start()
        with OnStages():
            computed = self.model.layers[2].weight.detach().clone()
        for step in range(STEPS):
            for phase, rank in kills.get(step, ()):
                Path(f"kill-{phase}-{rank}").touch()
            outcome.losses[step] = self.step(step)
            with OnStages():
                computed.lerp_(self.model.layers[2].weight, 0.1)
        outcome.repairs = pipeline.repairs
        outcome.values = {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "computed": values_of(computed),
            "calls": [pickle.loads(captured(remote, PartKind.OBJECTS)[0]) for remote in pipeline.remotes],
            "random": torch.get_rng_state(),
        }
        pipeline.close()
        outcome.values["lists"] = [m.calls for m in self.model.modules() if isinstance(m, Killable)]
        outcome.values["objects"] = [
            (m.seen, m.calls) for m in pipeline.stages[-1].modules() if isinstance(m, Killable)
        ]
        return outcome

    def step(self, step: int) -> float:
        """Makes one step and returns its loss. The learning rate and an attribute of a layer on a worker change."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        for layer in (self.model.layers[1], self.model.layers[11]):
            layer.factor = 1.0 + 0.1 * step
        x, y = batch(step)
        self.optimizer.zero_grad()
        if self.pipeline.settings.interleaves:
            parts = list(zip(x.split(3), y.split(3), strict=True))
            codes = [partial(self.model.loss, *part) for part in parts]
            loss = self.pipeline.interleave(codes, [len(y) / ROWS for _, y in parts], PassContext.capture("cpu"))
        else:
            loss = self.model.loss(x, y)
        assert loss is not None
        loss.backward()
        self.optimizer.step()
        with OnStages():
            for average, own in zip(self.average.parameters(), self.model.parameters(), strict=True):
                average.detach().lerp_(own.detach(), 0.25)
        return loss.item()


def same(ours: Any, expected: Any, where: str = "") -> None:
    assert type(ours) is type(expected), where
    if isinstance(expected, Tensor):
        assert ours.dtype == expected.dtype and torch.equal(ours, expected), where
    elif isinstance(expected, Mapping):
        assert list(ours) == list(expected), (where, list(ours), list(expected))
        for key in expected:
            same(ours[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(ours) == len(expected), where
        for k, (own, other) in enumerate(zip(ours, expected, strict=True)):
            same(own, other, f"{where}.{k}")
    else:
        assert ours == expected, (where, ours, expected)


def compare(ours: Outcome, expected: Outcome) -> None:
    same(ours.losses, expected.losses, "losses")
    same(ours.values, expected.values, "values")


def killed_in_each_phase(schedule: str) -> None:
    expected = Training(schedule).run({})
    assert not expected.repairs
    for every, kills in (
        (1, {1: [("forward", 0)], 2: [("backward", 1)], 4: [("step", 0)]}),
        (1, {1: [("snapshot", 1)], 3: [("forward", 0), ("step", 1)], 5: [("backward", 0), ("recovery", 1)]}),
        (2, {0: [("step", 1)], 3: [("snapshot", 0)], 5: [("forward", 1)]}),
        (100, {1: [("forward", 1)], 4: [("backward", 0)]}),
    ):
        ours = Training(schedule, Recovery(10, every)).run(kills)
        compare(ours, expected)
        assert not list(Path(".").glob("kill-*")) and ours.repairs


def one_worker_killed(schedule: str) -> None:
    expected = Training(schedule).run({})
    ours = Training(schedule, Recovery(2)).run({2: [("forward", 0)], 4: [("snapshot", 1)]})
    compare(ours, expected)
    assert len(ours.repairs) == 2, ours.repairs


def test_a_killed_worker_is_replaced() -> None:
    run(one_worker_killed, "1f1b")


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param("gpipe", marks=pytest.mark.slow),
        pytest.param("1f1b", marks=pytest.mark.slow),
        pytest.param("zbv", marks=pytest.mark.nightly),
    ],
)
def test_a_worker_killed_in_each_phase(schedule: str) -> None:
    run(killed_in_each_phase, schedule)


class Blocks(nn.Module):
    """A model that calls the blocks of an ``nn.ModuleList`` itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Killable(), nn.Linear(WIDTH, WIDTH)) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def blocks_of_a_module_list(kill: bool) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Blocks()
    optimizer = KillableAdamW(model.parameters(), lr=0.01)
    settings = Settings(microbatches=2, schedule="gpipe")
    pipeline = Pipeline(
        model.blocks,
        [1, 3],
        [CPU] * 2,
        settings,
        optimizers=[optimizer],
        model=model,
        path="blocks",
        recovery=Recovery(1),
    )
    follow_optimizer(optimizer, pipeline.optimizers)
    pipeline.start()
    losses = []
    for step in range(3):
        if kill and step == 1:
            Path("kill-forward-0").touch()
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    pipeline.close()
    return losses, state


def killed_with_blocks() -> None:
    (losses, values), (expected, others) = (blocks_of_a_module_list(kill) for kill in (True, False))
    assert losses == expected and not Path("kill-forward-0").exists()
    same(values, others)


@pytest.mark.slow
def test_blocks_of_a_module_list() -> None:
    run(killed_with_blocks)


def two_stages(*layers: nn.Module, restarts: int = 3, **settings: Any) -> tuple[nn.Sequential, Pipeline]:
    torch.manual_seed(0)
    module = nn.Sequential(*layers)
    recovery = Recovery(restarts) if restarts else None
    pipeline = Pipeline(
        module, [len(layers) - 1, 1], [CPU] * 2, Settings(microbatches=2, **settings), recovery=recovery
    )
    pipeline.start()
    return module, pipeline


def worker_of(pipeline: Pipeline, i: int = 0) -> int:
    found = re.search(r"process (\d+)", pipeline.remotes[i].process.description)
    assert found is not None
    return int(found[1])


class Hoards(nn.Module):
    """Gets an object that cannot be pickled in its forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        self.lock = threading.Lock()
        return x


def kill_worker(pipeline: Pipeline) -> None:
    os.kill(worker_of(pipeline), signal.SIGKILL)


def between_operations() -> None:
    """A worker is lost while the driver holds the loss of a pass, in evaluation, and when the run ends."""
    x = torch.randn(4, 3)

    def outcome(*kills: str) -> Any:
        torch.manual_seed(0)
        module, pipeline = two_stages(nn.Linear(3, 3), nn.Linear(3, 3))

        def at(moment: str) -> None:
            if moment in kills:
                kill_worker(pipeline)

        module(x).sum().backward()
        at("gradients")
        loss = module(x).sum()
        at("loss")
        loss.backward()
        with torch.no_grad():
            outputs = [module(x)]
            at("evaluation")
            outputs.append(module(x))
        at("reading")
        grads = captured(pipeline.remotes[0], PartKind.GRADS)
        at("end")
        pipeline.close()
        assert len(pipeline.repairs) == len(kills)
        return [*outputs, grads, module.state_dict()]

    expected = outcome()
    for kills in (["gradients"], ["loss"], ["evaluation"], ["reading"], ["end"], ["gradients", "loss", "end"]):
        same(outcome(*kills), expected, str(kills))


def test_between_operations() -> None:
    run(between_operations)


def long_evaluation() -> None:
    """Passes without a step, and state dicts that are loaded, fill the log; a snapshot empties it in time."""
    limit = recovery.MOST_LOGGED_BYTES = 2000  # of about three passes
    module, pipeline = two_stages(nn.Linear(3, 3), nn.Linear(3, 3))
    x = torch.randn(4, 3)
    sizes = []
    with torch.no_grad():
        expected = module(x)
        for number in range(60):
            if number % 10 == 5:
                module.load_state_dict(module.state_dict())
            if number == 40:
                kill_worker(pipeline)
            assert torch.equal(module(x), expected)
            sizes.append(pipeline.log_bytes)
    assert 500 < max(sizes) - min(sizes) < 2 * limit, sizes
    pipeline.close()
    assert len(pipeline.repairs) == 1


def test_a_long_evaluation_does_not_fill_the_memory() -> None:
    run(long_evaluation)


def kept_output() -> None:
    """No snapshot can be taken while a pass may still have a backward part. A cycle of objects does not keep it."""
    limit = recovery.MOST_LOGGED_BYTES = 2000
    module, pipeline = two_stages(nn.Linear(3, 3), nn.Linear(3, 3))
    x = torch.randn(4, 3)

    def largest() -> int:
        sizes = []
        with torch.no_grad():
            for _ in range(20):
                module(x)
                sizes.append(pipeline.log_bytes)
        return max(sizes[10:])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gc.disable()
        cycle: list[Any] = [module(x)]
        cycle.append(cycle)
        del cycle
        largest()
        assert largest() < 2 * limit
        gc.enable()
    kept = module(x)
    with pytest.warns(UserWarning, match=r"is kept somewhere, and no backward pass.* 0 MiB now") as caught:
        assert largest() > 2 * limit
    assert len(caught) == 1
    del kept
    largest()
    assert largest() < 2 * limit
    pipeline.close()


def test_an_output_that_is_kept() -> None:
    run(kept_output)


def interrupted_repair() -> None:
    """Ctrl-C while workers are replaced: no worker waits for the rest of the pass, and the weights come back."""
    replace = recovery.Recoverer._replace

    def interrupting(self: recovery.Recoverer, *args: Any) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)  # meanwhile, the main thread leaves the pass
        return replace(self, *args)

    for schedule in ("gpipe", "1f1b"):
        training = Training(schedule, Recovery(1))
        expected = copy.deepcopy(dict(training.model.named_parameters()))
        with patch.object(recovery.Recoverer, "_replace", interrupting):
            training.pipeline.start()
        Path("kill-forward-0").touch()
        with pytest.raises(KeyboardInterrupt):
            training.step(0)
        start = time.monotonic()
        training.pipeline.close()
        assert time.monotonic() - start < 20 and len(training.pipeline.repairs) == 1
        same(dict(training.model.named_parameters()), expected, schedule)


def test_an_interrupted_repair() -> None:
    run(interrupted_repair)


def one_step(schedule: str) -> Training:
    training = Training(schedule)
    training.pipeline.start()
    training.step(0)
    training.pipeline.close()
    return training


def interrupted_verification() -> None:
    """Ctrl-C while a step is computed the second time: every stage ends in the state after the step."""
    run_again = log.Log.run_again

    def interrupting(self: log.Log, *args: Any) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)  # the workers are in the state before the step
        return run_again(self, *args)

    for schedule in ("gpipe", "1f1b"):
        training, expected = Training(schedule, Recovery(0, verify_every_n_steps=1)), one_step(schedule)
        training.pipeline.start()
        training.step(0)
        with patch.object(log.Log, "run_again", interrupting), pytest.raises(KeyboardInterrupt):
            training.pipeline.verify()
        training.pipeline.close()
        same(training.model.state_dict(), expected.model.state_dict(), schedule)
        same(training.optimizer.state_dict(), expected.optimizer.state_dict(), schedule)


def test_an_interrupted_verification() -> None:
    run(interrupted_verification)


class Turns(nn.Module):
    """Has and sends complex numbers that torch has not conjugated yet."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("angles", torch.randn(3, dtype=torch.complex64).conj())

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight * self.angles).conj()


class Real(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.real


def verification_of_complex_numbers() -> None:
    module, x = nn.Sequential(Turns(), Real()), torch.randn(4, 3)
    expected = copy.deepcopy(module)
    expected(x).sum().backward()
    recovery = Recovery(0, verify_every_n_steps=1)
    pipeline = Pipeline(module, [1, 1], [CPU] * 2, Settings(microbatches=2), recovery=recovery)
    pipeline.start()
    module(x).sum().backward()
    pipeline.verify()
    (grad,) = captured(pipeline.remotes[0], PartKind.GRADS).values()
    pipeline.close()
    torch.testing.assert_close(grad, expected[0].weight.grad)


def test_a_step_with_complex_numbers_is_verified() -> None:
    run(verification_of_complex_numbers)


def repair_that_is_tried_again() -> None:
    """A new worker is lost, too, and the main thread calls the model before the next ones are there."""
    kill, num_killed, is_lost_again = recovery.Recoverer._kill, 0, threading.Event()

    def killing(self: recovery.Recoverer) -> None:
        nonlocal num_killed
        kill(self)
        num_killed += 1
        if num_killed == 2:
            is_lost_again.set()
            time.sleep(1)

    training, expected = Training("gpipe", Recovery(2)), one_step("gpipe")
    with patch.object(recovery.Recoverer, "_kill", killing):
        training.pipeline.start()
    Path("kill-recovery-0").touch()
    kill_worker(training.pipeline)
    assert is_lost_again.wait(60)
    training.step(0)
    training.pipeline.close()
    same(training.model.state_dict(), expected.model.state_dict())
    assert len(training.pipeline.repairs) == 1


def test_a_repair_that_is_tried_again() -> None:
    run(repair_that_is_tried_again)


def what_repairs_leave_behind() -> None:
    """Files, ports and threads of the sessions before, and recorders of a batch whose records are lost."""
    module, pipeline = two_stages(nn.Linear(3, 3), nn.Linear(3, 3), restarts=5)
    this, x = psutil.Process(), torch.randn(4, 3)

    def held() -> list[int]:
        gc.collect()
        return [this.num_fds(), this.num_threads()]

    first: list[int] = []
    for number in range(5):
        recording = pipeline.start_recording(number)
        kill_worker(pipeline)
        module(x).sum().backward()
        recording.stop()
        assert recording.take() is None
        first = first or held()
    deadline = time.monotonic() + 60
    while any(now > before for now, before in zip(held(), first, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.1)  # threads of a session end, and close their connections
    assert len(pipeline.repairs) == 5 and all(now <= before for now, before in zip(held(), first, strict=True))
    module(x)
    assert pipeline._running is not None and pipeline._running.executor.stage.recorder is None
    (record,) = [remote.ask(StageCommands.record, False).wait() for remote in pipeline.remotes]
    assert not record.records
    pipeline.close()


def test_what_repairs_leave_behind() -> None:
    run(what_repairs_leave_behind)


class Counts(nn.Module):
    """Returns something else each time that any process calls it."""

    def forward(self, x: Tensor) -> Tensor:
        with Path("calls").open("a") as file:
            file.write(".")
        return x + Path("calls").stat().st_size


def limits() -> None:
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match="under data_plane='gloo' only, got data_plane='simulated'"):
        two_stages(nn.Linear(3, 3), nn.Linear(3, 3), data_plane="simulated")
    module, pipeline = two_stages(nn.Linear(3, 3), nn.Linear(3, 3), restarts=1)
    module(x)
    kill_worker(pipeline)
    module(x)
    kill_worker(pipeline)
    with pytest.raises(WorkerLost, match=r"stage 0 .* was killed by signal 9"):
        module(x)
    pipeline.close(gather=False)
    assert pipeline.log_bytes == 0

    module, pipeline = two_stages(nn.Linear(3, 3), Hoards(), nn.Linear(3, 3))
    module(x).sum().backward()
    pipeline.optimizers.num_steps += 1
    with pytest.raises(ValueError, match=r"no snapshot can be taken of stage 0 .*: layer 1, a Hoards, cannot be sent"):
        module(x).sum().backward()
    pipeline.close(gather=False)

    module, pipeline = two_stages(Counts(), nn.Linear(3, 3))
    module(x)
    kill_worker(pipeline)
    message = (
        r"(?s)signal 9.*No new workers could take over: stage 0 \(layers 0 to 0: Counts\) was run again .* "
        "different values for micro-batch 0"
    )
    with pytest.raises(WorkerLost, match=message):
        module(x)
    pipeline.close(gather=False)


def test_limits() -> None:
    run(limits)


def a_worker_that_hangs() -> None:
    x = torch.randn(4, 3)
    module, pipeline = two_stages(nn.Linear(3, 3), nn.Linear(3, 3), rpc_timeout_sec=2.0)
    expected = module(x).tolist()
    stop(worker_of(pipeline))
    assert module(x).tolist() == expected and "does not answer" in pipeline.repairs[0].lost
    pipeline.close()


@pytest.mark.slow
def test_a_worker_that_hangs() -> None:
    run(a_worker_that_hangs)


def holds_snapshots(told: str) -> None:
    """A driver that says which files hold its snapshots, and waits to be killed."""
    module, pipeline = two_stages(nn.Linear(300, 300), nn.Linear(300, 3))
    for _ in range(3):
        module(torch.ones(2, 300)).sum().backward()
        pipeline.optimizers.num_steps += 1
    pipeline.wait()
    Path(told).write_text(json.dumps([[worker_of(pipeline), os.getpid()], slots_of(os.getpid())]))
    time.sleep(60)


def driver_killed() -> None:
    told = Path("told").absolute()
    driver = multiprocessing.get_context("fork").Process(target=holds_snapshots, args=(str(told),))
    driver.start()
    while not told.exists() or not told.read_text():
        time.sleep(0.01)
    pids, inodes = json.loads(told.read_text())
    assert len(inodes) == 2 and all(slots_of(pid) == inodes for pid in pids)
    os.kill(pids[1], signal.SIGKILL)
    driver.join()
    deadline = time.monotonic() + 60
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    everybody = [slots_of(int(name)) for name in os.listdir("/proc") if name.isdigit()]
    assert not set(inodes) & set(chain(*everybody))


def slots_of(pid: int) -> list[int]:
    """The slots that a process has open or mapped, by inode."""
    found: set[int] = set()
    with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
        lines = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "relay-snapshot" in line]
        found |= {int(line.split()[4]) for line in lines}
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # that which listed the folder
                if "relay-snapshot" in os.readlink(file):
                    found.add(os.stat(file).st_ino)
    return sorted(found)


@pytest.mark.slow
def test_snapshots_end_with_the_driver_that_is_killed() -> None:
    run(driver_killed)
