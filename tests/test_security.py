"""What others could reach: on one host no socket beyond the loopback interface, and no file that they may write."""

import json
import os
import stat
import subprocess
import sys
import tempfile
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import security_job
from harness import run

import strategies


def train(names: list[str]) -> list[dict[str, Any]]:
    """Trains under each strategy at the same time; what each saw, and the files that are left."""
    os.umask(0o027)
    path = os.pathsep.join(str(Path(file).parents[up]) for file, up in ((strategies.__file__, 1), (__file__, 0)))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for number, name in enumerate(names):
            results = Path(folder, str(number), "results.json")
            results.parent.mkdir()
            command = [sys.executable, security_job.__file__, str(results), name]
            job = subprocess.Popen(
                command,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            jobs.append((job, results))
        seen = []
        for job, results in jobs:
            said, _ = job.communicate(timeout=100)
            assert job.returncode == 0, said
            files = {str(file): stat.S_IMODE(file.stat().st_mode) for file in results.parent.rglob("*")}
            seen.append({**json.loads(results.read_text()), "files": files})
        return seen


def check(seen: dict[str, Any], processes: int) -> set[int]:
    assert seen["processes"] == processes
    assert seen["listeners"]
    for address, port in seen["listeners"]:
        assert ip_address(address).is_loopback, (address, port)
    assert any(name.endswith(".ckpt") for name in seen["files"])
    for name, mode in seen["files"].items():
        assert not mode & 0o027, (name, oct(mode))
    return {port for _, port in seen["listeners"]}


@pytest.mark.slow
def test_two_runs_of_ddp_at_once_on_the_loopback_interface() -> None:
    one, other = (check(seen, 2) for seen in run(train, ["ddp", "ddp"], timeout_seconds=110))
    assert not one & other


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipeline", "replicas", "zero"])
def test_nothing_is_open_beyond_the_loopback_interface(name: str) -> None:
    (seen,) = run(train, [name], timeout_seconds=110)
    check(seen, security_job.STRATEGIES[name][2])
