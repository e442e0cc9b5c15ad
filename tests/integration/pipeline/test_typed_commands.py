"""What mypy finds in calls of a stage's commands."""

import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

SNIPPET = """
from typing import Any
from strategies.pipeline.control.client import RemoteStage
from strategies.pipeline.control.commands import StageCommands

def right(remote: RemoteStage) -> int:
    remote.send(StageCommands.discard, 3)
    remote.send(StageCommands.release, 0, 1.0, kept=1.0)
    return remote.ask(StageCommands.num_kept).wait()

def wrong(remote: RemoteStage) -> None:
    remote.send(StageCommands.discard, "three")
    remote.send(StageCommands.discard)
    remote.ask(StageCommands.num_kept, 1).wait()
    remote.ask(StageCommands.valve, "0.weight")
    remote.send("discard", 3)
    kept: str = remote.ask(StageCommands.num_kept).rescue()
    remote.send(StageCommands.release, 0, 1.0, keep=1.0)
"""

CONFIG = """
[mypy]
ignore_missing_imports = true
follow_imports = silent
[mypy-torch.*,cloudpickle.*,numpy.*]
follow_imports = skip
"""


@pytest.mark.slow
def test_mypy_finds_wrong_arguments_results_and_names(tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(SNIPPET)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--config-file=mypy.ini", "--cache-dir=cache", "--no-pretty", "snippet.py"]
    done = subprocess.run(command, cwd=tmp_path, env={"MYPYPATH": str(ROOT)}, capture_output=True, text=True)
    wrong = 1 + SNIPPET[: SNIPPET.index("def wrong")].count("\n")
    found = [line.split(":")[1] for line in done.stdout.splitlines() if ": error:" in line]
    assert found == [str(wrong + k) for k in range(1, 8)], done.stdout + done.stderr
