"""A run without ``schedule="auto"``, a plan or the monitor imports nothing of the tools that predict or report."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from harness import run
from paths import PYTHONPATH, ROOT


def trained(*arguments: str) -> dict[str, Any]:
    """Train in a new interpreter; returns the number of steps and the tools that its driver has imported."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests/jobs/tools_job.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outcome


def found_and_resumed() -> tuple[dict[str, Any], dict[str, Any]]:
    return trained("auto", "--save", "found.ckpt"), trained("auto", "--resume", "found.ckpt")


def test_a_run_imports_no_tool() -> None:
    assert run(trained, "1f1b") == {"steps": 4, "tools": []}


@pytest.mark.slow
def test_a_search_imports_its_tools_and_a_run_that_resumes_with_its_result_does_not() -> None:
    found, resumed = run(found_and_resumed)
    assert "strategies.planning.search" in found["tools"]
    assert not [name for name in found["tools"] if name.startswith("trainer.")]
    assert resumed == {"steps": 8, "tools": []}
