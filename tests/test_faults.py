"""Whatever process of a pipeline dies or hangs, and when: all of them end soon, with one error, and training goes on.

The harness fails where a process, thread, port or file is left.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import faults_job
import procfs
import pytest
import torch
from faults_job import PHASES
from harness import run
from torch import nn

import strategies
from strategies.pipeline import launch
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.settings import Settings

SECONDS = 10
HANG_SECONDS = 3.0


def ending(how: str, phase: str, rpc_timeout_sec: float) -> tuple[str, str, float]:
    """The type and message of the error, and how long the fit took."""
    began = time.monotonic()
    try:
        faults_job.train(how, phase, rpc_timeout_sec)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "none", "", time.monotonic() - began


def one_after_another() -> dict[str, Any]:
    """All in one process: what one leaves would show in the next."""
    reference = faults_job.train("", "")
    seen: dict[str, Any] = {f"kill {phase}": ending("kill", phase, 60.0) for phase in PHASES}
    for how, phase in (("hang", "forward"), ("hang", "backward"), ("hang", "step"), ("hang", "teardown")):
        seen[f"{how} {phase}"] = ending(how, phase, HANG_SECONDS)
    seen["stop forward"] = ending("stop", "forward", HANG_SECONDS)
    seen["compute forward"] = ending("compute", "forward", HANG_SECONDS)
    seen["after all"] = faults_job.train("", "") == reference
    return seen


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_a_worker_dies_or_hangs_at_any_phase() -> None:
    seen = run(one_after_another, timeout_seconds=300, allow=["tmp"])
    assert seen.pop("after all")
    assert seen.pop("compute forward")[0] == "none"  # for twice the time-out, alive
    for name, (kind, message, seconds) in seen.items():
        how, phase = name.split()
        assert kind == "RuntimeError", (name, kind, message)
        assert message.startswith("stage 1 (layers 1 to 1: Fuse), process "), (name, message)
        assert f" on {socket.gethostname()}, " in message, (name, message)
        assert PHASES[phase] in message, (name, message)
        assert seconds < 60, (name, seconds)  # the time-out; these are whole fits, on a machine that may be busy
        if how == "kill":
            assert "was killed by signal 9 " in message, (name, message)
        elif how == "hang":
            assert "hangs: it has stood still" in message and f"for {HANG_SECONDS:g} s" in message, (name, message)
            assert "time.sleep(1000)" in message and "faults_job.py" in message, (name, message)
        else:
            assert "does not answer: it has stood still" in message, (name, message)


def started(how: str, phase: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(str(Path(file).parents[up]) for file, up in ((strategies.__file__, 1), (__file__, 0)))
    return subprocess.Popen(
        [sys.executable, faults_job.__file__, how, phase, "60"],
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def driver_gets(how: str, phase: str) -> tuple[int, str, float]:
    """How the script ended, what it said, and how long its processes outlived it."""
    job = started(how, phase)
    said, _ = job.communicate(timeout=60)  # the workers hold the other end of the pipe
    ended = time.monotonic()
    while procfs.family(job.pid, Path("nowhere")) and time.monotonic() < ended + 30:
        time.sleep(0.05)
    return job.returncode, said, time.monotonic() - ended


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["unpack", "backward", "save", "teardown"])
def test_a_driver_that_is_killed(phase: str) -> None:
    code, _, seconds = run(driver_gets, "SIGKILL", phase, timeout_seconds=90)
    assert code == -signal.SIGKILL and seconds < SECONDS


@pytest.mark.slow
@pytest.mark.parametrize(("how", "status"), [("SIGINT", 1), ("SIGTERM", 0)])
def test_a_driver_that_is_asked_to_end(how: str, status: int) -> None:
    """Lightning's own ways: after SIGTERM it ends by an exception that is a ``SystemExit``."""
    code, said, seconds = run(driver_gets, how, "forward", timeout_seconds=90)
    assert code == status and seconds < SECONDS, (code, said)


def killed_while_starting(moments: list[float]) -> list[tuple[str, float]]:
    """Starts a pipeline again and again, and kills one of its workers so long after both have come up."""
    spawn, seen = launch.Workers._spawn, []
    started: list[tuple[str, subprocess.Popen]] = []
    killed: list[float] = []

    def noted(self: launch.Workers, session: Any, rank: int) -> subprocess.Popen:
        started.append((self._directory, spawn(self, session, rank)))
        return started[-1][1]

    def kill(victim: int, moment: float) -> None:
        while len(started) < 2 or not all(Path(started[0][0], f"ready-{rank}").exists() for rank in range(2)):
            time.sleep(0.001)
        time.sleep(moment)
        started[victim][1].kill()
        killed.append(time.monotonic())

    launch.Workers._spawn = noted
    for number, moment in enumerate(moments):
        started.clear()
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        pipeline = Pipeline(layers, [1, 1, 1], [torch.device("cpu")] * 3, Settings(microbatches=2))
        killer = threading.Thread(target=kill, args=(number % 2, moment))
        killer.start()
        message = ""
        try:
            pipeline.start()
            killer.join()
            layers(torch.ones(4, 4))
        except RuntimeError as error:
            message = str(error)
        killer.join()
        with suppress(RuntimeError):  # the same once more
            pipeline.finish()
        seen.append((message, time.monotonic() - killed[-1]))
    return seen


@pytest.mark.slow
def test_a_worker_that_dies_while_the_processes_meet() -> None:
    seen = run(killed_while_starting, [0.02 * k for k in range(8)], timeout_seconds=170)
    for message, seconds in seen:
        assert ", was killed by signal 9 " in message and message.startswith("stage "), message
        assert seconds < 2 * SECONDS, message  # gloo, in the midst of connecting, takes 10 s to notice
