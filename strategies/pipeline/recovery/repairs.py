"""Replaces lost workers on a thread of its own, so that the driver's code need not know.

main thread    step ──── waits for stage 1 ·····························▶ goes on
workers        ✗ stage 1
this thread      └▶ ends the others ─ new workers, from the snapshot ─ the log once more ─┘
"""

import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass

from strategies.common.errors import WorkerLost, is_consequence
from strategies.pipeline.control.client import Failures
from strategies.pipeline.recovery.log import Log


@dataclass(frozen=True)
class RecoverySettings:
    """How lost workers are replaced.

    Attributes:
        max_restarts: How many times workers may be lost in one run, at least 1. Workers that are lost together count
            once.
        snapshot_every_n_steps: After this number of optimizer steps, every worker takes a snapshot.
    """

    max_restarts: int
    snapshot_every_n_steps: int = 1


@dataclass(frozen=True)
class Repair:
    """Lost workers have been replaced.

    Attributes:
        time: When, in seconds since 1970.
        lost: Which worker was lost, and how.
        seconds: How long it took.
        num_messages: How many orders and values the new workers got once more, or sent once more.
    """

    time: float
    lost: str
    seconds: float
    num_messages: int


class Repairs:
    """Replaces lost workers until the run ends.

    Args:
        max_restarts: How often.
        log: The driver's log.
        kill: Kills all workers.
        replace: Starts new workers, and goes through the log once more. It takes the failures of the next session, and
            which worker was lost; it returns how many operations were gone through.
        done: Those so far, of earlier pipelines of the run too; gets an entry for each repair.
    """

    def __init__(
        self,
        max_restarts: int,
        log: Log,
        kill: Callable[[], None],
        replace: Callable[[Failures, str], int],
        done: list[Repair],
    ) -> None:
        self._max_restarts, self._log, self._kill, self._replace, self._done = max_restarts, log, kill, replace, done
        self._num_lost = len(done)
        self._has_ended: Future[None] = Future()
        log.failures.repair = Future()
        self._thread = threading.Thread(target=self._work, name="relay-repairs", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Replace no more workers; wait until a replacement under way has ended."""
        self._has_ended.set_result(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            while self._repair_next():
                pass
        finally:  # whatever has happened, nobody waits for this thread
            repair = self._log.failures.repair
            if repair is not None and not repair.done():
                repair.set_result(None)

    def _repair_next(self) -> bool:
        """Wait for a failure and repair it; return whether there may be more."""
        failures = self._log.failures
        wait([failures.first, self._has_ended], return_when=FIRST_COMPLETED)
        if self._has_ended.done():
            return False
        cause = failures.cause()
        if failures.raised or not self._may_repair(cause):
            return False
        begin, lost = time.perf_counter(), str(cause)
        self._kill()  # which ends the waits of threads that hold the lock
        with self._log.lock:
            successor, found = self._replaced(cause)
            if isinstance(found, BaseException):
                failures.put_first(found)
                return False
            seconds = time.perf_counter() - begin
            self._done.append(Repair(time.time(), lost, seconds, found))
            successor.repair = Future()
            self._log.failures = successor
            failures.give_way_to(successor)
        with suppress(Warning):  # the user may have made errors of warnings
            warnings.warn(f"{lost}\nThe workers have been replaced in {seconds:.1f} s.", stacklevel=1)
        return True

    def _replaced(self, cause: BaseException) -> tuple[Failures, int | BaseException]:
        """Replace the workers until none is lost meanwhile.

        Returns:
            The failures of the next session, and how many operations were gone through, or why there is none.
        """
        while True:
            successor = Failures()
            try:
                return successor, self._replace(successor, str(cause))
            except BaseException as error:  # of any kind: the run ends with it, on the thread that waits
                successor.add(error, consequence=is_consequence(error))
                cause = successor.cause()
            if not self._may_repair(cause):
                return successor, cause
            self._kill()

    def _may_repair(self, cause: BaseException) -> bool:
        """Return whether workers are replaced after a failure, which counts."""
        is_loss = isinstance(cause, WorkerLost) and not self._has_ended.done()
        self._num_lost += is_loss
        return is_loss and self._num_lost <= self._max_restarts
