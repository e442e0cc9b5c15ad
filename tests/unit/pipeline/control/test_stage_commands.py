"""Commands are methods of one Protocol, which the driver names, the stage implements and mypy checks."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from strategies.commands.declaration import declarations_of
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.worker.hosted import HostedStage

ROOT = Path(__file__).parents[4]

SNIPPET = """
from typing import Any
from strategies.pipeline.control.client import RemoteStage
from strategies.pipeline.control.commands import StageCommands

def right(remote: RemoteStage) -> int:
    remote.queue(StageCommands.discard, 3)
    remote.queue(StageCommands.zero_grads, ["0.weight"], set_to_none=True)
    return remote.call(StageCommands.num_kept)

def wrong(remote: RemoteStage) -> None:
    remote.start(StageCommands.discard, "three")
    remote.start(StageCommands.discard)
    remote.call(StageCommands.grads, 1)
    remote.read(StageCommands.valve, "0.weight")
    remote.start("discard", 3)
    kept: str = remote.rescue(StageCommands.num_kept)
    remote.queue(StageCommands.clip_grad_values, 0, maximum=1.0)
"""

CONFIG = """
[mypy]
ignore_missing_imports = true
follow_imports = silent
[mypy-torch.*,cloudpickle.*,numpy.*]
follow_imports = skip
"""


def test_the_stage_implements_every_command_and_no_other() -> None:
    commands = declarations_of(StageCommands)
    public = {name for name in vars(StageCommands) if not name.startswith("_")}
    assert set(commands) == public and not HostedStage.__abstractmethods__
    for name in commands:
        assert inspect.signature(getattr(HostedStage, name)) == inspect.signature(getattr(StageCommands, name)), name
    others = {name for name, _ in inspect.getmembers(HostedStage, inspect.isfunction) if not name.startswith("_")}
    assert others - set(commands) == {"describe", "announce_failure"}


def test_a_class_that_lacks_a_command_has_no_objects() -> None:
    with pytest.raises(TypeError, match="abstract method"):
        type("Incomplete", (StageCommands,), {"grads": lambda self: {}})()


def test_what_a_command_declares() -> None:
    declared = declarations_of(StageCommands)
    assert declared["step"].changes_values and not declared["step"].doing
    assert not declared["grads"].changes_values
    assert declared["extra_state"].doing == "teardown, handing over extra states"


def test_mypy_finds_wrong_arguments_results_and_names(tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(SNIPPET)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--config-file=mypy.ini", "--cache-dir=cache", "--no-pretty", "snippet.py"]
    done = subprocess.run(command, cwd=tmp_path, env={"MYPYPATH": str(ROOT)}, capture_output=True, text=True)
    wrong = 1 + SNIPPET[: SNIPPET.index("def wrong")].count("\n")
    found = [line.split(":")[1] for line in done.stdout.splitlines() if ": error:" in line]
    assert found == [str(wrong + k) for k in range(1, 8)], done.stdout + done.stderr
