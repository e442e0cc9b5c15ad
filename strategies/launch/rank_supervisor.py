"""The process of a rank that replaces its worker: ``python -m strategies.launch.rank_supervisor WORLD NUMBER``.

torchrun and SLURM end the whole run when a rank ends. With ``max_restarts``, a rank that is no driver supervises its
worker as a child process, and starts another one when it has been killed::

    rank 2      supervisor ── starts ──▶ worker, sessions 1, 2, ✗ killed in 2
                     └────── starts ──▶ worker, sessions 3, ...          ends with the worker's status

It imports no torch.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryFile
from typing import Any

from strategies.common.formatting import ending
from strategies.launch.supervision import Watchdog, wait_for_end

SERVE = "strategies.pipeline.worker.serve"
"""The module that a worker of a rank runs."""

_DIGITS = 20


class RankSupervisor:
    """Runs one worker after another.

    Args:
        rank: The number of the rank, for messages.
        command: Returns the command of a worker that begins with a session, and notes each session (see
            :func:`note_session`) in the file with this descriptor.
    """

    def __init__(self, rank: int, command: Callable[[int, int], list[str]]) -> None:
        self._rank, self._command = rank, command
        self._worker: subprocess.Popen | None = None
        self._is_to_end = False

    def run(self, number: int) -> int:
        """Run workers, the first of which begins with session ``number``; return the exit status of the last one.

        A worker is replaced if a signal has ended it in a session. One that has not reached a session would not reach
        the next one either.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the worker
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._pass_on)
        while True:
            begun, status = self._run_one(number)
            if status >= 0 or status == -signal.SIGTERM or begun < number:
                return status
            if self._is_to_end:
                return -signal.SIGTERM
            sys.stderr.write(f"rank {self._rank}: its worker {ending(status)}; another process takes its place\n")
            sys.stderr.flush()
            number = begun + 1

    def _run_one(self, number: int) -> tuple[int, int]:
        """Run one worker; return the last session that it has begun (0: none), and its exit status."""
        with TemporaryFile() as begun:
            self._worker = subprocess.Popen(self._command(number, begun.fileno()), pass_fds=[begun.fileno()])
            if self._is_to_end:  # the signal came before there was a worker to pass it on to
                self._worker.terminate()
            status = self._worker.wait()
            return int(os.pread(begun.fileno(), _DIGITS, 0) or 0), status

    def _pass_on(self, signum: int, _: Any) -> None:
        self._is_to_end = True
        if self._worker is not None and self._worker.poll() is None:
            self._worker.send_signal(signum)


def note_session(begun: int, number: int) -> None:
    """Tell the supervisor that a session begins."""
    os.pwrite(begun, f"{number:{_DIGITS}}".encode(), 0)


def end_with_supervisor() -> None:
    """End this process when the supervisor that has started it ends."""

    def has_ended(pid: int) -> bool:
        wait_for_end(pid)
        return True

    Watchdog("relay-supervisor-watch", partial(has_ended, os.getppid())).start()


if __name__ == "__main__":
    world = sys.argv[1]
    supervisor = RankSupervisor(
        json.loads(world)["rank"],
        lambda number, begun: [sys.executable, "-m", SERVE, world, str(number), str(begun)],
    )
    status = supervisor.run(int(sys.argv[2]))
    if status < 0:  # end in the same way, for those who watch this process
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)
