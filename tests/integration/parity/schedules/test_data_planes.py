"""The device plane, simulated on CPUs by the rules of NCCL, trains as one process does; misuse of it is an error.

``pytest --data-plane=simulated-serial tests/integration/parity`` runs all tests of parity in that way.
"""

import threading
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run
from parity import WIDTH, Small, batches, check, fit, on_cpus
from parity_layers import Unembed
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from undisturbed import until_undisturbed

from strategies import RPCSequentialStrategy
from strategies.common.random_seeds import Seeds
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.stage.layers import PassContext
from strategies.pipeline.transport.simulated import SimulatedCommunicator

pytestmark = on_cpus

SCHEDULES: dict[str, int | None] = {
    "gpipe": None,
    "1f1b": None,
    "interleaved": 2,
    "zb-h1": 2,
    "zbv": None,
    "v-half": None,
}
"""Chunks per stage of each schedule."""


def trained(plane: str, schedule: str, stages: int) -> list[Tensor]:
    """Two steps and two evaluations; returns losses, outputs, weights, and the gradients of the input."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(12)]
    for layer in layers[:2]:
        layer.requires_grad_(False)
    module = nn.Sequential(*layers).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    settings = Settings(
        microbatches=5, schedule=schedule, chunks=SCHEDULES[schedule], data_plane=plane, rpc_timeout_sec=15
    )
    chunks = settings.programs(stages).placement.num_stages
    balance = [len(layers) // chunks + (i < len(layers) % chunks) for i in range(chunks)]
    devices = [torch.device("cpu")] * stages
    pipeline = Pipeline(module, balance, devices, settings, optimizers=[optimizer], seeds=Seeds(1))
    pipeline.start()
    results = []
    for rows in (11, 7):
        x = torch.randn(rows, 6, dtype=torch.float64, requires_grad=True)
        optimizer.zero_grad()
        pipeline.optimizers.zero_grad_remotes(optimizer, True)
        if schedule == "gpipe":
            loss = module(x).square().mean()
        else:
            parts = x.chunk(5)
            codes = [lambda part=part: module(part).square().mean() for part in parts]
            shares = [len(part) / rows for part in parts]
            given = pipeline.interleave(codes, shares, PassContext.capture("cpu"))
            assert given is not None
            loss = given
        loss.backward()
        optimizer.step()
        pipeline.optimizers.step_remotes(optimizer, {})
        assert x.grad is not None
        results += [loss.detach(), x.grad]
    with torch.no_grad():
        results += [module(x), module(x[:3])]
    pipeline.close()
    return [*results, *(p.detach() for p in module.parameters())]


def check_schedules(planes: tuple[str, ...], schedules: tuple[str, ...], numbers: tuple[int, ...]) -> None:
    expected = trained("gloo", "1f1b", 1)
    for plane, schedule, stages in product(planes, schedules, numbers):
        for one, other in zip(trained(plane, schedule, stages), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12, msg=f"{plane}, {schedule}, {stages} stages")


def test_devices_that_run_one_operation_at_a_time() -> None:
    run(check_schedules, ("simulated-serial",), ("gpipe", "1f1b", "interleaved", "zbv"), (3,))


@pytest.mark.nightly
def test_all_schedules() -> None:
    run(check_schedules, ("simulated", "simulated-serial"), tuple(SCHEDULES), (2, 3, 4), timeout_seconds=240)


class Around(Small):
    """Code around the layers, dropout, a weight of the driver and stage 0, and weights of stages 0, 1 and 2."""

    def __init__(self) -> None:
        super().__init__()
        embed, middle, late, head = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        late.weight = middle.weight
        layers = [embed, middle, nn.Dropout(0.3), late, nn.LayerNorm(WIDTH), nn.Tanh(), head, Unembed(embed.weight)]
        self.sequential_module = nn.Sequential(*layers)
        self.before = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = mse_loss(self(self.before(batch[0]))[:, :2], batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", mse_loss(self(self.before(batch[0]))[:, :2], batch[1]), batch_size=len(batch[0]))


class WithoutDropout(Around):
    def __init__(self) -> None:
        super().__init__()
        self.sequential_module[2] = nn.Identity()


def check_under_lightning() -> None:
    """Ties of stages 0 and 3, and of stages 1 and 2: with sends of both before any receive, this deadlocks."""
    strategy = {"data_plane": "simulated-serial", "balance": [1, 2, 3, 2]}
    check(WithoutDropout, stages=(4,), strategy=strategy, val=partial(batches, (8, 8, 5)), max_epochs=1)


def test_ties_and_validation_under_lightning() -> None:
    run(check_under_lightning)


class ChangesItsOutput(nn.Module):
    """Returns the same tensor for each micro-batch, with other values."""

    def __init__(self) -> None:
        super().__init__()
        self.output: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.output is None or self.output.shape != x.shape:
            self.output = torch.empty_like(x)
        with torch.no_grad():
            return self.output.copy_(x)


class OnMeta(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to("meta")


def is_less(limit: float, seconds: float) -> None:
    assert seconds < limit


def slow_aborts() -> None:
    """Lets each abort of a communicator in this process block for 5 s, as ncclCommAbort can, and then fail."""

    def abort(communicator: SimulatedCommunicator) -> None:
        time.sleep(5)
        raise RuntimeError("NCCL watchdog: timed out")

    SimulatedCommunicator.abort = abort


class Raises(nn.Module):
    """Raises an error in the forward pass of the third micro-batch, with the time."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls < 3:
            return x
        slow_aborts()
        raise ArithmeticError(f"raised by a layer at {time.time()}")


def seconds_until_the_error(place: int, schedule: str) -> float:
    slow_aborts()
    model = Small()
    model.sequential_module[place] = Raises()
    strategy = RPCSequentialStrategy([2, 2, 2], microbatches=4, schedule=schedule, data_plane="simulated")
    try:
        fit(lambda: model, strategy, 3)
    except ArithmeticError as error:
        return time.time() - float(str(error).rpartition(" ")[2])
    raise AssertionError("no error")


@pytest.mark.parametrize(
    ("place", "schedule"),
    [(1, "1f1b"), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(2, "gpipe"), (4, "1f1b")])],
)
def test_the_error_of_a_layer_does_not_wait_for_slow_aborts(place: int, schedule: str) -> None:
    """On stage 0, on stage 1, and on the driver."""
    measure = partial(run, seconds_until_the_error, place, schedule, allow=("thread",))
    until_undisturbed(measure, partial(is_less, 2))


class WaitsForDevice(nn.Module):
    """In the third micro-batch, waits as for a stream until communicators of its process are aborted; says when.

    Nothing else ends that wait: its thread reads no message of another process.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file, self.num_calls = file, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == 3:
            is_aborted, abort = threading.Event(), SimulatedCommunicator.abort
            SimulatedCommunicator.abort = lambda communicator: (is_aborted.set(), abort(communicator))[1]
            self.file.with_suffix(".waits").touch()
            if is_aborted.wait(20):
                self.file.write_text(str(time.time()))
        return x


class RaisesMeanwhile(nn.Module):
    """Raises in the first micro-batch, once the other layer waits."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def forward(self, x: Tensor) -> Tensor:
        deadline = time.monotonic() + 60
        while not self.file.with_suffix(".waits").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        raise ArithmeticError(f"raised by a layer at {time.time()}")


def seconds_until_an_abort_elsewhere(place: int) -> float:
    file = Path("aborted").absolute()
    model = Small()
    model.sequential_module[0] = WaitsForDevice(file)
    model.sequential_module[place] = RaisesMeanwhile(file)
    try:
        fit(lambda: model, RPCSequentialStrategy([2, 2, 2], microbatches=4, data_plane="simulated"), 3)
    except ArithmeticError as error:
        return float(file.read_text()) - float(str(error).rpartition(" ")[2])
    raise AssertionError("no error")


@pytest.mark.parametrize("place", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_failure_ends_the_waits_for_devices_of_a_worker_that_has_not_failed(place: int) -> None:
    """A failure of stage 1, and of the driver; otherwise the worker would be killed, 5 s after the error."""
    until_undisturbed(partial(run, seconds_until_an_abort_elsewhere, place), partial(is_less, 4))


class Misuses(Small):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.sequential_module[1] = layer


def misused(layer: type[nn.Module]) -> str:
    strategy = RPCSequentialStrategy([2, 4], microbatches=4, data_plane="simulated")
    try:
        fit(lambda: Misuses(layer()), strategy, 2)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "no error"


def test_misuse_is_an_error() -> None:
    assert "changed a tensor of shape [2, 6] that it was sending to stage 1" in run(misused, ChangesItsOutput)
    assert "computes on cpu, but sends a tensor of shape [2, 6] that is on meta" in run(misused, OnMeta)
