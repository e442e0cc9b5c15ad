"""Whatever process of a pipeline dies or hangs, and when: all of them end soon, with one error, and training goes on.

The harness fails where a process, thread, port or file is left.
"""

import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import faults_job
import procfs
import pytest
import torch
from faults_job import PHASES
from harness import OWN_SERVER, run
from scripts import Script
from torch import nn
from undisturbed import until_undisturbed

from strategies.pipeline.driver import Pipeline
from strategies.pipeline.executor.settings import Settings

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


CASES = [f"kill {phase}" for phase in PHASES]
CASES += [f"hang {phase}" for phase in ("forward", "backward", "step", "teardown")]
CASES += ["stop forward", "compute forward"]


def one_after_another() -> dict[str, Any]:
    """All in one process: what one leaves would show in the next."""
    reference, seen = faults_job.train("", ""), {}
    for case in CASES:
        how, phase = case.split()
        seen[case] = ending(how, phase, 60.0 if how == "kill" else HANG_SECONDS)
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
        assert kind == "WorkerLost", (name, kind, message)
        assert message.startswith("stage 1 (layers 1 to 1: Fuse), process "), (name, message)
        assert f" on {socket.gethostname()}, " in message, (name, message)
        assert PHASES[phase] in message, (name, message)
        assert seconds < 60, (name, seconds)  # the time-out; these are whole fits, on a machine that may be busy
        if how == "kill":
            assert "was killed by signal 9 " in message, (name, message)
        elif how == "hang":
            assert "hangs: it has made no progress" in message and f"for {HANG_SECONDS:g} s" in message, (name, message)
            assert "time.sleep(1000)" in message and "faults_job.py" in message, (name, message)
        else:
            assert "does not answer: it has made no progress" in message, (name, message)


def ended_soon(found: Sequence[Any]) -> None:
    assert found[-1] < SECONDS, found


def started(how: str, phase: str) -> Script:
    return Script(
        faults_job.__file__,
        how,
        phase,
        "60",
        num_copies=0,
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


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param(phase, marks=pytest.mark.slow if phase == "backward" else pytest.mark.nightly)
        for phase in ("unpack", "backward", "save", "teardown")
    ],
)
def test_a_driver_that_is_killed(phase: str) -> None:
    measure = partial(run, driver_gets, "SIGKILL", phase, timeout_seconds=90, env=OWN_SERVER)
    code, *_ = until_undisturbed(measure, ended_soon)
    assert code == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(("how", "status"), [("SIGINT", 1), ("SIGTERM", 0)])
def test_a_driver_that_is_asked_to_end(how: str, status: int) -> None:
    """Lightning's own ways: after SIGTERM it ends by an exception that is a ``SystemExit``."""
    measure = partial(run, driver_gets, how, "forward", timeout_seconds=90, env=OWN_SERVER)
    code, said, _ = until_undisturbed(measure, ended_soon)
    assert code == status, (code, said)


def three_stages() -> Pipeline:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    return Pipeline(layers, [1, 1, 1], [torch.device("cpu")] * 3, Settings(microbatches=2))


def await_workers(seconds: float, *, ready: bool) -> list[int]:
    """The process ids of two workers that have been forked, or are about to join their session, so long ago."""
    found: dict[int, int] = {}
    while len(found) < 2:
        for pid in procfs.family(os.getsid(0), Path("nowhere")):
            with suppress(OSError):  # has ended
                name, _, rank = Path(f"/proc/{pid}/comm").read_text().strip().rpartition("-")
                is_ready = any(Path(tempfile.gettempdir()).glob(f"relay-*/ready-{rank}"))
                if name == "relay-worker" and (is_ready or not ready):
                    found[int(rank)] = pid
        time.sleep(0.001)
    time.sleep(seconds)
    return [found[0], found[1]]


Moments = Sequence[tuple[bool, float]]
"""Whether the time, in seconds, counts from when workers have imported torch, or from when they are spawned."""
SOME_MOMENTS: Moments = [(False, 0.0), (False, 0.1), (True, 0.0), (True, 0.012)]
ALL_MOMENTS: Moments = [
    *((False, seconds) for seconds in (0.0, 0.1, 0.5, 1.0)),
    *((True, 0.004 * k) for k in range(12)),
]


def killed_while_starting(moments: Moments) -> list[tuple[str, float]]:
    """Starts a pipeline again and again, and kills one of its workers at those moments.

    Returns:
        For each, the error, and for how long anything was left of the pipeline after the kill.
    """
    killed = []

    def kill(victim: int, ready: bool, seconds: float) -> None:
        os.kill(await_workers(seconds, ready=ready)[victim], signal.SIGKILL)
        killed.append(time.monotonic())

    def one(number: int, moment: tuple[bool, float]) -> tuple[str, float]:
        killer = threading.Thread(target=kill, args=(number % 2, *moment))
        killer.start()
        pipeline, message = three_stages(), ""
        try:
            pipeline.start()
            killer.join()
            pipeline.module(torch.ones(4, 4))
        except RuntimeError as error:
            message = str(error)
        killer.join()
        with suppress(RuntimeError):  # the same once more
            pipeline.close()
        while any(thread.name.startswith("relay-") for thread in threading.enumerate()):
            time.sleep(0.01)
        return message, time.monotonic() - killed[-1]

    return [until_undisturbed(partial(one, *numbered), ended_soon) for numbered in enumerate(moments)]


at_moments = pytest.mark.parametrize(
    "moments",
    [pytest.param(SOME_MOMENTS, marks=pytest.mark.slow), pytest.param(ALL_MOMENTS, marks=pytest.mark.nightly)],
    ids=["some moments", "all moments"],
)


@at_moments
@pytest.mark.timeout(200)
def test_a_worker_that_is_killed_while_the_processes_start(moments: Moments) -> None:
    for message, _ in run(killed_while_starting, moments, timeout_seconds=170, env=OWN_SERVER):
        assert ", was killed by signal 9 " in message and message.startswith("stage "), message


def driver_killed_while_starting(moments: Moments) -> None:
    """The same with the driver, which is a fork of this process, and which its workers must not outlive for long."""

    def one(ready: bool, seconds: float) -> list[float]:
        driver = os.fork()
        if driver == 0:
            try:
                three_stages().start()
                time.sleep(60)
            finally:
                os._exit(1)
        await_workers(seconds, ready=ready)
        os.kill(driver, signal.SIGKILL)
        os.waitpid(driver, 0)
        killed = time.monotonic()
        while len(procfs.family(os.getsid(0), Path("nowhere"))) > 1 and time.monotonic() < killed + 30:
            time.sleep(0.01)
        return [time.monotonic() - killed]

    for moment in moments:
        until_undisturbed(partial(one, *moment), ended_soon)


@at_moments
@pytest.mark.timeout(200)
def test_a_driver_that_is_killed_while_the_processes_start(moments: Moments) -> None:
    run(driver_killed_while_starting, moments, timeout_seconds=170, env=OWN_SERVER)
