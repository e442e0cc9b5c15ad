"""Folders of this checkout, and where processes that tests start find the modules of tests."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PYTHONPATH = os.pathsep.join(map(str, [ROOT, TESTS / "helpers", TESTS / "jobs"]))


def environment() -> dict[str, str]:
    """The environment of this process, in which a script finds the modules of tests."""
    return {**os.environ, "PYTHONPATH": PYTHONPATH}


def python(code: str) -> str:
    """Runs code in a new interpreter, which finds Relay but no modules of tests, and returns what it prints."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
