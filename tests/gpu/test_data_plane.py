"""The device plane over NCCL. Those for one GPU have run on one; ``docs/gpu.md`` says what each is expected to show.

``tests/integration/pipeline/test_gpu_tests.py`` calls the functions on CPUs, over the simulated plane.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import run
from parity import Small, batches, compare, fit
from torch import Tensor, nn

from strategies import RPCSequentialStrategy
from strategies.common.random_seeds import Seeds
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.stage.layers import PassContext

pytestmark = pytest.mark.gpu

SCHEDULES = {"gpipe": None, "1f1b": None, "interleaved": 2, "zb-h1": 2, "zbv": None, "v-half": None}
ALLOWED = ("env", "thread")
"""CUDA and NCCL keep threads and variables of a process."""


def needs(number: int) -> pytest.MarkDecorator:
    have = torch.cuda.device_count()
    return pytest.mark.skipif(have < number, reason=f"needs {number} GPUs, and {have} are there")


def devices_of(stages: int, shared: bool = False, kind: str = "cuda") -> list[torch.device]:
    """The driver, which is last, has the first GPU, as under the strategy."""
    if kind == "cpu":
        return [torch.device("cpu")] * stages
    return [torch.device(kind, 0 if shared else (i + 1) % stages) for i in range(stages)]


def trained(
    plane: str, schedule: str, devices: list[torch.device], width: int = 64, make: Callable[[], Any] = nn.Identity
) -> dict[str, Any]:
    """Three steps of SGD over batches of 11, 7 and 16 rows in float64, and an evaluation."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(16)]
    layers[3].append(make())
    module = nn.Sequential(*layers).double()
    settings = Settings(microbatches=5, schedule=schedule, chunks=SCHEDULES[schedule], data_plane=plane)
    placement = settings.programs(len(devices)).placement
    chunks = placement.num_stages
    balance = [len(layers) // chunks + (i < len(layers) % chunks) for i in range(chunks)]
    own = iter(layers)
    for number, i in zip(balance, settings.programs(len(devices)).rank_of, strict=True):
        for _ in range(number):
            layer = next(own)
            if i == len(devices) - 1:
                layer.to(devices[-1])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    pipeline = Pipeline(module, balance, devices, settings, optimizers=[optimizer], seeds=Seeds(1))
    pipeline.start()
    try:
        losses = steps(pipeline, module, optimizer, schedule, width, devices[-1])
        pipeline.close()
    finally:
        pipeline.close(gather=False)  # after an error
    return {"losses": losses, **{name: p.detach().cpu() for name, p in module.named_parameters()}}


def steps(
    pipeline: Pipeline,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: str,
    width: int,
    device: torch.device,
) -> list[float]:
    """Return losses and sums of squared gradients of the inputs, and an output."""
    losses = []
    for rows in (11, 7, 16):
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, width, dtype=torch.float64, generator=generator).to(device).requires_grad_()
        optimizer.zero_grad()
        pipeline.optimizers.zero_grad_remotes(optimizer, True)
        if schedule == "gpipe":
            loss = module(x).square().mean()
        else:
            parts = x.chunk(5)
            codes = [lambda part=part: module(part).square().mean() for part in parts]
            given = pipeline.interleave(codes, [len(part) / rows for part in parts], PassContext.capture(device.type))
            assert given is not None
            loss = given
        loss.backward()
        optimizer.step()
        pipeline.optimizers.step_remotes(optimizer, {})
        assert x.grad is not None
        losses += [loss.item(), x.grad.square().sum().item()]
    with torch.no_grad():
        losses.append(module(x).sum().item())
    return losses


def check_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-9)
    for name in expected.keys() - {"losses"}:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-9, atol=1e-11, msg=name)


def check_schedule(plane: str, schedule: str, stages: int, shared: bool, width: int = 64, kind: str = "cuda") -> None:
    expected = trained("gloo", schedule if schedule == "gpipe" else "1f1b", devices_of(1, kind=kind), width)
    check_equal(trained(plane, schedule, devices_of(stages, shared, kind), width), expected)


@needs(1)
@pytest.mark.parametrize("width", [64, 2048])  # with 2048, tensors have messages of their own, in pinned memory
def test_stages_that_share_a_gpu_use_pinned_host_memory(width: int) -> None:
    """Expected: equal to one stage. NCCL would refuse two ranks on one GPU."""
    with pytest.raises(ValueError, match="share cuda:0"):
        Settings(data_plane="nccl").plane(devices_of(2, shared=True), [0, 0])
    run(check_schedule, "auto", "1f1b", 2, True, width, allow=ALLOWED)


@needs(1)
def test_cpu_stages_beside_a_gpu() -> None:
    """Expected: equal to one stage."""
    run(check_mixed, allow=ALLOWED)


def check_mixed(kind: str = "cuda") -> None:
    (device,) = devices_of(1, kind=kind)
    expected = trained("gloo", "1f1b", [device])
    check_equal(trained("auto", "1f1b", [torch.device("cpu"), device]), expected)


@needs(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=needs(4))])
def test_schedules_over_nccl(schedule: str, stages: int) -> None:
    """Expected: losses, gradients and weights are those of one stage, within seconds."""
    run(check_schedule, "nccl", schedule, stages, False, allow=ALLOWED)


@needs(2)
def test_large_activations_over_nccl() -> None:
    """Expected: equal to one stage. Transfers overlap with actions; a wrong order of streams gives wrong values."""
    run(check_schedule, "nccl", "1f1b", 2, False, 2048, allow=ALLOWED)


def seconds_per_step(plane: str, width: int, rows: int = 512, kind: str = "cuda") -> float:
    devices = devices_of(2, kind=kind)
    module = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    for layer in module[2:]:
        layer.to(devices[-1])
    settings = Settings(microbatches=8, schedule="1f1b", checkpoint="never", data_plane=plane)
    pipeline = Pipeline(module, [2, 2], devices, settings, seeds=Seeds(1))
    pipeline.start()
    parts = torch.randn(8 * rows, width, device=devices[-1]).chunk(8)
    codes = [lambda part=part: module(part).square().mean() for part in parts]
    times = []
    for _ in range(12):
        if kind == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = pipeline.interleave(codes, [1 / 8] * 8, PassContext.capture(kind))
        assert loss is not None
        loss.backward()
        loss.item()
        times.append(time.perf_counter() - begin)
    pipeline.close(gather=False)
    return sorted(times)[len(times) // 2]


@needs(2)
@pytest.mark.alone
def test_nccl_is_faster_than_host_memory() -> None:
    """Expected: activations of 8 MiB take less time from GPU to GPU than through the host."""
    host, device = (run(seconds_per_step, plane, 4096, allow=ALLOWED) for plane in ("gloo", "nccl"))
    print(f"a step takes {host * 1e3:.1f} ms through host memory and {device * 1e3:.1f} ms from GPU to GPU")
    assert device < host


class Tied(Small):
    """Weights that stage 0 shares with the driver."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module[3].weight = self.sequential_module[0].weight


def trained_by_lightning(
    plane: str, devices: int, precision: str, schedule: str, accelerator: str = "gpu"
) -> dict[str, Any]:
    strategy = RPCSequentialStrategy(
        [2, 4] if devices == 2 else [6], microbatches=3, data_plane=plane, schedule=schedule, checkpoint="never"
    )
    val = partial(batches, (8, 5))
    outcome = fit(Tied, strategy, devices, accelerator=accelerator, precision=precision, val=val, max_epochs=1)
    return {"losses": outcome.losses, "metrics": outcome.metrics, "parameters": outcome.parameters}


PRECISIONS = [("64-true", 1e-9), ("32-true", 1e-4), ("bf16-mixed", 2e-2), ("16-mixed", 2e-2)]
"""Of Lightning, and how far losses may differ from those of one stage."""


@needs(2)
@pytest.mark.parametrize(("precision", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_under_lightning_with_ties(schedule: str, precision: str, tolerance: float) -> None:
    """Expected: the losses of one stage. Under 16-mixed the scaler's state is on the driver and its scale on all."""
    one, two = (
        run(trained_by_lightning, plane, devices, precision, schedule, allow=ALLOWED)
        for plane, devices in (("auto", 1), ("nccl", 2))
    )
    assert two["losses"] == pytest.approx(one["losses"], rel=tolerance)
    assert two["metrics"] == pytest.approx(one["metrics"], rel=tolerance)


class RaisesInBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(self._raise)
        return x

    def _raise(self, grad: Tensor) -> None:
        raise RuntimeError("raised by a layer")


def failed(plane: str = "nccl", kind: str = "cuda") -> tuple[str, float]:
    begin = time.monotonic()
    try:
        trained(plane, "1f1b", devices_of(2, kind=kind), make=RaisesInBackward)
    except RuntimeError as error:
        return str(error), time.monotonic() - begin
    return "no error", 0.0


@needs(2)
def test_a_failing_stage_ends_the_run() -> None:
    """Expected: the layer's own error within seconds; the driver aborts its communicators and does not hang."""
    message, seconds = run(failed, allow=ALLOWED)
    assert "raised by a layer" in message
    assert seconds < 60


class OnOtherGpu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(f"cuda:{1 - x.device.index}")


def on_other_gpu() -> str:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), OnOtherGpu(), nn.Linear(4, 4))
    module[2].to("cuda:0")
    settings = Settings(microbatches=2, data_plane="nccl")
    pipeline = Pipeline(module, [2, 1], devices_of(2), settings, seeds=Seeds(1))
    pipeline.start()
    try:
        module(torch.randn(4, 4, device="cuda:0"))
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        pipeline.close(gather=False)
    return "no error"


@needs(2)
def test_a_tensor_on_the_gpu_of_another_stage_is_refused() -> None:
    """Expected: an error that names both GPUs."""
    assert "stage 0 computes on cuda:1, but sends a tensor of shape [2, 4] that is on cuda:0" in run(
        on_other_gpu, allow=ALLOWED
    )


def compared_by_lightning(accelerator: str = "gpu", plane: str = "nccl") -> None:
    expected = fit(Small, RPCSequentialStrategy(microbatches=3, schedule="1f1b"), 1, accelerator=accelerator)
    strategy = RPCSequentialStrategy([1, 2, 2, 1], microbatches=3, schedule="1f1b", data_plane=plane)
    compare(fit(Small, strategy, 4, accelerator=accelerator), expected)


@needs(4)
def test_four_gpus_under_lightning() -> None:
    """Expected: ``devices=4`` is one stage on each GPU, over NCCL; all values are those of one stage."""
    run(compared_by_lightning, allow=ALLOWED)
