"""Start and end the worker processes of a session on this machine."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from strategies.common.activity import noted
from strategies.common.errors import WorkerLost
from strategies.launch.allocator import variables_of_worker
from strategies.launch.fork_server import ForkServer, OwnForkServer, server_for
from strategies.launch.process_ends import Process, end_of, end_together
from strategies.launch.rendezvous import check_loopback
from strategies.launch.session import Session, join_rpc, leave_rpc, refuse_other_rpc

WORKER_MODULES = ("strategies.pipeline.__main__", "strategies.pipeline.worker.process")
"""The modules that a worker imports at its start."""

WORKER_MODULES_LATER = ("torch._dynamo",)
"""The modules that torch imports in a worker's first step, which takes as long as importing torch."""

_START_SECONDS = 120.0
"""How long a worker may take to import torch, at least; a loaded machine takes many times its usual second."""


class Workers:
    """The worker processes of one session, and the driver's membership in it.

    Args:
        stages: A description of each worker's stage. The workers have ranks ``0 .. count - 1``, the driver ``count``.
    """

    def __init__(self, stages: Sequence[str]) -> None:
        self._stages, self._count = stages, len(stages)
        self._processes: list[Process] = []  # kept after the session: other threads may ask how a worker ended
        self._directory = ""
        self._session: Session | None = None
        self._joined = False
        self._start_seconds = _START_SECONDS

    def start(self, *, timeout_seconds: float, threads: int) -> Session:
        """Start the processes, and return when all have joined the session.

        Args:
            timeout_seconds: Time limit of waits for another process.
            threads: Number of threads with which each process computes.

        Raises:
            RuntimeError: If this process is already part of an RPC session, or if a worker ends or does not appear in
                time, or if the loopback interface does not work.
        """
        refuse_other_rpc()
        check_loopback()
        self._directory = tempfile.mkdtemp(prefix="relay-")
        session = Session(
            rendezvous=f"file://{self._directory}",
            token=secrets.token_hex(4),
            size=self._count + 1,
            timeout_seconds=timeout_seconds,
            threads=threads,
            paths=_paths(),
            driver_pid=os.getpid(),
            notes=self._directory,
        )
        self._session = session
        (Path(self._directory) / "session.json").write_text(session.to_json())
        self._start_seconds = max(_START_SECONDS, timeout_seconds)
        deadline = time.monotonic() + self._start_seconds
        for stage in range(self._count):
            self._processes.append(self._spawn(session, stage, deadline))
        self._wait_until_ready(deadline)
        self._joined = True
        join_rpc(session, self._count, self._check)
        if (server := fork_server(session.threads)) is not None:
            server.import_later()
        return session

    def describe(self, stage: int) -> str:
        """Describe a worker's process."""
        return f"process {self._processes[stage].pid} on {socket.gethostname()}"

    def ended(self, stage: int, *, wait_seconds: float = 0.0) -> str | None:
        """Describe how a worker's process ended, and its last activity; ``None`` if it still runs.

        The connections of a process close shortly before it ends, so this may wait for ``wait_seconds``.
        """
        process = self._processes[stage]
        try:
            process.wait(wait_seconds)
        except subprocess.TimeoutExpired:
            return None
        return f"{end_of(process)} {self.doing(stage)}".rstrip()

    def doing(self, stage: int) -> str:
        """Describe the current or most recent activity of a worker; empty when the session has ended."""
        assert self._session is not None
        return noted(self._session.note(stage))

    def kill(self, stage: int) -> None:
        """Kill a worker's process."""
        self._processes[stage].kill()

    def stop(self, *, grace_seconds: float) -> None:
        """End the session: wait for the workers to end, then kill the remaining ones. Can be called at any time."""
        try:
            if self._joined:
                leave_rpc()
            self._joined = False
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.close()
            end_together(self._processes, grace_seconds)
        finally:
            if self._directory:
                shutil.rmtree(self._directory, ignore_errors=True)
                self._directory = ""

    def _spawn(self, session: Session, stage: int, deadline: float) -> Process:
        """Start a worker: a fork of a fork server if there is one, otherwise a new interpreter."""
        environment = environment_of_worker(session.paths, threads=session.threads)
        arguments = [stage, session.driver_pid, self._directory]
        command = [sys.executable, "-m", "strategies.pipeline", "worker", *map(str, arguments)]
        server = fork_server(session.threads)
        if server is not None:
            try:
                return server.fork(
                    "strategies.pipeline.__main__:main",
                    arguments,
                    environment=environment,
                    paths=session.paths,
                    name=f"relay-worker-{stage}",
                    command=command,
                    stdin=subprocess.PIPE,
                    outlives_server=True,
                    timeout_seconds=max(0.001, deadline - time.monotonic()),  # 0 would not wait at all
                )
            except TimeoutError:
                OwnForkServer.discard()
                raise self._late(range(stage, self._count)) from None
            except OSError:  # the server has ended or cannot fork; if a new interpreter also fails, it reports why
                OwnForkServer.discard_if_ended()
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)

    def _check(self) -> None:
        """If a worker has ended while other processes wait for it, end all workers and raise an error."""
        for stage in range(self._count):
            if (how := self.ended(stage)) is not None:
                for process in self._processes:
                    process.kill()
                was_killed = (self._processes[stage].poll() or 0) < 0
                kind = WorkerLost if was_killed else RuntimeError  # a worker that ended by itself would do so again
                raise kind(f"{self._stages[stage]}, {self.describe(stage)}, {how}; see its output above")

    def _wait_until_ready(self, deadline: float) -> None:
        waiting = set(range(self._count))
        while waiting:
            for stage in sorted(waiting):
                if (Path(self._directory) / f"ready-{stage}").exists():
                    waiting.discard(stage)
            self._check()
            if time.monotonic() > deadline:
                raise self._late(sorted(waiting))
            time.sleep(0.001)

    def _late(self, stages: Sequence[int]) -> RuntimeError:
        return RuntimeError(
            f"the workers of stages {list(stages)} did not start within {self._start_seconds:g} s: check the memory "
            "and the load of this host, and whether a process on it has been stopped"
        )


def fork_server(threads: int) -> ForkServer | None:
    """Return the fork server for this process's workers; ``None`` if the system does not support it.

    Starts the server if necessary. It imports torch while this process continues.

    Args:
        threads: Number of threads with which each worker computes.
    """
    environment = environment_of_worker(_paths(), threads=threads)
    return server_for(WORKER_MODULES, WORKER_MODULES_LATER, environment, _paths())


def _paths() -> list[str]:
    return [os.path.abspath(path) if path == "" else path for path in sys.path]


def environment_of_worker(
    paths: Sequence[str], *, threads: int | None = None, base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment variables of a worker.

    Args:
        paths: The worker's ``sys.path``.
        threads: Number of threads with which the worker computes, if known.
        base: The variables to which the worker's variables are added; by default those of this process.
    """
    return {
        **base,
        **({} if threads is None else {"OMP_NUM_THREADS": str(threads)}),
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in paths),
        **variables_of_worker(base),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # hides warnings about the normal end of a session
    }


def share_of_threads(processes: int) -> int:
    """Return the number of threads with which each of ``processes`` processes on this machine should compute.

    It never exceeds the number of threads of this process, so that the user's limit applies.
    """
    return min(torch.get_num_threads(), max(1, num_cores() // processes))


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
