"""Failures of all processes of a pipeline, and waiting that ends when there is one."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, NoReturn

from strategies.common.errors import PeerFailed, is_consequence

_DIAGNOSIS_SECONDS = 2.0
"""How long to wait for the cause of a failure that is only the consequence of another one."""


class Failures:
    """Collects the failures of all processes, from whichever thread detects them.

    A failure is a *consequence* if it results from the failure of another process, such as a closed connection.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: list[tuple[BaseException, bool]] = []
        self.first: Future[None] = Future()
        """Done as soon as there is a failure."""
        self._cause: Future[None] = Future()
        self.raised = False
        """Whether a failure has been raised to the user."""

    def add(self, error: BaseException, *, consequence: bool) -> None:
        """Record a failure."""
        with self._lock:
            self._found.append((error, consequence))
            if not self.first.done():
                self.first.set_result(None)
            if not consequence and not self._cause.done():
                self._cause.set_result(None)

    @property
    def any(self) -> bool:
        """Whether there is a failure."""
        return self.first.done()

    def raise_untold(self) -> None:
        """Raise the cause of the failures, if there are any and none has been raised."""
        if self.any and not self.raised:
            self.raise_cause()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise the cause of an exception that leaves this context, which may be a failure of another process."""
        try:
            yield
        except BaseException as error:  # Ctrl-C as well
            self.add(error, consequence=is_consequence(error))
            self.raise_cause()

    def raise_cause(self) -> NoReturn:
        """Raise the first failure that is not a consequence; if there is none within 2 s, the first consequence."""
        wait([self._cause], _DIAGNOSIS_SECONDS)
        with self._lock:
            self.raised = True
            causes = [error for error, consequence in self._found if not consequence]
            # A stage that did not answer is named in its error; an error of its neighbour does not name it.
            consequences = sorted((error for error, _ in self._found), key=lambda e: isinstance(e, PeerFailed))
            raise (causes or consequences)[0]


class InterruptibleWait:
    """Runs waits for messages on a thread of its own, so that Ctrl-C or a failure of any process ends them at once.

    A wait inside gloo blocks its thread in C++, where Python runs no signal handlers.

    Args:
        failures: The failures that end a wait.
    """

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._waits: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._ended: SimpleQueue[tuple[Callable[[], Any] | None, BaseException | None]] = SimpleQueue()
        self._has_ended = False
        failures.first.add_done_callback(self._wake)
        threading.Thread(target=self._work, name="relay-wait", daemon=True).start()

    def __call__(self, wait_for_message: Callable[[], Any]) -> None:
        """Call a function that waits for a message.

        Raises:
            Exception: What the function raises, or the cause of the failures if there are any.
            RuntimeError: If the pipeline has ended.
        """
        if self._has_ended:
            raise RuntimeError("the pipeline has ended, so its stages send no more messages")
        if self._failures.any:
            self._failures.raise_cause()
        self._waits.put(wait_for_message)
        while True:
            which, error = self._ended.get()
            if which is None:
                self._failures.raise_cause()
            if which is wait_for_message:
                break
        if error is not None:
            raise error

    def end(self) -> None:
        """Let the thread end, once its last wait has returned or the connection has been closed."""
        self._has_ended = True
        self._waits.put(None)

    def _wake(self, _: Any) -> None:
        self._ended.put((None, None))

    def _work(self) -> None:
        while (wait_for_message := self._waits.get()) is not None:
            error: BaseException | None = None
            try:
                wait_for_message()
            except BaseException as caught:
                error = caught
            self._ended.put((wait_for_message, error))
            wait_for_message = error = None
