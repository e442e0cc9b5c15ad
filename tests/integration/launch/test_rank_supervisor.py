"""A rank that supervises its worker: it replaces one that is killed, and ends as others do."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from harness import OWN_SERVER, run
from paths import PYTHONPATH

SUPERVISOR = """
import os, signal, subprocess, sys
from strategies.launch.rank_supervisor import RankSupervisor
def start(number, stdin):
    if sys.argv[1] == "told early":  # there is no worker yet
        os.kill(os.getpid(), signal.SIGTERM)
    return subprocess.Popen([sys.executable, "worker.py", sys.argv[1], str(number)], stdin=stdin)
status = RankSupervisor(3, start).run(1)
print("status", status, flush=True)
"""

WORKER = """
import os, signal, subprocess, sys, time
from strategies.launch.rank_supervisor import NEXT_SESSION, end_with_supervisor, note_session
end_with_supervisor(os.getppid())
how, number = sys.argv[1], int(sys.argv[2])
print("worker", number, os.getpid(), flush=True)
if how == "early" or (how == "early once" and not os.path.exists("second")):
    open("second", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
driver = 0 if how == "far" else os.getppid()  # 0: on another host
if how == "alone":
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    driver = ended.pid
note_session(driver)
if how == "alone":
    os.kill(os.getpid(), signal.SIGKILL)
if how in ("waits", "told early"):
    time.sleep(60)
if number == 1 and how != "early once":
    sys.exit(NEXT_SESSION)
if number == 2:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(7 if how == "fails" else 0)
"""

STARTS = """
import os, signal, sys
from pathlib import Path
from strategies.launch import fork_server, rank_supervisor
from strategies.launch.rank_supervisor import RankSupervisor, Starts
fork_server._REPORT_SECONDS = rank_supervisor._FORK_SECONDS = 1.0
rank_supervisor.SERVE, rank_supervisor._MODULES, rank_supervisor._MODULES_LATER = "forked", ("json",), ()
def prepare():
    if not Path("stopped").exists():
        os.kill(fork_server.OwnForkServer._of_this_process.pid, signal.SIGSTOP)
        Path("stopped").touch()
status = RankSupervisor(3, Starts('{"rank": 3, "num_stages": 4, "num_parts": 1}'), prepare=prepare).run(1)
print("status", status, flush=True)
"""

FORKED = """
import os, sys, time
from pathlib import Path
from strategies.launch.rank_supervisor import NEXT_SESSION, end_with_supervisor, note_session
def supervised(world, number, supervisor, slots):
    end_with_supervisor(supervisor)
    print("worker", number, os.getpid(), "forked" if __name__ == "forked" else "new", flush=True)
    note_session(supervisor)
    while number == 1 and not Path("stopped").exists():
        time.sleep(0.01)
    os._exit(NEXT_SESSION if number == 1 else 0)
if __name__ == "__main__":
    supervised(sys.argv[1], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
"""


def with_a_stopped_server() -> str:
    """What is said where the fork server stops, and the worker ends."""
    Path("forked.py").write_text(FORKED)
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    command = [sys.executable, "-c", STARTS]
    ended = subprocess.run(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60
    )
    return ended.stdout


@pytest.mark.slow
def test_a_fork_server_that_does_not_answer() -> None:
    """The message says so; it does not say that somebody has killed the worker, of which no exit status is known."""
    said = run(with_a_stopped_server, env=OWN_SERVER, timeout_seconds=70)
    lines = said.splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("worker")] == [["worker", "1"], ["worker", "2"]]
    assert lines[0].endswith(" forked") and lines[-2].endswith(" new") and lines[-1] == "status 0"
    told = [line for line in lines if line.startswith("rank 3: ")]
    ended = (
        "rank 3: its worker has ended in an unknown way (its fork server, which reports how, has ended or does not "
        "answer); a new process replaces it"
    )
    timed_out = "rank 3: its fork server has not started a process within 1 s and has been ended. A new interpreter"
    assert len(told) == 2, said
    assert all(line.startswith(expected) for line, expected in zip(told, [ended, timed_out], strict=True)), told


def supervised(how: str, send: str = "") -> tuple[str, bool]:
    Path("worker.py").write_text(WORKER)
    Path("second").unlink(missing_ok=True)
    environment, command = {**os.environ, "PYTHONPATH": PYTHONPATH}, [sys.executable, "-c", SUPERVISOR, how]
    process = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = ""
    if send:
        assert process.stdout is not None
        said = process.stdout.readline()
        process.send_signal(getattr(signal, send))
    said += process.communicate(timeout=30)[0]
    worker = next((int(line.split()[2]) for line in said.splitlines() if line.startswith("worker")), 0)
    return said, worker > 0 and not comes(lambda: not psutil.pid_exists(worker))


def comes(condition: Callable[[], bool]) -> bool:
    """Wait for something that is true, for ten seconds."""
    deadline = time.monotonic() + 60
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def endings() -> dict[str, tuple[str, bool]]:
    alone = ("goes on", "far", "fails", "told early", "early", "early once", "alone")
    asked = [*((how, "") for how in alone), ("waits", "SIGTERM"), ("waits", "SIGKILL")]
    return {f"{how} {send}".strip(): supervised(how, send) for how, send in asked}


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[str, bool]]:
    return run(endings, timeout_seconds=120)


def sessions(said: str) -> list[str]:
    return [line.split()[1] for line in said.splitlines() if line.startswith("worker")]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "status"), [("goes on", 0), ("far", 0), ("fails", 7)])
def test_each_session_has_a_worker_and_a_killed_one_is_replaced(found: dict, how: str, status: int) -> None:
    said, _ = found[how]
    assert sessions(said) == ["1", "2", "3"] and said.endswith(f"status {status}\n")
    assert said.count("rank 3: its worker was killed by signal 9; a new process replaces it") == 1


@pytest.mark.slow
def test_workers_that_do_not_reach_their_session(found: dict) -> None:
    """One is replaced, for the same session; the third in a row is not."""
    said, _ = found["early once"]
    assert sessions(said) == ["1", "1"] and said.endswith("status 0\n")
    said, _ = found["early"]
    assert sessions(said) == ["1", "1", "1"] and said.endswith("status -9\n")


@pytest.mark.slow
def test_no_worker_is_replaced_without_a_driver(found: dict) -> None:
    said, _ = found["alone"]
    assert sessions(said) == ["1"] and said.endswith("status 1\n")
    assert "rank 3: its worker was killed by signal 9, and its driver, process " in said and " has ended\n" in said


@pytest.mark.slow
def test_both_end_together(found: dict) -> None:
    said, lives = found["waits SIGTERM"]
    assert not lives and said.endswith("status -15\n") and "replaces it" not in said
    said, lives = found["waits SIGKILL"]
    assert not lives and "status" not in said


@pytest.mark.slow
def test_a_signal_that_comes_before_the_worker_ends_it(found: dict) -> None:
    said, lives = found["told early"]
    assert not lives and said.endswith("status -15\n")
