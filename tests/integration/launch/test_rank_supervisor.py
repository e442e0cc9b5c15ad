"""A rank that supervises its worker: it replaces one that is killed in a session, and ends as others do."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import run
from paths import PYTHONPATH

SUPERVISOR = """
import os, signal, sys
from strategies.launch.rank_supervisor import RankSupervisor
def commands(number, begun):
    if sys.argv[2] == "told early":  # there is no worker yet
        os.kill(os.getpid(), signal.SIGTERM)
    return [sys.executable, sys.argv[1], str(number), str(begun), *sys.argv[2:]]
status = RankSupervisor(3, commands).run(1)
print("status", status, flush=True)
"""

WORKER = """
import os, signal, sys, time
from strategies.launch.rank_supervisor import end_with_supervisor, note_session
number, begun, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
end_with_supervisor()
print("worker", number, os.getpid(), flush=True)
if how == "early":
    os.kill(os.getpid(), signal.SIGKILL)
note_session(begun, number)
if number == 1 and how not in ("waits", "told early"):
    note_session(begun, 11)  # a session later, the process is the same
    os.kill(os.getpid(), signal.SIGKILL)
if how in ("waits", "told early"):
    time.sleep(60)
sys.exit(7 if how == "fails" else 0)
"""


def supervised(how: str, send: str = "") -> tuple[str, bool]:
    Path("worker.py").write_text(WORKER)
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    command = [sys.executable, "-c", SUPERVISOR, "worker.py", how]
    process = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = ""
    if send:
        assert process.stdout is not None
        said = process.stdout.readline()
        process.send_signal(getattr(signal, send))
    said += process.communicate(timeout=30)[0]
    worker = next((int(line.split()[2]) for line in said.splitlines() if line.startswith("worker")), 0)
    deadline = time.monotonic() + 10
    while (lives := worker > 0 and Path(f"/proc/{worker}").exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return said, lives


def endings() -> dict[str, tuple[str, bool]]:
    asked = [
        ("goes on", ""),
        ("fails", ""),
        ("told early", ""),
        ("early", ""),
        ("waits", "SIGTERM"),
        ("waits", "SIGKILL"),
    ]
    return {f"{how} {send}".strip(): supervised(how, send) for how, send in asked}


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[str, bool]]:
    return run(endings, timeout_seconds=120)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "status"), [("goes on", 0), ("fails", 7)])
def test_a_killed_worker_is_replaced_from_the_next_session_on(found: dict, how: str, status: int) -> None:
    said, _ = found[how]
    numbers = [line.split()[1] for line in said.splitlines() if line.startswith("worker")]
    assert numbers == ["1", "12"] and said.endswith(f"status {status}\n")
    assert said.count("rank 3: its worker was killed by signal 9; another process takes its place") == 1


@pytest.mark.slow
def test_a_worker_without_a_session_is_not_replaced(found: dict) -> None:
    said, _ = found["early"]
    assert said.count("worker 1 ") == 1 and said.endswith("status -9\n")


@pytest.mark.slow
def test_both_end_together(found: dict) -> None:
    said, lives = found["waits SIGTERM"]
    assert not lives and said.endswith("status -15\n") and "takes its place" not in said
    said, lives = found["waits SIGKILL"]
    assert not lives and "status" not in said


@pytest.mark.slow
def test_a_signal_that_comes_before_the_worker_ends_it(found: dict) -> None:
    said, lives = found["told early"]
    assert not lives and said.endswith("status -15\n")
