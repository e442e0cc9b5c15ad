"""Contestants in processes of their own, which work only when they are told: so all can take turns on one machine.

    coordinator ── "step" ──▶ member 0 ─┐
                └─ "step" ──▶ member 1 ─┤     the time of a step: from the word to the last answer
                ◀── done ───────────────┘

A member that fails or hangs ends its crew, which is dropped with the reason; the others go on.
"""

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from time import monotonic, perf_counter
from typing import Any

import torch

START_SECONDS, CALL_SECONDS = 180.0, 240.0


class CrewError(RuntimeError):
    """A member raised, ended or did not answer; the text is the reason."""


def serve(pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """The whole life of a member: makes the contestant, then calls its methods as told, until the pipe closes."""
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


class Crew:
    """Some processes that make up one contestant.

    Args:
        make: Makes a member; a top-level class or function, called with the member's number and ``arguments``. A
            member has ``close()``, and methods to be called.
        count: How many members.
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

    def tell(self, name: str, *arguments: Any) -> None:
        """Has every member call a method; :meth:`answers` waits for them."""
        for pipe in self._pipes:
            try:
                pipe.send((name, arguments))
            except OSError:  # it has ended: the answers tell how
                continue

    def answers(self, seconds: float = CALL_SECONDS) -> list[Any]:
        """What each member returns.

        Raises:
            CrewError: If one does not; the crew has ended then.
        """
        self._ready()
        return self._collect(seconds)

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """Has every member call a method and returns what each returns; see :meth:`answers`."""
        self._ready()
        self.tell(name, *arguments)
        return self._collect(CALL_SECONDS)

    def timed(self, name: str, *arguments: Any) -> float:
        """The seconds until all members have done it."""
        self._ready()
        began = perf_counter()
        self.tell(name, *arguments)
        self._collect(CALL_SECONDS)
        return perf_counter() - began

    def end(self) -> None:
        """Ends the members; safe to call twice."""
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
        answers: dict[int, Any] = {}
        deadline = monotonic() + seconds
        while len(answers) < len(self._pipes):
            missing = [pipe for k, pipe in enumerate(self._pipes) if k not in answers]
            ready = wait(missing, max(0.0, deadline - monotonic()))
            if not ready:
                self._kill(f"no answer within {seconds:.0f} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    good, value = pipe.recv()
                except (EOFError, ConnectionError):
                    good, value = False, "a process ended without a word"
                if not good:
                    self._kill(value)
                answers[self._pipes.index(pipe)] = value
        return [answers[k] for k in range(len(self._pipes))]

    def _kill(self, why: str) -> None:
        for process in self._processes:  # one that waits for a neighbour would not end by itself
            process.kill()
        self.end()
        raise CrewError(why)
