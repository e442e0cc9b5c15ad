"""Two hosts lose the link between them: every process ends in time and says so, and a short loss does not matter."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import hosts_job
import pytest
from paths import ROOT
from two_hosts import CAN_HAVE_HOSTS, NUM_LOCAL, TwoHosts, two_hosts

START_SECONDS = 300.0
"""Four interpreters that import torch, on a machine that does other work."""

TIMEOUT = 20.0
"""``rpc_timeout_sec`` of the runs."""

PORT = 29512

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.alone,
    pytest.mark.skipif(not CAN_HAVE_HOSTS, reason="network namespaces need root, ip and unshare"),
]


def started(hosts: TwoHosts, strategy: str, folder: Path, num_local: int = NUM_LOCAL) -> list[subprocess.Popen]:
    """Start the job, and return when it trains."""
    job = [sys.executable, hosts_job.__file__, strategy, str(TIMEOUT), str(folder)]
    if strategy == "spawned":  # one script on each host, without srun
        job = ["sh", "-c", 'unset SLURM_NTASKS; NODE_RANK=$SLURM_NODEID exec "$@"', "sh", *job]
    ranks, deadline = hosts.start_ranks(job, PORT, folder, num_local), time.monotonic() + START_SECONDS
    while not list(folder.glob("trains-*")):
        assert all(rank.poll() is None for rank in ranks), said(folder)
        assert time.monotonic() < deadline, said(folder)
        time.sleep(0.1)
    return ranks


def until_ended(hosts: TwoHosts, processes: list[subprocess.Popen]) -> None:
    """Cut the link, and wait until all processes have ended."""
    try:
        hosts.cut()
        deadline = time.monotonic() + TIMEOUT + 10
        for process in processes:
            process.wait(max(0.1, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()


def said(folder: Path) -> list[str]:
    return [file.read_text() for file in sorted(folder.glob("out-*"))]


@pytest.mark.timeout(500)
@pytest.mark.parametrize("strategy", ["pipeline", "replicas", "ddp", "zero"])
def test_every_process_ends_after_the_link_and_names_both_hosts(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with two_hosts() as hosts:
        until_ended(hosts, ranks := started(hosts, strategy, tmp_path))
    # A driver may kill a worker of its own host first.
    assert all(rank.returncode in (1, -signal.SIGKILL) for rank in ranks), said(tmp_path)
    assert ranks[0].returncode == ranks[2].returncode == 1
    for rank, text in enumerate(said(tmp_path)):
        if ranks[rank].returncode != 1:
            continue
        own, other = "ab" if rank < NUM_LOCAL else "ba"
        assert f"rank {rank} on {own} (10.77." in text and f"has heard nothing from {other} (10.77." in text, text
        assert "the network between the two hosts may be down" in text


@pytest.mark.timeout(500)
def test_ranks_that_a_script_spawns_know_their_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with two_hosts() as hosts:
        until_ended(hosts, scripts := started(hosts, "spawned", tmp_path, num_local=1))
    assert all(script.returncode == 1 for script in scripts), said(tmp_path)
    for number, (own, other) in enumerate(("ab", "ba")):
        text = (tmp_path / f"out-{number}").read_text()
        ranks = range(number * NUM_LOCAL, (number + 1) * NUM_LOCAL)
        assert any(f"rank {rank} on {own} (10.77." in text for rank in ranks), text
        assert f"has heard nothing from {other} (10.77." in text, text


@pytest.mark.timeout(500)
@pytest.mark.parametrize("strategy", ["pipeline", "ddp"])
def test_a_link_that_comes_back(strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with two_hosts() as hosts:
        ranks = started(hosts, strategy, tmp_path)
        try:
            hosts.cut()
            time.sleep(TIMEOUT / 4)
            hosts.heal()
            for rank in ranks:
                rank.wait(hosts_job.SECONDS + 60)
        finally:
            for rank in ranks:
                rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), said(tmp_path)
    assert any("a script has ended" in text for text in said(tmp_path))
