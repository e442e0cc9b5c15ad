"""``max_restarts`` with several pipelines: fits that lose workers end as one that loses none, in all pipelines."""

import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import recovery_replicas_job
from harness import OWN_SERVER, run
from paths import environment
from scripts import Script
from slurm_variables import variables_of_tasks

EVERY_DAY = ("gpipe", "keeps output", "divided", "reduced", "parts", "parameters")


def launch(name: str) -> list[Any]:
    """Runs in the harness's child, since Lightning's launcher starts the running script once more for each rank."""
    with tempfile.TemporaryDirectory() as folder:
        assert Script(recovery_replicas_job.__file__, folder, name).wait(timeout=280) == 0
        return results(folder)


def results(folder: str) -> list[Any]:
    return [pickle.loads(path.read_bytes()) for path in sorted(Path(folder).glob("[0-9]"))]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in EVERY_DAY else pytest.mark.nightly)
        for name in recovery_replicas_job.CASES
    ],
)
def test_workers_of_several_pipelines_are_killed(name: str) -> None:
    found = run(launch, name, timeout_seconds=290)
    assert len(found) == (4 if name.startswith("parts and replicas") else 2)
    _, cases = recovery_replicas_job.CASES[name]
    for pipeline in found:
        for (differing, repairs), (kills, _) in zip(pipeline, cases, strict=True):
            assert differing == [] and bool(repairs) == bool(kills[0].keys() | kills[1].keys())


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", recovery_replicas_job.EVALUATIONS)
def test_validate_test_and_predict(name: str) -> None:
    for differing, numbers in run(launch, name, timeout_seconds=290):
        assert differing == [] and all(1 <= number <= 4 for number in numbers)


def launch_by_torchrun(name: str) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        variables = {**environment(), "PYTHONWARNINGS": "ignore"}
        subprocess.run([*command, recovery_replicas_job.__file__, folder, name], env=variables, timeout=280, check=True)
        return results(folder)


def launch_by_slurm(name: str) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        job = partial(Script, recovery_replicas_job.__file__, folder, name, num_copies=0)
        tasks = [job(more_environment={**own, "PYTHONWARNINGS": "ignore"}) for own in variables_of_tasks(4)]
        assert [task.wait(timeout=280) for task in tasks] == [0] * 4
        return results(folder)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("launch", [launch_by_torchrun, launch_by_slurm])
@pytest.mark.parametrize("name", recovery_replicas_job.LAUNCHED)
def test_pipelines_of_launched_ranks(name: str, launch: Callable[[str], list[Any]]) -> None:
    """With a loss in each pipeline, and two at once."""
    found = run(launch, name, timeout_seconds=290, allow=["tmp"], env=OWN_SERVER)
    assert len(found) == 2
    for ((differing, repairs),) in found:
        assert differing == [] and len(repairs) >= 2


def ending(name: str) -> tuple[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        job = Script(recovery_replicas_job.__file__, folder, name, stderr=subprocess.PIPE)
        _, said = job.communicate(timeout=100)
        assert job.returncode
        return said, time.monotonic() - start


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("error", ["KeyError: 'of the user'", "RuntimeError: rank 1, process ", "ended with status 1"]),
        ("driver", ["RuntimeError: rank 1, process ", "was killed by signal 9"]),
        ("kept output", ["RuntimeError: an output of the model", "so this replica cannot verify the step"]),
    ],
)
def test_other_failures_of_a_replica_end_the_run(name: str, messages: list[str]) -> None:
    """Nobody waits until a time-out is over; the harness fails where a process is left."""
    said, seconds = run(ending, name, timeout_seconds=110)
    assert all(message in said for message in messages), said
    assert seconds < 60  # rpc_timeout_sec


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["faulty part", "faulty replica", "faulty replica, parameters"])
def test_a_worker_that_computes_wrongly(name: str) -> None:
    """The driver of its pipeline names it. The other driver ends by this, or says that another pipeline is at fault."""
    said, _ = run(ending, name, timeout_seconds=110)
    (rank, found), *others = re.findall(
        r"rank(\d)\]: \S*ComputedWrongly: .*?gave different values: (.*?)\. Either", said
    )
    if rank == "0":
        others, (rank, found) = [(rank, found)], others[0]
    first = "gave the same stage of the other pipelines" if name == "faulty part" else "sent the driver"
    assert rank == "1" and found.startswith(f"stage 0 {first} a different value")
    elsewhere = "stage 0 got a different value from the same stage of another pipeline, whose driver names the cause"
    assert all(other == ("0", elsewhere) for other in others)
