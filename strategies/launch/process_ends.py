"""Check whether a process runs, end several processes together, and end this process when another one ends.

This module does not import torch, because a worker supervises its driver before it imports torch. How the driver
notices that a worker is lost: :mod:`strategies.pipeline.control.client`.
"""

import atexit
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

from strategies.launch.fork_server import ForkedProcess

Process = subprocess.Popen | ForkedProcess
"""A child process."""

_IDLE_SECONDS, _LOOK_SECONDS = 2.0, 0.001


class Watchdog:
    """A thread that ends this process when another process on which it depends has ended.

    Args:
        name: The name of the thread.
        has_ended: Waits until the other process has ended and returns ``True``; returns ``False`` if this process no
            longer depends on it.
        message: The message on standard error before this process ends; none if empty.
        status: The exit status.
        clean_up: Called before this process ends.
    """

    def __init__(
        self,
        name: str,
        has_ended: Callable[[], bool],
        *,
        message: str = "",
        status: int = 1,
        clean_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._has_ended, self._message, self._status, self._clean_up = has_ended, message, status, clean_up
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, timeout_seconds: float | None = None) -> None:
        """Wait for the end of the thread, at most ``timeout_seconds``."""
        self._thread.join(timeout_seconds)

    def _watch(self) -> None:
        if self._has_ended():
            try:
                self._clean_up()
                if self._message:
                    sys.stderr.write(f"{self._message}\n")
                    sys.stderr.flush()
            finally:  # the reader of standard error may have ended as well
                os._exit(self._status)  # without waiting for threads that compute, or wait in C++


def is_alive(pid: int) -> bool:
    """Return whether a process runs. A zombie does not run."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def wait_for_end(pid: int, *, or_readable: int | None = None, interval_seconds: float = 0.5) -> None:
    """Wait until a process has ended.

    Args:
        pid: The process id.
        or_readable: A file descriptor. The wait also ends when the descriptor is readable or at its end.
        interval_seconds: The polling interval on systems without pidfds.
    """
    others = [] if or_readable is None else [or_readable]
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # the system is not Linux, or a sandbox refuses
        while is_alive(pid) and not select.select(others, [], [], interval_seconds)[0]:
            pass
    else:
        select.select([pidfd, *others], [], [])
        os.close(pidfd)


def end_of(process: Process) -> str:
    """Describe how a process has ended. Call this after ``poll`` or ``wait`` has reported its end."""
    assert process.returncode is not None
    if isinstance(process, ForkedProcess) and not process.is_status_known:
        return "has ended in an unknown way (its fork server, which reports how, has ended or does not answer)"
    return ending(process.returncode)


def end_together(processes: Sequence[Process], grace_seconds: float) -> None:
    """Wait for processes to end, and kill processes that still run after ``grace_seconds``."""
    deadline = time.monotonic() + grace_seconds
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ending(status: int) -> str:
    """Return how a process ended, given its exit status as :mod:`subprocess` reports it."""
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


@cache
def await_gloo_at_exit() -> None:
    """When this process exits, wait until gloo's threads have dropped the tensors of finished operations.

    On a busy machine, the thread of gloo that has finished an operation may be suspended before it drops the tensors.
    If it asks for Python's lock after Python has begun to end, the process is aborted (pytorch issue 190489).
    """
    atexit.register(_await_gloo)


def _await_gloo() -> None:
    deadline, idle_looks = time.monotonic() + _IDLE_SECONDS, 0
    while idle_looks < 2 and time.monotonic() < deadline:  # a thread may wait for Python's lock during one look
        time.sleep(_LOOK_SECONDS)
        idle_looks = 0 if _gloo_runs() else idle_looks + 1


def _gloo_runs() -> bool:
    """Whether a thread that executes gloo's operations computes. One that waits for another process does not."""
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it has ended
            _, _, state = (thread / "stat").read_text().rpartition(") ")
            if state.startswith("R") and (thread / "comm").read_text().startswith("pt_gloo"):
                return True
    return False
