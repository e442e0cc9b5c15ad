"""The functions of ``tests/gpu`` on CPUs, over the simulated plane, so that a first run on GPUs finds no slips in them.

What only a GPU has is left out: NCCL, figures of its allocator, float16 with a scaler, tensors on another GPU, DDP over
NCCL.
"""

from collections.abc import Callable

import pytest
import test_data_plane
import test_gpu
import test_gpu_runs
from harness import run

ON_CPUS = "cpu", "simulated"


@pytest.mark.nightly
def test_variables_of_the_allocator_reach_all_processes() -> None:
    assert run(test_gpu_runs.allocators, *ON_CPUS, env=test_gpu_runs.ALLOCATOR) == [[1, 0], [1, 0]]
    assert run(test_gpu_runs.allocators, *ON_CPUS) == [[0, 0], [0, 0]]


def check_schedules() -> None:
    for schedule in test_data_plane.SCHEDULES:
        test_data_plane.check_schedule("simulated", schedule, 2, False, kind="cpu")


@pytest.mark.slow
def test_schedules() -> None:
    run(check_schedules)
    run(test_data_plane.check_mixed, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["64-true", "32-true", "bf16-mixed"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_precisions(schedule: str, precision: str) -> None:
    one, two = (
        run(test_data_plane.trained_by_lightning, plane, devices, precision, schedule, "cpu")
        for plane, devices in (("auto", 1), ("simulated", 2))
    )
    tolerance = dict(test_data_plane.PRECISIONS)[precision]
    assert two["losses"] == pytest.approx(one["losses"], rel=tolerance)
    assert two["metrics"] == pytest.approx(one["metrics"], rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        test_gpu_runs.check_recomputation,
        test_gpu_runs.check_resuming,
        test_gpu_runs.check_replicas,
        test_data_plane.compared_by_lightning,
    ],
)
def test_whole_runs(check: Callable[[str, str], None]) -> None:
    run(check, *ON_CPUS, allow=("process_group", "port", "rpc", "env"))


@pytest.mark.slow
def test_failures() -> None:
    message, seconds = run(test_data_plane.failed, "simulated", "cpu")
    assert "raised by a layer" in message and seconds < 60
    assert run(test_gpu_runs.seconds_after_a_kill, *ON_CPUS) < 60
    for place, stage in ((1, "stage 0"), (4, "stage 1")):
        test_gpu_runs.check_message(run(test_gpu_runs.out_of_memory, *ON_CPUS, place), stage)


@pytest.mark.nightly
def test_ranks_of_torchrun() -> None:
    assert run(test_gpu_runs.check_ranks, *ON_CPUS, timeout_seconds=170, allow=("tmp",)) == [-1, -1]


@pytest.mark.slow
def test_figures_and_loaders() -> None:
    assert run(test_data_plane.seconds_per_step, "simulated", 8, 4, "cpu") > 0
    assert run(test_gpu_runs.balanced, "cpu") == [1, 7]
    assert run(test_gpu_runs.pinned, *ON_CPUS) == {("cpu", False, "cpu")}  # there is nothing to pin memory for


@pytest.mark.slow
def test_stages_that_share_a_device() -> None:
    one, two = (run(test_gpu.trained_by_lightning, name, "64-true", "cpu") for name in ("one stage", "pipeline"))
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-9)
