"""Ranks that somebody else has started: torchrun on one and on two hosts, SLURM. They train what one process trains."""

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import launched_job
import pytest
import torch
from harness import run
from paths import environment
from pytorch_lightning.strategies import SingleDeviceStrategy
from replicas_job import Net, fit
from scripts import Script
from slurm_variables import variables_of_tasks

SECONDS = 280
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun(num_ranks: int, num_nodes: int, max_restarts: int = 0) -> list[list[str]]:
    """One command for each node."""
    start = [*TORCHRUN, f"--nproc-per-node={num_ranks // num_nodes}", f"--max-restarts={max_restarts}"]
    if num_nodes == 1:
        return [[*start, "--standalone"]]
    meeting = [f"--nnodes={num_nodes}", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    return [[*start, *meeting, f"--node-rank={i}"] for i in range(num_nodes)]


def start_torchrun(commands: Sequence[Sequence[str]], layout: str, num_nodes: int) -> list[Any]:
    """Starts the job in this process's working directory; its results will be in ``results.pt``."""
    variables = {**environment(), "PYTHONWARNINGS": "ignore"}
    job, pipe = [launched_job.__file__, "results.pt", layout, str(num_nodes)], subprocess.PIPE
    start = partial(subprocess.Popen, env=variables, text=True, stdout=pipe, stderr=subprocess.STDOUT)
    return [start([*command, *job]) for command in commands]


def start_slurm(layout: str, num_nodes: int) -> list[Any]:
    """The same as ``srun``, which starts each task with these variables."""
    start = partial(Script, launched_job.__file__, "results.pt", layout, str(num_nodes), num_copies=0)
    start = partial(start, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    tasks = variables_of_tasks(launched_job.num_ranks(layout), num_nodes)
    return [start(more_environment={**own, "PYTHONWARNINGS": "ignore"}) for own in tasks]


def finish(jobs: Sequence[Any]) -> str:
    said = [job.communicate(timeout=SECONDS)[0] for job in jobs]
    assert not any(job.returncode for job in jobs), "\n".join(said)
    return "\n".join(said)


def launched_by_torchrun(layout: str, num_nodes: int, max_restarts: int = 0) -> tuple[dict[str, Any], str]:
    said = finish(start_torchrun(torchrun(launched_job.num_ranks(layout), num_nodes, max_restarts), layout, num_nodes))
    return torch.load("results.pt"), said


def launched_by_slurm(layout: str, num_nodes: int) -> tuple[dict[str, Any], str]:
    said = finish(start_slurm(layout, num_nodes))
    return torch.load("results.pt"), said


@pytest.mark.parametrize(
    ("launch", "layout", "num_nodes"),
    [
        pytest.param(launched_by_torchrun, "four stages", 2, marks=pytest.mark.nightly),
        pytest.param(launched_by_slurm, "two replicas", 2, marks=pytest.mark.slow),
    ],
)
def test_ranks_train_what_one_process_trains(launch: Any, layout: str, num_nodes: int) -> None:
    """The harness fails where a process or a port is left; torchrun leaves its empty log folders."""
    results, said = run(launch, layout, num_nodes, timeout_seconds=SECONDS + 20, allow=["tmp"])
    model, trainer = fit(Net, SingleDeviceStrategy("cpu"), 1)
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    validated = trainer.validate(model, verbose=False)[0]
    assert said.count("a script has ended") == launched_job.REPLICAS[layout]
    for name, seen in results.items():
        assert seen["losses"] == pytest.approx(model.losses, rel=1e-9), name
        assert seen["validated"][0] == pytest.approx(validated, rel=1e-9), name
        torch.testing.assert_close(seen["weights"], weights, rtol=1e-9, atol=1e-9)


def ending(layout: str, slurm: bool) -> tuple[list[int], str, float]:
    began, number = time.monotonic(), launched_job.num_ranks(layout)
    jobs = start_slurm(layout, 1) if slurm else start_torchrun(torchrun(number, 1), layout, 1)
    said = "\n".join(job.communicate(timeout=SECONDS)[0] for job in jobs)
    return [job.returncode for job in jobs], said, time.monotonic() - began


@pytest.mark.slow
def test_an_error_in_a_worker_rank() -> None:
    codes, said, seconds = run(ending, "failing", False, timeout_seconds=SECONDS + 20, allow=["tmp"])
    assert codes == [1] and seconds < launched_job.TIMEOUT_SECONDS
    assert "ArithmeticError: a layer of the user's" in said
    assert "stage 0 (layers 0 to 0: Fails), process" in said


@pytest.mark.nightly
def test_torchrun_starts_all_ranks_anew() -> None:
    """A worker is killed in the eighth step of ten; the last checkpoint is of the sixth."""
    seen, said = run(launched_by_torchrun, "killed once", 1, 1, timeout_seconds=SECONDS + 20, allow=["tmp"])
    assert "stage 1 (layers 1 to 2: Tanh, LayerNorm), process " in said
    model, _ = fit(Net, SingleDeviceStrategy("cpu"), 1)
    assert seen["losses"] == pytest.approx(model.losses[6:], rel=1e-9)
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(seen["weights"], weights, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_a_rank_replaces_its_worker() -> None:
    """Killed twice, before two batches of the second epoch; then the same ranks serve another fit."""
    seen, said = run(launched_by_slurm, "replaced", 1, timeout_seconds=SECONDS + 20)
    assert said.count("rank 2: its worker was killed by signal 9") == 2
    assert said.count("a script has ended") == 1
    model, _ = fit(Net, SingleDeviceStrategy("cpu"), 1)
    assert seen["losses"] == pytest.approx(model.losses, rel=1e-9)
    assert seen["again"] == pytest.approx(model.losses, rel=1e-9)
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(seen["weights"], weights, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_a_killed_worker_rank() -> None:
    codes, said, seconds = run(ending, "killed worker", True, timeout_seconds=SECONDS + 20)
    assert codes[0] == 1 and codes[2] == -signal.SIGKILL and seconds < launched_job.TIMEOUT_SECONDS
    assert "stage 1 (layers 1 to 2: Tanh, LayerNorm), process " in said
    assert re.search(r"\(rank 2\) on \S+, has ended (in|idle after) (B0|optimizer step)", said), said


@pytest.mark.slow
def test_a_killed_driver() -> None:
    """Nobody but the workers themselves could end them."""
    codes, said, seconds = run(ending, "killed driver", True, timeout_seconds=SECONDS + 20)
    assert codes == [-signal.SIGKILL, 1, 1] and seconds < launched_job.TIMEOUT_SECONDS
    for rank in (1, 2):
        assert f"rank {rank} ends, because its driver, rank 0, is gone" in said
