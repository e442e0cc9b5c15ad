"""The driver's end of the control plane: numbered commands to the stages, and the first failure of any of them."""

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, NoReturn

from torch.distributed import rpc

from strategies.pipeline.channel import is_consequence
from strategies.pipeline.worker import Command, Failure, perform

_DIAGNOSIS_SECONDS = 2.0
"""How long to look for the cause of a failure that is only the consequence of another one."""


_RESCUE_SECONDS = 10.0
"""How long to wait for what a stage of a broken pipeline may still give."""


class RemoteTraceback(Exception):
    """The cause of an exception that came from a worker: where it happened, and the traceback there."""

    def __init__(self, where: str, text: str) -> None:
        super().__init__(f"{where}\n\n{text}")


class Failures:
    """Collects what goes wrong on any worker, from whichever thread notices it first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: list[tuple[BaseException, bool]] = []
        self.first: Future[None] = Future()
        self._cause: Future[None] = Future()

    def add(self, error: BaseException, *, consequence: bool) -> None:
        """Notes a failure; a ``consequence`` of another failure gives way to that one."""
        with self._lock:
            self._found.append((error, consequence))
            if not self.first.done():
                self.first.set_result(None)
            if not consequence and not self._cause.done():
                self._cause.set_result(None)

    @property
    def any(self) -> bool:
        return self.first.done()

    def raise_cause(self) -> NoReturn:
        """Raises the first failure that is no mere consequence, or the first one of all if there is none."""
        wait([self._cause], _DIAGNOSIS_SECONDS)
        with self._lock:
            causes = [error for error, consequence in self._found if not consequence]
            raise (causes or [error for error, _ in self._found])[0]


class RemoteStage:
    """Sends commands to one stage. Each call is one RPC, whatever the number of commands it carries.

    Args:
        name: The RPC name of the worker.
        stage: The ``RRef`` to its :class:`~strategies.pipeline.worker.Host`.
        description: The stage in words.
        ended: Tells how the worker's process ended, or ``None``.
        failures: Where failures go.
        timeout_seconds: How long a call may take.
    """

    def __init__(
        self,
        name: str,
        stage: Any,
        description: str,
        *,
        ended: Callable[[], str | None],
        failures: Failures,
        timeout_seconds: float,
    ) -> None:
        self._name, self._stage, self._description = name, stage, description
        self._ended, self._failures, self._timeout_seconds = ended, failures, timeout_seconds
        self._number = 0
        self._later: list[Command] = []

    def later(self, command: str, *arguments: Any) -> None:
        """Runs a command just before that of the next call."""
        self._later.append((command, arguments))

    def start(self, command: str, *arguments: Any) -> "Future[Any]":
        """Runs a command after those before it, without waiting.

        Failures are noted as soon as they are known; see :meth:`result`.
        """
        commands, self._later = [*self._later, (command, arguments)], []
        done: Future[Any] = Future()
        reply = rpc.rpc_async(
            self._name, perform, args=(self._stage, self._number, commands), timeout=self._timeout_seconds
        )
        self._number += 1
        reply.add_done_callback(lambda reply: self._settle(reply, done))
        return done

    def result(self, started: "Future[Any]") -> Any:
        """Waits for what :meth:`start` began.

        Raises:
            Exception: The first failure of any stage, with the type that it had there. If one has failed before, only
                a failure of this command: what can still be saved from a broken pipeline is.
        """
        if not self._failures.any:
            wait([started, self._failures.first], return_when=FIRST_COMPLETED)
            if self._failures.any:
                self._failures.raise_cause()
        return started.result(_RESCUE_SECONDS if self._failures.any else None)

    def call(self, command: str, *arguments: Any) -> Any:
        """Runs a command and waits for its result; see :meth:`result`."""
        return self.result(self.start(command, *arguments))

    def _settle(self, reply: Any, done: "Future[Any]") -> None:
        """Runs on a thread of RPC as soon as the reply is there."""
        try:
            value = reply.value()
        except Exception as error:
            ended = self._ended()
            lost = RuntimeError(f"{self._description} did not answer: {ended or error}")
            self._failures.add(lost, consequence=ended is None and is_consequence(error))
            done.set_exception(lost)
            return
        if isinstance(value, Failure):
            failed = _rebuilt(value)
            self._failures.add(failed, consequence=value.consequence)
            done.set_exception(failed)
        else:
            done.set_result(value)


def _rebuilt(failure: Failure) -> BaseException:
    if failure.pickled:
        error = pickle.loads(failure.pickled)
    else:
        error = RuntimeError(f"{failure.where} failed: {failure.traceback.strip().splitlines()[-1]}")
    error.__cause__ = RemoteTraceback(failure.where, failure.traceback)
    return error
