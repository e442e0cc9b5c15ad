"""Whole runs over NCCL, which need two GPUs and have not run on them; ``docs/gpu.md`` has a table of expectations.

``tests/integration/pipeline/test_gpu_tests.py`` calls the functions on CPUs, over the simulated plane.
"""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gpu_ranks_job
import pytest
import torch
from harness import run
from parity import Outcome, Small, batches, compare, fit
from paths import environment
from torch import Tensor, nn
from torch.utils.data import DataLoader

from strategies import RPCSequentialStrategy
from strategies.common.errors import WorkerLost
from strategies.pipeline.partition.balance import balance_by_time

pytestmark = pytest.mark.gpu

ALLOWED = ("env", "thread", "process_group")
"""What CUDA, NCCL and Lightning keep of a process."""
ON_GPUS = "gpu", "nccl"


def needs(number: int) -> pytest.MarkDecorator:
    have = torch.cuda.device_count()
    return pytest.mark.skipif(have < number, reason=f"needs {number} GPUs, and {have} are there")


def trained(accelerator: str, plane: str, devices: int, make: Any = Small, **options: Any) -> Outcome:
    arguments = {name: options.pop(name) for name in ("ckpt_path", "max_epochs", "train") if name in options}
    given: dict[str, Any] = {"microbatches": 3, "schedule": "1f1b", "data_plane": plane, **options}
    if devices > 1:
        given.setdefault("balance", [3, 3])
    return fit(make, RPCSequentialStrategy(**given), devices, accelerator=accelerator, **arguments)


class Random(Small):
    """With dropout in both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module[1] = nn.Sequential(nn.Tanh(), nn.Dropout(0.4))
        self.sequential_module[4] = nn.Sequential(nn.GELU(), nn.Dropout(0.4))


def check_recomputation(accelerator: str, plane: str) -> None:
    for schedule in ("gpipe", "1f1b"):  # under 1f1b, a step has a loss for each micro-batch
        expected = trained(accelerator, "auto", 1, Random, checkpoint="never", schedule=schedule)
        for checkpoint in ("never", "except_last", "always"):
            actual = trained(accelerator, plane, 2, Random, checkpoint=checkpoint, schedule=schedule)
            compare(actual, expected)


@needs(2)
def test_recomputation_and_dropout_over_nccl() -> None:
    """Expected: masks do not depend on stages or on recomputation, so all values are those of one stage."""
    run(check_recomputation, *ON_GPUS, allow=ALLOWED)


def check_resuming(accelerator: str, plane: str) -> None:
    expected = trained(accelerator, "auto", 1)
    with TemporaryDirectory() as folder:
        first = trained(accelerator, plane, 2, max_epochs=1)
        path = str(Path(folder, "one.ckpt"))
        first.trainer.save_checkpoint(path)
        resumed = trained(accelerator, plane, 2, ckpt_path=path)
    assert [*first.losses, *resumed.losses] == pytest.approx(expected.losses, rel=1e-9)
    for name, value in expected.parameters.items():
        torch.testing.assert_close(resumed.parameters[name], value, rtol=1e-9, atol=1e-9)


@needs(2)
def test_a_run_over_nccl_is_saved_and_resumed() -> None:
    """Expected: the losses of a run that was not interrupted; communicators are created a second time."""
    run(check_resuming, *ON_GPUS, allow=ALLOWED)


class Hungry(nn.Module):
    """Asks for more memory than a GPU has, in the forward pass of the second micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == 2:
            if x.device.type != "cuda":
                raise torch.OutOfMemoryError("CUDA out of memory.")
            torch.empty(2**42, dtype=torch.uint8, device=x.device)
        return x


class HungryModel(Small):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.sequential_module[place] = Hungry()


def out_of_memory(accelerator: str, plane: str, place: int) -> str:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trained(accelerator, plane, 2, partial(HungryModel, place), checkpoint="never")  # else B0 calls the layer again
    return str(caught.value)


def check_message(message: str, stage: str) -> None:
    assert "CUDA out of memory" in message and f"{stage} (layers" in message and "out of memory in F1: " in message
    assert "GiB reserved" in message and "(balance)" in message


@needs(2)
@pytest.mark.parametrize(("place", "stage"), [(1, "stage 0"), (4, "stage 1")])
def test_a_gpu_without_memory_names_its_stage(place: int, stage: str) -> None:
    """Expected: "CUDA out of memory", the stage, ``F1``, and memory figures of the allocator, within seconds."""
    check_message(run(out_of_memory, *ON_GPUS, place, allow=ALLOWED), stage)


class Kills(nn.Module):
    """Kills its process in the forward pass of the sixth micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return x


class Killed(Small):
    def __init__(self) -> None:
        super().__init__()
        self.sequential_module[1] = Kills()


def seconds_after_a_kill(accelerator: str, plane: str) -> float:
    begin = time.monotonic()
    with pytest.raises(WorkerLost, match=r"stage 0 .* was killed by signal 9"):
        trained(accelerator, plane, 2, Killed)
    return time.monotonic() - begin


@needs(2)
def test_a_killed_worker_does_not_hang_the_driver() -> None:
    """Expected: ``WorkerLost`` within a minute of the start, although the driver's GPU waits for the worker's send."""
    assert run(seconds_after_a_kill, *ON_GPUS, allow=ALLOWED) < 60


def check_replicas(accelerator: str, plane: str) -> None:
    """Two replicas of two stages, each replica with half of the batches."""
    options = {"data_parallel_size": 2, "zero_stage": 1}
    actual = trained(accelerator, plane, 4, **options)
    assert actual.trainer.world_size == 2
    reference = trained(accelerator, "gloo", 4, **options)
    compare(actual, reference)


@needs(4)
def test_two_replicas_over_nccl() -> None:
    """Expected: the values of the same run over host memory; averages travel over gloo in both."""
    run(check_replicas, *ON_GPUS, allow=(*ALLOWED, "port", "rpc"))


def balanced(device: str) -> list[int]:
    """Two layers that take as long as the six others together, on ``device``."""
    width = 4096 if device != "cpu" else 256
    large = [nn.Sequential(*(nn.Linear(width, width) for _ in range(9))) for _ in range(2)]
    layers = nn.Sequential(*large, *(nn.Linear(width, width) for _ in range(6)))
    return balance_by_time(2, layers, torch.randn(max(width, 512), width), device=torch.device(device))


@needs(1)
@pytest.mark.alone
def test_balance_by_time_waits_for_the_gpu() -> None:
    """Expected: one large layer, then the rest; without synchronisation, all layers would take the time of a launch."""
    assert run(balanced, "cuda:0", allow=ALLOWED) == [1, 7]


def peak_bytes() -> tuple[int, int]:
    from strategies.pipeline.stage.action_recorder import memory_bytes
    from strategies.pipeline.stage.out_of_memory import DeviceMemory

    device = torch.device("cuda:0")
    before = memory_bytes(device)
    kept = torch.empty(2**28, dtype=torch.uint8, device=device)
    assert DeviceMemory.of(device).allocated_bytes >= kept.nbytes
    return before, memory_bytes(device)


@needs(1)
def test_memory_figures_are_those_of_the_allocator() -> None:
    """Expected: a tensor of 256 MiB shows as 256 MiB, to the allocator's rounding."""
    before, after = run(peak_bytes, allow=ALLOWED)
    assert 2**28 <= after - before < 2**28 + 2**22


class PinnedBatches(Small):
    """Notes what its batches are like before they are moved, and where they are then."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, bool, str]] = set()
        self.are_pinned = False

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.were_on, self.are_pinned = str(batch[0].device), batch[0].is_pinned()
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.seen.add((self.were_on, self.are_pinned, str(batch[0].device)))
        return super().training_step(batch, batch_idx)


def pinned_batches(pin_memory: bool) -> DataLoader:
    return DataLoader(batches().dataset, batch_size=None, pin_memory=pin_memory)


def pinned(accelerator: str, plane: str) -> set[tuple[str, bool, str]]:
    """What batches of a loader with pinned memory are like; the training equals one without."""
    plain, outcome = (
        trained(accelerator, plane, 2, PinnedBatches, train=partial(pinned_batches, pin)) for pin in (False, True)
    )
    compare(outcome, plain)
    assert {on_device for _, _, on_device in plain.model.seen} == {on_device for _, _, on_device in outcome.model.seen}
    seen: set[tuple[str, bool, str]] = outcome.model.seen
    return seen


@needs(2)
def test_batches_of_a_loader_with_pinned_memory() -> None:
    """Expected: batches are pinned before they are moved, and are on the driver's GPU then; results do not change."""
    assert run(pinned, *ON_GPUS, allow=ALLOWED) == {("cpu", True, "cuda:0")}


ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


class Notes(nn.Module):
    """Notes in its buffer whether its process has the settings of the allocator, and whether memory segments grow."""

    noted: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noted", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        has_variable = all(os.environ.get(name) == value for name, value in ALLOCATOR.items())
        segments = torch.cuda.memory_snapshot() if x.device.type == "cuda" else []
        grows = any(segment["is_expandable"] for segment in segments)
        self.noted.copy_(torch.tensor([has_variable, grows]))
        return x


class Noted(Small):
    def __init__(self) -> None:
        super().__init__()
        self.sequential_module[1], self.sequential_module[4] = Notes(), Notes()


def allocators(accelerator: str, plane: str) -> list[list[int]]:
    """What the layers of both stages have noted."""
    return [buffer.tolist() for buffer in trained(accelerator, plane, 2, Noted, max_epochs=1).buffers.values()]


@needs(2)
def test_expandable_segments_on_all_stages() -> None:
    """Expected: the driver and the worker have the variable, and the segments of both GPUs are expandable."""
    assert run(allocators, *ON_GPUS, env=ALLOCATOR, allow=ALLOWED) == [[1, 1], [1, 1]]


def ranks(accelerator: str, plane: str) -> dict[str, Any]:
    """What two ranks of torchrun have come to."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    job = [gpu_ranks_job.__file__, "results.pt", accelerator, plane]
    ended = subprocess.run([*command, *job], env=environment(), text=True, capture_output=True, timeout=150)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    results: dict[str, Any] = torch.load("results.pt", map_location="cpu")
    return results


def check_ranks(accelerator: str, plane: str) -> list[int]:
    """Compares ranks with one stage; returns the number of the device of each stage, -1 for a CPU."""
    results, expected = ranks(accelerator, plane), trained(accelerator, "auto", 1, gpu_ranks_job.Placed)
    assert results["losses"] == pytest.approx(expected.losses, rel=1e-9)
    for name, value in expected.parameters.items():
        torch.testing.assert_close(results["parameters"][name], value, rtol=1e-9, atol=1e-9)
    devices: list[int] = results["devices"]
    return devices


@needs(2)
def test_ranks_of_torchrun_with_a_gpu_each() -> None:
    """Expected: results of one stage; rank 1, with stage 0, has ``cuda:1``, and rank 0, the driver, ``cuda:0``."""
    assert run(check_ranks, *ON_GPUS, timeout_seconds=170, allow=(*ALLOWED, "tmp")) == [1, 0]
