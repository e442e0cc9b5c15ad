"""Replaces lost workers on a separate thread, so that the driver's other code does not notice.

main thread    step ──── waits for stage 1 ···············································▶ continues
workers        ✗ stage 1
this thread      └▶ ends all workers ─ new workers, from the snapshot ─ the log again ────┘
"""

import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from strategies.common.errors import WorkerLost, is_consequence
from strategies.pipeline.control.client import Failures
from strategies.pipeline.recovery.log import Log


@dataclass(frozen=True)
class Recovery:
    """How lost workers are replaced, and which steps are verified; see ``docs/lost_workers.md``.

    Args:
        max_restarts: How many times one ``fit``, ``validate``, ``test`` or ``predict`` may replace lost workers.
            Workers that are lost at the same time take one repair. When a worker dies or hangs, new workers start from
            the last snapshot, and the driver sends them again everything that it has sent since then. The script
            continues, and its results equal those of an undisturbed run. Default: 0, the first error ends the run.
        snapshot_every_n_steps: With ``max_restarts``, the number of optimizer steps after which every worker takes a
            snapshot: it copies its part of the model and of the optimizer states into memory that outlives it. When a
            worker is lost, new workers repeat the computation since the last snapshot. Default: 1.
        verify_every_n_steps: The workers compute every n-th optimizer step, with all computation since the step before
            it, a second time from a copy of the state before it. If a value or a weight differs in a single bit, an
            error names the stage: a layer is not deterministic, or a core or its memory is faulty. The driver's layers
            are not verified. Default: 0, no step is verified.
    """

    max_restarts: int = 0
    snapshot_every_n_steps: int = 1
    verify_every_n_steps: int = 0


@dataclass(frozen=True)
class Repair:
    """One replacement of lost workers.

    Attributes:
        time: The time of the repair, in seconds since 1970.
        lost: Which worker was lost, and how.
        seconds: The duration of the repair.
        restart_seconds: The part of it until new workers had started from the snapshot. In the rest, they computed
            again what the driver waits for.
        num_messages: The number of orders and values that the driver and the new workers have sent again.
    """

    time: float
    lost: str
    seconds: float
    restart_seconds: float
    num_messages: int


class Replacement(NamedTuple):
    """New workers have started and have repeated the log.

    Attributes:
        started: When they had started from the snapshot, as ``time.perf_counter()``.
        num_messages: The number of repeated operations.
    """

    started: float
    num_messages: int


class Repairs:
    """Replaces lost workers on a thread, from :meth:`start` to :meth:`end`.

    Args:
        max_restarts: The maximum number of repairs.
        log: The driver's log.
        kill: Kills all workers.
        replace: Starts new workers and repeats the log. Its arguments are the failures of the next session, and a
            message that says which worker was lost.
        abandon: Called if the user's code has ended by an error while workers were replaced. It makes the new workers
            abandon the pass, which nobody continues.
        done: The repairs so far, including repairs of earlier pipelines of the run. Each repair adds an entry.
    """

    def __init__(
        self,
        max_restarts: int,
        log: Log,
        kill: Callable[[], None],
        replace: Callable[[Failures, str], Replacement],
        abandon: Callable[[], None],
        done: list[Repair],
    ) -> None:
        self._max_restarts, self._log, self._done = max_restarts, log, done
        self._kill, self._replace, self._abandon = kill, replace, abandon
        self._num_lost = len(done)
        self._has_ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._work, name="relay-repairs", daemon=True)

    def start(self) -> None:
        """Replace lost workers from now on."""
        self._log.failures.repair = Future()
        self._thread.start()

    def end(self) -> None:
        """Stop replacing workers; wait until a repair that has begun is over."""
        self._has_ended.set_result(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            while self._repair_next():
                pass
        finally:  # even after an error in this thread, no thread must wait for it
            repair = self._log.failures.repair
            if repair is not None and not repair.done():
                repair.set_result(None)

    def _repair_next(self) -> bool:
        """Wait for a failure and repair it; return whether more failures may follow."""
        failures = self._log.failures
        wait([failures.first, self._has_ended], return_when=FIRST_COMPLETED)
        if self._has_ended.done():
            return False
        cause = failures.first_cause()
        if (failures.raised and not failures.is_interrupted) or not self._may_repair(cause):
            return False
        begin, lost = time.perf_counter(), str(cause)
        self._kill()  # this ends the waits of threads that hold the lock
        with self._log.lock:
            successor, found = self._replaced(cause)
            if isinstance(found, BaseException):
                successor.is_replaying = False
                failures.put_first(found)
                return False
            seconds, restart_seconds = time.perf_counter() - begin, found.started - begin
            self._done.append(Repair(time.time(), lost, seconds, restart_seconds, found.num_messages))
            successor.repair, successor.is_replaying = Future(), False
            self._log.failures = successor
            failures.give_way_to(successor)
            if successor.raised:
                self._abandon()
        with suppress(Warning):  # the user may have turned warnings into errors
            warnings.warn(
                f"{lost}\nNew workers have started in {restart_seconds:.2f} s, and have repeated what followed the "
                f"last snapshot in {seconds - restart_seconds:.2f} s.",
                stacklevel=1,
            )
        return True

    def _replaced(self, cause: BaseException) -> tuple[Failures, Replacement | BaseException]:
        """Replace the workers, and repeat this if a worker is lost during the repair.

        Returns:
            The failures of the next session, and the replacement or the error that ends the run.
        """
        while True:
            successor = Failures()
            successor.is_replaying = True
            try:
                return successor, self._replace(successor, str(cause))
            except BaseException as error:  # of any kind: the thread that waits for the repair raises it
                successor.add(error, consequence=is_consequence(error))
                again = successor.cause()
            if not self._may_repair(again):
                if isinstance(again, WorkerLost):
                    return successor, again
                failed = WorkerLost(f"{cause}\nNo new workers could take over: {again}")
                failed.__cause__ = again
                return successor, failed
            cause = again
            self._kill()

    def _may_repair(self, cause: BaseException) -> bool:
        """Count a failure if it is the loss of a worker; return whether the workers must be replaced."""
        is_loss = isinstance(cause, WorkerLost) and not self._has_ended.done()
        self._num_lost += is_loss
        return is_loss and self._num_lost <= self._max_restarts
