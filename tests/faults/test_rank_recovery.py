"""Ranks of torchrun and SLURM replace workers: a fit that loses some ends as one that loses none, to the last bit.

The harness fails where a process or a port is left; torchrun leaves its empty log folders.
"""

import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import rank_recovery_job
import repair_job
import torch
from harness import OWN_SERVER, run
from paths import environment
from scripts import Script
from slurm_variables import variables_of_tasks

SECONDS = 420
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
OUTPUT: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


def ended(jobs: Sequence[Any]) -> tuple[list[int], str]:
    """Exit statuses and output."""
    said = [job.communicate(timeout=SECONDS)[0] for job in jobs]
    return [job.returncode for job in jobs], "\n".join(said)


def torchrun(how: str) -> tuple[list[int], str]:
    variables = {**environment(), "PYTHONWARNINGS": "ignore"}
    command = [*TORCHRUN, rank_recovery_job.__file__, "results.pt", how]
    return ended([subprocess.Popen(command, env=variables, text=True, **OUTPUT)])


NAMESPACES = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
"""Starts a command on a host of its own: no process of it is visible to the other hosts, nor killed by them."""


def three_hosts() -> Any:
    """One rank on each. Only root may make hosts out of namespaces."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = ["--nnodes=3", "--nproc-per-node=1", f"--master-port={probe.getsockname()[1]}"]
    jobs = []
    for number in range(repair_job.STAGES):
        torchrun = [*TORCHRUN[:3], *meeting, "--master-addr=127.0.0.1", f"--node-rank={number}"]
        command = shlex.join([*torchrun, rank_recovery_job.__file__, "results.pt", "three hosts"])
        host = [*NAMESPACES, "sh", "-c", f"hostname host-{number} && exec {command}"]
        variables = {**environment(), "PYTHONWARNINGS": "ignore"}
        jobs.append(subprocess.Popen(host, env=variables, text=True, **OUTPUT))
    codes, said = ended(jobs)
    assert codes == [0, 0, 0], said
    return torch.load("results.pt"), repair_job.fit({}, 0, **rank_recovery_job.EVERY_BATCH), said


@pytest.mark.nightly
@pytest.mark.skipif(
    subprocess.run([*NAMESPACES, "true"], capture_output=True, check=False).returncode != 0,
    reason="this system makes no namespaces for this user",
)
@pytest.mark.timeout(SECONDS + 60)
def test_workers_on_several_hosts() -> None:
    """The snapshots of a worker are on its host. The driver neither sees its process nor can kill it."""
    found, expected, said = run(three_hosts, timeout_seconds=SECONDS + 40, allow=["tmp"], env=OWN_SERVER)
    assert repair_job.differences(found["fit"], expected) == [], said
    assert repair_job.differences(found["verified"], expected) == [], said
    assert len(found["fit"]["repairs"]) >= len(rank_recovery_job.ON_HOSTS) and len(found["verified"]["repairs"]) == 1
    assert "(rank 1) on host-1" in found["fit"]["repairs"][0] and found["fit"]["left"] == []


def slurm(how: str) -> tuple[list[int], str]:
    job = partial(Script, rank_recovery_job.__file__, "results.pt", how, num_copies=0, **OUTPUT)
    return ended([job(more_environment={**own, "PYTHONWARNINGS": "ignore"}) for own in variables_of_tasks(3)])


def many() -> Any:
    codes, said = torchrun("many")
    assert codes == [0], said
    expected = repair_job.fit({}, 0, **rank_recovery_job.EVERY_BATCH), repair_job.evaluate(is_disturbed=False)
    return torch.load("results.pt"), expected, said


@pytest.mark.nightly
@pytest.mark.timeout(SECONDS + 60)
def test_torchrun() -> None:
    """In ``fit``, and in the validate, test and predict that the same ranks serve after it."""
    found, (fit, evaluations), said = run(many, timeout_seconds=SECONDS + 40, allow=["tmp"], env=OWN_SERVER)
    assert repair_job.differences(found["fit"], fit) == []
    assert repair_job.differences(found["evaluations"], evaluations) == []
    repairs = found["fit"]["repairs"]
    assert len(repairs) >= len(rank_recovery_job.MANY) - 1
    assert repairs[0].startswith("stage 0 (layers 0 to 1: Linear, Killable), process ")
    assert "(rank 1) on " in repairs[0] and found["fit"]["left"] == []
    assert said.count("a new process replaces it") >= len(repairs)
    assert said.count("a script has ended") == 1


def the_rank_too() -> Any:
    codes, said = slurm("the rank too")
    return codes, said, torch.load("results.pt"), repair_job.fit({}, 0, **rank_recovery_job.EVERY_BATCH)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
def test_slurm_and_the_loss_of_a_rank() -> None:
    """A worker is replaced by a fork. A rank itself is not: the run ends, so that the launcher can act."""
    codes, said, found, expected = run(the_rank_too, timeout_seconds=SECONDS + 40, env=OWN_SERVER)
    assert repair_job.differences(found["fit"], expected) == []
    assert len(found["fit"]["repairs"]) == 1
    assert codes[0] == 1 and codes[2] == -signal.SIGKILL and "a script has ended" not in said
    assert "which supervised its worker, has ended: the launcher must start the run again" in said
