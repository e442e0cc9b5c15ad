"""A run without ``schedule="auto"``, a plan or the monitor imports nothing of the tools that predict or report."""

import json
import subprocess
from typing import Any

import pytest
import tools_job
from harness import run
from scripts import Script


def trained(*arguments: str) -> dict[str, Any]:
    """The number of steps, and the tools that the driver has imported, of a script that trains.

    The script is a fork of this process, which has imported what is needed without these tools.
    """
    assert not tools_job.imported_tools()
    job = Script(tools_job.__file__, *arguments, num_copies=0, stdout=subprocess.PIPE)
    said, _ = job.communicate(timeout=100)
    assert job.returncode == 0
    outcome: dict[str, Any] = json.loads(said.splitlines()[-1])
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
