"""The process of a rank that replaces its worker: ``python -m strategies.launch.rank_supervisor WORLD NUMBER``.

torchrun and SLURM end the whole run when a rank ends. With ``max_restarts``, a rank that is not a driver supervises its
worker as a child process, and starts a new worker for the next session::

    rank 2      supervisor ── starts ──▶ worker, session 1, ended with it
                     ├────── starts ──▶ worker, session 2, ✗ killed
                     └────── starts ──▶ worker, session 3, ...              ends with the worker's status

If the system supports it, workers are forks of a process that has imported torch. The supervisor itself does not import
torch. It holds the memory with the snapshots of its worker, from which the next worker starts.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from strategies.launch.fork_server import ForkServer, OwnForkServer, server_for
from strategies.launch.process_ends import Process, Watchdog, end_of, is_alive, wait_for_end

SERVE = "strategies.pipeline.worker.serve"
"""The module that a worker of a rank runs."""

_MODULES = (SERVE, "strategies.pipeline.worker.process")
_MODULES_LATER = ("torch._dynamo",)
"""The modules that torch imports in a worker's first step, which takes as long as importing torch."""

NEXT_SESSION = 75
"""The exit status of a worker whose session is over while the driver starts a new session."""

_LOOK_SECONDS = 1.0
"""How often a supervisor checks whether its driver is running."""

_START_SECONDS = 120.0
"""How long a fork server may take to import torch; a loaded machine takes many times its usual second."""

_FORK_SECONDS = 20.0
"""How long a fork server may take for a fork once it has forked. It takes milliseconds unless it is stopped."""

_MOST_EARLY_ENDS = 3
"""Maximum number of consecutive workers that are killed before they reach a session."""

_LONELY_SECONDS = 10.0
"""How long a worker may outlive its driver. It notices the end within two seconds, but not while it connects."""


class Starts:
    """Starts the processes of a rank: forks of a fork server of this process, or new interpreters.

    Args:
        world: The rank and the other ranks, as JSON.
    """

    def __init__(self, world: str) -> None:
        description = json.loads(world)
        self._held = memory_files(f"relay-snapshot-{description['rank']}")
        self._slots = json.dumps(self._held)
        self._world, self._rank = world, description["rank"]
        self._stage = description["rank"] // description["num_parts"] % description["num_stages"] - 1
        self._paths = list(map(os.path.abspath, sys.path))
        self._seconds = _START_SECONDS

    def __call__(self, number: int, stdin: int) -> Process:
        """Start the worker of session ``number``, with a file descriptor as standard input."""
        arguments = [self._world, number, os.getpid(), self._slots]
        command = [sys.executable, "-m", SERVE, self._world, "supervised", str(number), str(os.getpid()), self._slots]
        if (server := self._server()) is not None:
            try:
                process = server.fork(
                    f"{SERVE}:supervised",
                    arguments,
                    environment=os.environ,
                    paths=self._paths,
                    name=f"relay-worker-{self._stage}",
                    command=command,
                    stdin=stdin,
                    outlives_server=True,
                    timeout_seconds=self._seconds,
                )
            except TimeoutError:
                _say(
                    f"rank {self._rank}: its fork server has not started a process within {self._seconds:g} s and has "
                    "been ended. A new interpreter, which imports torch, is started instead. Check the memory and the "
                    "load of this host, and whether a process on it has been stopped: a fork takes milliseconds, and "
                    "the import of torch before it seconds."
                )
                OwnForkServer.discard()
                self._seconds = _START_SECONDS  # the next server has to import torch
            except OSError:  # the server has ended or cannot fork
                OwnForkServer.discard_if_ended()
                self._seconds = _START_SECONDS
            else:
                self._seconds = _FORK_SECONDS
                return process
        return subprocess.Popen(command, stdin=stdin)

    def prepare(self) -> None:
        """Import in the background what a worker needs in its first step."""
        if (server := self._server()) is not None:
            server.import_later()

    def close(self) -> None:
        """Release the memory with the snapshots of the worker."""
        for path, _ in self._held:
            os.close(int(os.path.basename(path)))

    def _server(self) -> ForkServer | None:
        return server_for(_MODULES, _MODULES_LATER, os.environ, self._paths)


class _Worker:
    """The worker of one session.

    Args:
        start: Starts the worker, with a file descriptor as its standard input. The worker writes the process id of its
            driver to this descriptor.
    """

    def __init__(self, start: Callable[[int], Process]) -> None:
        self._note, theirs = os.pipe()
        os.set_blocking(self._note, False)
        try:
            self.process = start(theirs)
        finally:
            os.close(theirs)
        self._driver: int | None = None

    @property
    def driver(self) -> int | None:
        """The process id of the driver, 0 if it is on another host; ``None`` before the worker reaches its session."""
        with suppress(BlockingIOError):
            if self._driver is None and (note := os.read(self._note, 64)):
                self._driver = int(note)
        return self._driver

    def close(self) -> None:
        """Close the connection."""
        os.close(self._note)


class RankSupervisor:
    """Runs one worker after another.

    Args:
        rank: The number of the rank, for messages.
        start: Starts the worker of a session, given its number and the file descriptor for standard input.
        prepare: Called every second after the first session has begun.
        replaces: Whether a new worker follows a worker that a signal ended.
    """

    def __init__(
        self,
        rank: int,
        start: Callable[[int, int], Process],
        *,
        prepare: Callable[[], object] = lambda: None,
        replaces: bool = True,
    ) -> None:
        self._rank, self._start, self._prepare, self._replaces = rank, start, prepare, replaces
        self._worker: _Worker | None = None
        self._driver: int | None = None
        self._alone_since: float | None = None
        self._is_asked_to_end = False

    def run(self, number: int) -> int:
        """Run workers, starting with session ``number``. Returns the exit status of the last worker.

        A worker is replaced if its session is over and the driver starts a new session, or if a signal ended it and
        ``replaces`` is set.
        """
        if threading.current_thread() is threading.main_thread():  # not in an actor of Ray, which handles signals
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the worker
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, self._pass_on)
        num_early = 0
        while True:
            worker, status = self._run_one(number)
            num_early = 0 if worker.driver is not None else num_early + 1
            number += worker.driver is not None
            worker.close()
            if status == NEXT_SESSION:
                continue
            is_killed = status < 0 and status != -signal.SIGTERM
            if not (is_killed and self._replaces) or self._is_asked_to_end or num_early == _MOST_EARLY_ENDS:
                return status
            how = f"rank {self._rank}: its worker {end_of(worker.process)}"
            if self._driver is not None and not is_alive(self._driver):
                _say(f"{how}, and its driver, process {self._driver}, has ended")
                return 1
            _say(f"{how}; a new process replaces it")

    def _run_one(self, number: int) -> tuple[_Worker, int]:
        """Run a worker for a session. Returns the worker and its exit status."""
        worker = self._worker = _Worker(partial(self._start, number))
        if self._is_asked_to_end:  # the signal came before there was a worker to pass it on to
            worker.process.kill()
            worker.process.wait()
            return worker, -signal.SIGTERM
        status: int | None = None
        while status is None:
            with suppress(subprocess.TimeoutExpired):
                status = worker.process.wait(_LOOK_SECONDS)
            self._driver = worker.driver or self._driver
            if status is None and self._driver is not None:
                self._look_after(worker, self._driver)
        return worker, status

    def _look_after(self, worker: _Worker, driver: int) -> None:
        with suppress(OSError):  # no process or file is available now; the next call tries again
            self._prepare()
        if is_alive(driver):
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = time.monotonic()
        elif time.monotonic() - self._alone_since > _LONELY_SECONDS:
            worker.process.kill()

    def _pass_on(self, signum: int, _: Any) -> None:
        self._is_asked_to_end = True
        if self._worker is not None and self._worker.process.returncode is None:
            self._worker.process.send_signal(signum)


def memory_files(name: str) -> list[tuple[str, int]]:
    """Create the two slots for the snapshots of a worker; see :mod:`strategies.pipeline.transport.slots`.

    Args:
        name: The name that tools such as ``lsof`` show.

    Returns:
        The path and the inode of each. They are valid for other processes of this host until this process ends.
    """
    if not hasattr(os, "memfd_create"):  # and so no worker is replaced
        return []
    files = [os.memfd_create(f"{name}-{place}", os.MFD_CLOEXEC) for place in range(2)]
    return [(f"/proc/{os.getpid()}/fd/{file}", os.fstat(file).st_ino) for file in files]


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def note_session(driver: int) -> None:
    """Notify the supervisor that a session begins.

    Args:
        driver: The process id of the driver; 0 if it is on another host.
    """
    with suppress(OSError):  # the supervisor has ended, and this process ends as well
        os.write(0, b"%d" % driver)


def end_with_supervisor(supervisor: int) -> None:
    """End this process when the supervisor that started it ends.

    Args:
        supervisor: The process id of the supervisor.
    """

    def has_ended(pid: int) -> bool:
        wait_for_end(pid)
        return True

    Watchdog("relay-supervisor-watch", partial(has_ended, supervisor)).start()


if __name__ == "__main__":
    world, number = sys.argv[1:]
    start = Starts(world)
    status = RankSupervisor(json.loads(world)["rank"], start, prepare=start.prepare).run(int(number))
    if status < 0:  # end by the same signal, for processes that watch this process
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)
