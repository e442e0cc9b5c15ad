"""Runs contestants in their own processes, which work only on command, so that they can take turns on one machine.

    coordinator ── "step" ──▶ member 0 ─┐
                └─ "step" ──▶ member 1 ─┤     the time of a step: from the command to the last reply
                ◀── done ───────────────┘

If a member fails or hangs, all members of its contestant end, and the report gives the reason. The other contestants
continue.
"""

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from time import monotonic, perf_counter
from typing import Any

import torch

START_SECONDS, CALL_SECONDS = 180.0, 240.0


class ContestantError(RuntimeError):
    """A member raised an exception, ended or did not reply; the text is the reason."""


def serve(pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Runs in a member: creates the contestant, then calls its methods on command until the pipe closes."""
    torch.set_num_threads(1)
    try:
        member = make(*arguments)
        pipe.send((True, None))
        while True:
            try:
                name, given = pipe.recv()
            except EOFError:
                break
            pipe.send((True, getattr(member, name)(*given)))
        member.close()
    except BaseException as error:
        traceback.print_exc()
        last = traceback.format_exception_only(error)[-1].strip()
        pipe.send((False, last if last else f"{type(error).__name__}: {last}"))
        raise


class ContestantProcesses:
    """The processes of one contestant.

    Args:
        make: Creates a member; a top-level class or function, called with the member's number and ``arguments``. A
            member has ``close()`` and the methods that the coordinator calls.
        count: Number of members.
    """

    def __init__(self, make: Callable[..., Any], *arguments: Any, count: int = 1) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for number in range(count):
            own, other = context.Pipe()
            process = context.Process(target=serve, args=(other, make, (number, *arguments)))
            process.start()
            other.close()
            self._pipes.append(own)
            self._processes.append(process)
        self._is_ready = False

    def command(self, name: str, *arguments: Any) -> None:
        """Command every member to call a method; :meth:`replies` waits for the results."""
        for pipe in self._pipes:
            try:
                pipe.send((name, arguments))
            except OSError:  # the member has ended; the replies say why
                continue

    def replies(self, seconds: float = CALL_SECONDS) -> list[Any]:
        """Wait for the result of each member.

        Raises:
            ContestantError: If a member does not return a result; all members have then ended.
        """
        self._ready()
        return self._collect(seconds)

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """Command every member to call a method and return the results; see :meth:`replies`."""
        self._ready()
        self.command(name, *arguments)
        return self._collect(CALL_SECONDS)

    def timed(self, name: str, *arguments: Any) -> float:
        """Command every member to call a method and return the seconds until all have replied."""
        self._ready()
        began = perf_counter()
        self.command(name, *arguments)
        self._collect(CALL_SECONDS)
        return perf_counter() - began

    def end(self) -> None:
        """End the members; safe to call twice."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(15)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []

    def _ready(self) -> None:
        if not self._is_ready:
            self._is_ready = True
            self._collect(START_SECONDS)

    def _collect(self, seconds: float) -> list[Any]:
        replies: dict[int, Any] = {}
        deadline = monotonic() + seconds
        while len(replies) < len(self._pipes):
            missing = [pipe for k, pipe in enumerate(self._pipes) if k not in replies]
            ready = wait(missing, max(0.0, deadline - monotonic()))
            if not ready:
                self._kill(f"no reply within {seconds:.0f} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    good, value = pipe.recv()
                except (EOFError, ConnectionError):
                    good, value = False, "a process ended without a message"
                if not good:
                    self._kill(value)
                replies[self._pipes.index(pipe)] = value
        return [replies[k] for k in range(len(self._pipes))]

    def _kill(self, why: str) -> None:
        for process in self._processes:  # a process that waits for a neighbour would not end by itself
            process.kill()
        self.end()
        raise ContestantError(why)
