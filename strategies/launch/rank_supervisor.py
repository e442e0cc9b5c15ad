"""The process of a rank that replaces its worker: ``python -m strategies.launch.rank_supervisor WORLD NUMBER SPARES``.

torchrun and SLURM end the whole run when a rank ends. With ``max_restarts`` or snapshots, a rank that is no driver
supervises its worker as a child process, and starts another one for the next session::

    rank 2      supervisor ── starts ──▶ worker, session 1, ended with it
                     ├────── starts ──▶ worker, session 2, ✗ killed
                     └────── starts ──▶ worker, session 3, ...              ends with the worker's status

Workers are forks of a process that has imported torch, where the system has what that needs. With spares, some of them
wait for a session::

                supervisor ── tells a session ──▶ spare ▷ worker
                     └─ fork server ── forks ──▶ another spare

The supervisor itself imports no torch.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from strategies.launch.fork_server import ForkServer, OwnForkServer, server_for
from strategies.launch.supervision import Process, Watchdog, end_of, end_together, is_alive, wait_for_end

SERVE = "strategies.pipeline.worker.serve"
"""The module that a worker of a rank runs."""

_MODULES = (SERVE, "strategies.pipeline.worker.process")
_MODULES_LATER = ("torch._dynamo",)
"""What torch imports in a worker's first step, which takes as long as importing torch."""

NEXT_SESSION = 75
"""The exit status of a worker whose session is over while the driver has another one."""

_LOOK_SECONDS = 1.0
"""How often a supervisor looks after its spares and its driver."""

_START_SECONDS = 120.0
"""How long a fork server may take to import torch; a loaded machine takes many times its usual second."""

_FORK_SECONDS = 20.0
"""How long a fork server may take for a fork once it has forked. It takes milliseconds unless it is stopped."""

_MOST_EARLY_ENDS = 3
"""How many workers in a row may be killed before they have reached a session. Another one would not reach it either."""

_LONELY_SECONDS = 10.0
"""How long a worker may outlive its driver. It notices the end within two seconds, but not while it connects."""

_END_SECONDS = 2.0


class Starts:
    """Starts the processes of a rank: forks of a fork server of this process, or new interpreters.

    Args:
        world: The rank and the others, as JSON.
    """

    def __init__(self, world: str) -> None:
        self._world, self._rank = world, json.loads(world)["rank"]
        self._paths = list(map(os.path.abspath, sys.path))
        self._seconds = _START_SECONDS

    def __call__(self, stdin: int) -> Process:
        """Start a process that waits for the number of a session on its standard input, a socket."""
        arguments = [self._world, os.getpid()]
        command = [sys.executable, "-m", SERVE, self._world, "supervised", str(os.getpid())]
        if (server := self._server()) is not None:
            try:
                process = server.fork(
                    f"{SERVE}:supervised",
                    arguments,
                    environment=os.environ,
                    paths=self._paths,
                    name=f"relay-spare-{self._rank}",
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

    def prepare(self) -> bool:
        """Have what a worker needs in its first step imported ahead, without waiting; return whether that is done."""
        server = self._server()
        if server is None:
            return True
        server.import_later()
        return not isinstance(server, OwnForkServer)

    def _server(self) -> ForkServer | None:
        return server_for(_MODULES, _MODULES_LATER, os.environ, self._paths)


class _Worker:
    """A process for one session, of which it gets the number when a worker is needed; until then it is a spare.

    Args:
        start: Starts it with a socket as its standard input.
    """

    def __init__(self, start: Callable[[int], Process]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.process = start(theirs.fileno())

    def serve(self, number: int) -> None:
        """Make it the worker of a session."""
        with suppress(OSError):  # it has just ended, which the next wait finds
            self._socket.sendall(b"%d\n" % number)

    def driver(self) -> int | None:
        """Return the process id of the driver; ``None`` if the process has not reached its session."""
        with suppress(OSError):
            if note := self._socket.recv(64, socket.MSG_DONTWAIT | socket.MSG_PEEK):
                return int(note)
        return None

    def close(self) -> None:
        """Close the connection, which ends a spare."""
        self._socket.close()


class RankSupervisor:
    """Runs one worker after another.

    Args:
        rank: The number of the rank, for messages.
        start: Starts a process that waits for its session, with the given file descriptor as standard input.
        num_spares: How many such processes wait.
        prepare: Called every second once the first session has begun; returns whether spares can be started.
    """

    def __init__(
        self,
        rank: int,
        start: Callable[[int], Process],
        *,
        num_spares: int = 0,
        prepare: Callable[[], bool] = lambda: True,
    ) -> None:
        self._rank, self._start, self._num_spares, self._prepare = rank, start, num_spares, prepare
        self._worker: _Worker | None = None
        self._spares: list[_Worker] = []
        self._driver: int | None = None
        self._alone_since: float | None = None
        self._is_asked_to_end = False

    def run(self, number: int) -> int:
        """Run workers, the first of which gets session ``number``; return the exit status of the last one.

        A worker is replaced if its session is over and the driver has another one, or if a signal has ended it.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the worker
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._pass_on)
        num_early = 0
        try:
            while True:
                status, has_begun = self._run_one(number)
                num_early = 0 if has_begun else num_early + 1
                number += has_begun
                if status == NEXT_SESSION:
                    continue
                is_killed = status < 0 and status != -signal.SIGTERM
                if not is_killed or self._is_asked_to_end or num_early == _MOST_EARLY_ENDS:
                    return status
                assert self._worker is not None
                how = f"rank {self._rank}: its worker {end_of(self._worker.process)}"
                if self._driver is not None and not is_alive(self._driver):
                    _say(f"{how}, and its driver, process {self._driver}, is gone")
                    return 1
                _say(f"{how}; another process takes its place")
        finally:
            for spare in self._spares:
                spare.close()
            end_together([spare.process for spare in self._spares], _END_SECONDS)

    def _run_one(self, number: int) -> tuple[int, bool]:
        """Run a worker for a session; return its exit status, and whether it has reached that session."""
        worker = self._worker = self._take_spare() or _Worker(self._start)
        if self._is_asked_to_end:  # the signal came before there was a worker to pass it on to
            worker.process.kill()  # a spare ignores SIGTERM
            worker.process.wait()
            worker.close()
            return -signal.SIGTERM, False
        worker.serve(number)
        status = self._wait(worker)
        driver = worker.driver()
        worker.close()
        self._driver = driver or self._driver
        return status, driver is not None

    def _take_spare(self) -> _Worker | None:
        while self._spares:
            spare = self._spares.pop(0)
            if spare.process.poll() is None:
                return spare
            spare.close()
        return None

    def _wait(self, worker: _Worker) -> int:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return worker.process.wait(_LOOK_SECONDS)
            self._driver = worker.driver() or self._driver
            if self._driver is not None:
                self._look_after_spares()
            if self._driver is None or is_alive(self._driver):
                self._alone_since = None
            elif self._alone_since is None:
                self._alone_since = time.monotonic()
            elif time.monotonic() - self._alone_since > _LONELY_SECONDS:
                worker.process.kill()

    def _look_after_spares(self) -> None:
        running = [spare for spare in self._spares if spare.process.poll() is None]
        for spare in self._spares:
            if spare not in running:
                spare.close()
        self._spares = running
        with suppress(OSError):  # no process or file can be had now: tried again at the next look
            if self._prepare():
                while len(self._spares) < self._num_spares:
                    self._spares.append(_Worker(self._start))

    def _pass_on(self, signum: int, _: Any) -> None:
        self._is_asked_to_end = True
        if self._worker is not None and self._worker.process.returncode is None:
            self._worker.process.send_signal(signum)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def await_session() -> int:
    """Wait, in a process that a supervisor has started, until it is to be a worker; return the number of the session.

    The process ends here if the supervisor ends.
    """
    with open(0, closefd=False) as told:
        line = told.readline()
    if not line:
        os._exit(0)
    return int(line)


def note_session(driver: int) -> None:
    """Tell the supervisor that a session begins.

    Args:
        driver: The process id of the driver.
    """
    with suppress(OSError):  # it has ended, and this process ends as well
        os.write(0, b"%d" % driver)


def end_with_supervisor(supervisor: int) -> None:
    """End this process when the supervisor that has started it ends.

    Args:
        supervisor: The process id of the supervisor.
    """

    def has_ended(pid: int) -> bool:
        wait_for_end(pid)
        return True

    Watchdog("relay-supervisor-watch", partial(has_ended, supervisor)).start()


if __name__ == "__main__":
    world, num_spares = sys.argv[1], int(sys.argv[3])
    start = Starts(world)
    supervisor = RankSupervisor(json.loads(world)["rank"], start, num_spares=num_spares, prepare=start.prepare)
    status = supervisor.run(int(sys.argv[2]))
    if status < 0:  # end in the same way, for those who watch this process
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)
