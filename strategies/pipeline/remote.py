"""The driver's end of the control plane: numbered commands to the stages, and the first failure of any of them."""

import pickle
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NoReturn

from torch.distributed import rpc

from strategies.pipeline.channel import PeerFailed, is_consequence
from strategies.pipeline.worker import Command, Failure, perform, progress

_DIAGNOSIS_SECONDS = 2.0
"""How long to look for the cause of a failure that is only the consequence of another one."""

_RESCUE_SECONDS = 5.0
"""How long to wait for what a stage may still give that has been found to hang."""


class RemoteTraceback(Exception):
    """The cause of an exception that came from a worker: where it happened, and the traceback there."""

    def __init__(self, where: str, text: str) -> None:
        super().__init__(f"{where}\n\n{text}")


class Failures:
    """Collects what goes wrong on any process, from whichever thread notices it first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: list[tuple[BaseException, bool]] = []
        self.first: Future[None] = Future()
        self._cause: Future[None] = Future()
        self.raised = False
        """Whether the user has been told."""

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
        """Whether anything has gone wrong."""
        return self.first.done()

    def raise_untold(self) -> None:
        """Raises what has gone wrong, unless the user has been told or all went well."""
        if self.any and not self.raised:
            self.raise_cause()

    def raise_cause(self) -> NoReturn:
        """Raises the first failure that is no mere consequence, or the first one of all if there is none."""
        wait([self._cause], _DIAGNOSIS_SECONDS)
        with self._lock:
            self.raised = True
            causes = [error for error, consequence in self._found if not consequence]
            # A stage that did not answer has a name, which is more than a neighbour knows of it.
            consequences = sorted((error for error, _ in self._found), key=lambda e: isinstance(e, PeerFailed))
            raise (causes or consequences)[0]


class Patience:
    """Waits for messages, either way, on a thread of its own, so that Ctrl-C or a failure anywhere ends it at once."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="relay-wait")

    def __call__(self, wait_for_message: Callable[[], Any]) -> None:
        arrived: Future[Any] = self._executor.submit(wait_for_message)
        either: list[Future[Any]] = [arrived, self._failures.first]
        wait(either, return_when=FIRST_COMPLETED)
        if not arrived.done():
            self._failures.raise_cause()
        arrived.result()

    def end(self) -> None:
        """Lets the thread end, when what it may still wait for has come or the connection is closed."""
        self._executor.shutdown(wait=False)


class RemoteStage:
    """Sends commands to one stage. Each call is one RPC, whatever the number of commands it carries.

    A call has no time limit: how long a stage computes is the model's affair. While the driver waits for a stage, it
    asks from time to time how far it is, and gives it up if it has done nothing in between.

    Args:
        name: The RPC name of the worker.
        stage: The ``RRef`` to its :class:`~strategies.pipeline.worker.Host`.
        description: The stage in words.
        ended: Tells how the worker's process ended, or ``None``.
        failures: Where failures go.
        timeout_seconds: How long a stage may do nothing while the driver waits for it.
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
        self._name, self._stage, self.description = name, stage, description
        self._ended, self.failures, self._timeout_seconds = ended, failures, timeout_seconds
        self._number = 0
        self._is_given_up = False
        self._later: deque[Command] = deque()  # the garbage collector may append from any thread

    @property
    def has_ended(self) -> bool:
        """Whether the worker's process is gone, and its layers with it."""
        return self._ended() is not None

    def later(self, command: str, *arguments: Any) -> None:
        """Runs a command just before that of the next call."""
        self._later.append((command, arguments))

    def start(self, command: str, *arguments: Any) -> "Future[Any]":
        """Runs a command after those before it, without waiting.

        Failures are noted as soon as they are known; see :meth:`result`.
        """
        done: Future[Any] = Future()
        commands = [self._later.popleft() for _ in range(len(self._later))]
        commands.append((command, arguments))
        reply = rpc.rpc_async(self._name, perform, args=(self._stage, self._number, commands), timeout=0)
        self._number += 1
        failures = self.failures  # those of now: who leads the stages may have others by the time of the reply
        reply.add_done_callback(lambda reply: self._settle(reply, done, failures))
        return done

    def beside(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls ``function(stage, *arguments)`` on the worker while the stage goes on with its commands.

        Returns:
            What waits for the result: its ``wait`` raises what went wrong, which is no failure of the stage.
        """
        return rpc.rpc_async(self._name, function, args=(self._stage, *arguments), timeout=0)

    def result(self, started: "Future[Any]") -> Any:
        """Waits for what :meth:`start` began.

        Raises:
            Exception: The first failure of any stage, with the type that it had there. Once that has been raised, only
                a failure of this command: what can still be saved from a broken pipeline is.
            RuntimeError: If the stage does nothing for the time-out.
        """
        if not self.failures.raised:
            self._wait_for(started)
            if self.failures.any:
                self.failures.raise_cause()
        return self._rescued(started)

    def call(self, command: str, *arguments: Any) -> Any:
        """Runs a command and waits for its result; see :meth:`result`."""
        return self.result(self.start(command, *arguments))

    def rescue(self, command: str, *arguments: Any) -> Any:
        """Like :meth:`call`, but goes on for a moment if another stage fails meanwhile."""
        return self._rescued(self.start(command, *arguments))

    def _rescued(self, started: "Future[Any]") -> Any:
        """Waits for a command as long as the stage gets on, whatever has failed.

        Raises:
            RuntimeError: If it does nothing for the time-out, or for a moment if it has been given up for that before.
        """
        before = None
        while not wait([started], self._patience_seconds()).done:
            asked = rpc.rpc_async(self._name, progress, args=(self._stage,), timeout=self._timeout_seconds)
            now = asked.wait()
            if now == before:
                raise RuntimeError(f"{self.description} does not get on; it stands in {now[1]}")
            before = now
        return started.result()

    def _patience_seconds(self) -> float:
        return _RESCUE_SECONDS if self._is_given_up else self._timeout_seconds

    def _wait_for(self, started: "Future[Any]") -> None:
        """Returns when the command is done, or any stage has failed, or this one has stopped doing anything."""
        before = None
        while not wait([started, self.failures.first], self._timeout_seconds, FIRST_COMPLETED).done:
            asked = rpc.rpc_async(self._name, progress, args=(self._stage,), timeout=self._timeout_seconds)
            now = asked.wait()
            if now == before:
                self._is_given_up = True
                self.failures.add(
                    RuntimeError(
                        f"{self.description} has done nothing for {self._timeout_seconds:g} s; it stands in {now[1]}. "
                        "If it only takes its time, raise rpc_timeout_sec."
                    ),
                    consequence=False,
                )
            before = now

    def _settle(self, reply: Any, done: "Future[Any]", failures: Failures) -> None:
        """Runs on a thread of RPC as soon as the reply is there."""
        try:
            value = reply.value()
        except Exception as error:
            ended = self._ended()
            lost = RuntimeError(f"{self.description} did not answer: {ended or error}")
            failures.add(lost, consequence=ended is None and is_consequence(error))
            done.set_exception(lost)
            return
        if isinstance(value, Failure):
            failed = rebuilt(value)
            failures.add(failed, consequence=value.consequence)
            done.set_exception(failed)
        else:
            done.set_result(value)


def rebuilt(failure: Failure) -> BaseException:
    """The exception of another process, with the traceback there as its cause."""
    try:
        error = pickle.loads(failure.pickled)
        assert isinstance(error, BaseException)
    except Exception:  # not picklable, or only where it was raised; its traceback tells all the same
        error = RuntimeError(f"{failure.where} failed: {failure.traceback.strip().splitlines()[-1]}")
    error.__cause__ = RemoteTraceback(failure.where, failure.traceback)
    return error
