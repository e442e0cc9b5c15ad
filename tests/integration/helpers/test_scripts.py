"""A script that is a fork behaves as one that a new interpreter runs, and so do the ranks that Lightning starts."""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from harness import run
from scripts import Script

SCRIPT = """
import json, os, sys
is_fork = "torch" in sys.modules
from pytorch_lightning.strategies.launchers import subprocess_script
rank = int(os.environ.get("LOCAL_RANK", 0))
if rank == 0:
    for number in (1, 2):
        command = [sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:]]
        job = subprocess_script.subprocess.Popen(command, env={**os.environ, "LOCAL_RANK": str(number)})
        assert job.wait() == 10 + number
class Here: pass
told = {"argv": sys.argv[1:], "parent": os.getppid(), "own": os.getpid(), "class": Here.__module__}
told |= {"variables": [os.environ.get(name) for name in ("ADDED", "INHERITED")]}
told |= {"is_fork": is_fork}
open(f"told-{rank}", "w").write(json.dumps(told))
print("rank", rank, flush=True)
sys.exit(10 + rank if rank else 0)
"""
RAISES = """
import atexit
atexit.register(print, "handlers run")
raise LookupError("no such layer")
"""


def ranks() -> tuple[int, list[dict[str, Any]], str]:
    Path("script.py").write_text(SCRIPT)
    job = Script("script.py", "an argument", more_environment={"ADDED": "1"}, stdout=subprocess.PIPE)
    said, _ = job.communicate(timeout=60)
    told = [json.loads(Path(f"told-{rank}").read_text()) for rank in range(3)]
    assert job.returncode == 0
    return job.pid, told, said


@pytest.mark.slow
def test_ranks_are_children_of_rank_0() -> None:
    """The first one is a fork, the second one a new interpreter, for which there was no copy."""
    pid, told, said = run(ranks, env={"INHERITED": "2"})
    assert [each["is_fork"] for each in told] == [True, True, False]
    first, *others = told
    assert first["own"] == pid and [other["parent"] for other in others] == [pid, pid]
    for each in told:
        assert each["argv"] == ["an argument"] and each["class"] == "__main__" and each["variables"] == ["1", "2"]
    assert sorted(said.splitlines()) == ["rank 0", "rank 1", "rank 2"]


def raises() -> tuple[int, str]:
    Path("script.py").write_text(RAISES)
    job = Script("script.py", num_copies=0, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said, _ = job.communicate(timeout=60)
    return job.returncode, said


def test_an_error_ends_a_script_as_in_an_interpreter() -> None:
    status, said = run(raises)
    assert status == 1 and said.endswith("handlers run\n")
    assert "LookupError: no such layer" in said and 'script.py", line 4' in said


def killed() -> int:
    Path("script.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    return Script("script.py", num_copies=3).wait(timeout=60)


def test_copies_end_with_a_script_that_is_killed() -> None:
    """The harness fails where a process is left."""
    assert run(killed) == -9


def keeps_its_folder() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        Path("script.py").write_text("")
        assert Script("script.py").wait(timeout=60) == 0
        return Path(folder).exists()


def test_a_script_leaves_what_belongs_to_the_process_that_is_forked() -> None:
    assert run(keeps_its_folder)
