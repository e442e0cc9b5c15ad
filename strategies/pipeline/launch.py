"""Starting and ending the worker processes of a session on this machine."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed import rpc

from strategies.pipeline.session import Session, join_rpc, rpc_sessions

_START_SECONDS = 120.0
"""How long a worker may take to import torch, at least; a loaded machine takes many times its usual second."""


class Workers:
    """The worker processes of one session, and the driver's membership in it.

    Args:
        count: How many workers; their ranks are ``0 .. count - 1``, the driver's is ``count``.
        timeout_seconds: How long to wait for another process.
        threads: Number of threads that each process computes with.
    """

    def __init__(self, count: int, *, timeout_seconds: float, threads: int) -> None:
        self._count, self._timeout_seconds, self._threads = count, timeout_seconds, threads
        self._processes: list[subprocess.Popen] = []
        self._directory = ""
        self._joined = False

    def start(self) -> Session:
        """Starts the processes and returns when all have joined the session.

        Raises:
            RuntimeError: If this process already takes part in RPC, or if a worker ends or does not appear in time.
        """
        if rpc.api._is_current_rpc_agent_set():
            raise RuntimeError(
                "torch.distributed.rpc is already initialised in this process, which can only take part in one RPC "
                "session at a time; end the other one (rpc.shutdown, or the teardown of the other pipeline) first"
            )
        self._directory = tempfile.mkdtemp(prefix="relay-")
        session = Session(
            directory=self._directory,
            token=secrets.token_hex(4),
            size=self._count + 1,
            timeout_seconds=self._timeout_seconds,
            rpc_sessions=rpc_sessions(),
            threads=self._threads,
            paths=[os.path.abspath(path) if path == "" else path for path in sys.path],
            driver_pid=os.getpid(),
        )
        session.save()
        self._processes = [self._spawn(session, rank) for rank in range(self._count)]
        self._wait_until_ready()
        self._joined = True
        join_rpc(session, self._count)
        return session

    def ended(self, rank: int, *, wait_seconds: float = 0.0) -> str | None:
        """How a worker's process ended, in words; ``None`` if it still runs.

        Its connections close a little before the process itself has gone, so this waits for a moment.
        """
        process = self._processes[rank]
        try:
            status = process.wait(wait_seconds)
        except subprocess.TimeoutExpired:
            return None
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"process {process.pid} {how}"

    def stop(self, *, grace_seconds: float) -> None:
        """Ends the session: waits for the workers to end by themselves, then kills them. Safe at any time."""
        try:
            if self._joined and rpc.api._is_current_rpc_agent_set():
                with _without_lines(b"RPC agent for relay-"):
                    rpc.shutdown(graceful=False)
            self._joined = False
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.close()
            deadline = time.monotonic() + grace_seconds
            for process in self._processes:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        finally:
            self._processes = []
            if self._directory:
                shutil.rmtree(self._directory, ignore_errors=True)
                self._directory = ""

    def _spawn(self, session: Session, rank: int) -> subprocess.Popen:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(session.paths),
            "OMP_NUM_THREADS": str(self._threads),
            # A pass allocates and frees the same large blocks again and again: keep them instead of faulting them in
            # anew each time (2 to 4 % of a step).
            "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
            "MALLOC_MMAP_THRESHOLD_": str(1 << 40),
            "MALLOC_ARENA_MAX": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # the end of a session is no warning
        }
        command = [sys.executable, "-m", "strategies.pipeline.worker", session.directory, str(rank)]
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + max(_START_SECONDS, self._timeout_seconds)
        waiting = set(range(self._count))
        while waiting:
            for rank in sorted(waiting):
                if (Path(self._directory) / f"ready-{rank}").exists():
                    waiting.discard(rank)
                elif (how := self.ended(rank)) is not None:
                    raise RuntimeError(f"the worker of stage {rank} could not start: {how}; see its output above")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the workers of stages {sorted(waiting)} did not start in time")
            time.sleep(0.005)


@contextmanager
def _without_lines(part: bytes) -> Iterator[None]:
    """Keeps lines that contain ``part`` from standard error, whichever library writes them.

    RPC warns of each connection that closes, and its C++ logger has no level that could be set at run time.
    """
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            os.write(2, b"".join(line for line in file if part not in line))


def share_of_threads(processes: int) -> int:
    """How many threads each of ``processes`` processes on this machine should compute with.

    Never more than this process uses now, so that a limit set by the user holds.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(torch.get_num_threads(), max(1, cores // processes))
