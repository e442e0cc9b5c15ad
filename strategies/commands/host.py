"""A host holds an object for other processes and runs the object's commands one at a time, on one thread.

RPC threads      submit(calls, number) ──▶ queue ──┐          progress() ──▶ what the object does now
compute thread                                     └──▶ object.command(...) ──▶ future of submit

If there is only one caller, it may also send orders over a link to the object (:meth:`Host.follow`). The compute thread
then waits for the next order: calls without results, or the number of the submission to run next.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch.distributed import rpc
from torch.futures import Future

from strategies.commands.declaration import Call, Declaration, declarations_of
from strategies.commands.failure import Failure
from strategies.common.activity import Activity, Progress


class Hosted(Protocol):
    """The methods that a host calls on its object besides the commands."""

    def describe(self) -> str:
        """Return a description of the object for error messages."""

    def announce_failure(self) -> None:
        """Tell every process that may wait for this object that a command has failed."""


T = TypeVar("T", bound=Hosted)

Order = Sequence[Call] | int | None
"""What the only caller sends over the link: calls without results; the number of a submission, which runs now, after
all submissions with smaller numbers; or the end of the orders."""


@dataclass(frozen=True)
class AfterFailure:
    """The reply to a submission that ran after the calls of an order had failed.

    Attributes:
        failure: The failure of the calls.
        reply: The result of the submission, or its failure.
    """

    failure: Failure
    reply: Any


class _Job(NamedTuple):
    number: int | None
    calls: Sequence[Call]
    futures: Sequence[Future[Any]]


class _Follow(NamedTuple):
    ended: Future[Any]


class Host(Generic[T]):
    """Holds an object and runs its commands on a dedicated thread.

    RPC handlers only queue commands. They run on a pool of threads, each with a separate malloc arena; computing there
    made a training step 1.4 times as long.

    The compute thread ends after the commands submitted before :meth:`close`, or when nothing refers to the host.

    Args:
        create: Creates the object. The compute thread calls it before the first command. If it raises, the first
            command reports the exception.
        commands: The ``Protocol`` that declares the commands of the object.
        name: A description of the object, used until the object exists.
        activity: Notes of what the object does.
        num_callers: The number of processes that call collective commands.
        next_order: Waits for the next order on the link of the object, for :meth:`follow`.
    """

    def __init__(
        self,
        create: Callable[[], T],
        commands: type,
        *,
        name: str,
        activity: Activity,
        num_callers: int = 1,
        next_order: Callable[[T], Order] | None = None,
    ) -> None:
        self._declarations, self._activity, self._num_callers = declarations_of(commands), activity, num_callers
        self._collected: dict[str, tuple[list[Call], list[Future[Any]]]] = {}
        self._lock = threading.Lock()
        self._compute = _Compute(create, commands, name, activity, next_order)
        self._end = weakref.finalize(self, self._compute.queue.put, None)

    def start(self) -> "Host[T]":
        """Start the compute thread; returns the host."""
        threading.Thread(target=self._compute.run, name="compute", daemon=True).start()
        return self

    def submit(self, calls: Sequence[Call], number: int | None = None) -> Future[Any]:
        """Queue calls of commands. Only the last one may be collective.

        Args:
            calls: The calls. They run one after another; no other call runs in between.
            number: The place of these calls among all submissions of the only caller, since RPC may deliver them out
                of order. Without a number, calls run in the order of arrival.

        Returns:
            The result of the last call, or a :class:`~strategies.commands.failure.Failure`.
        """
        future: Future[Any] = Future()
        futures = [future]
        *others, last = calls
        if self._num_callers > 1 and self._declarations[last[0]].collective:
            with self._lock:
                earlier, futures = self._collected.setdefault(last[0], ([], []))
                earlier += others
                futures.append(future)
                if len(futures) < self._num_callers:
                    return future
                del self._collected[last[0]]
            calls = [*earlier, last]
        self._compute.queue.put(_Job(number, calls, futures))
        return future

    def follow(self) -> Future[Any]:
        """Follow the orders on the link of the object, after the submissions so far have run.

        Returns:
            A future that is done when the orders end, or when the calls of an order fail. In that case its result is
            the :class:`~strategies.commands.failure.Failure`. The host then reads no more orders and runs submissions
            in the order of arrival.
        """
        ended: Future[Any] = Future()
        self._compute.queue.put(_Follow(ended))
        return ended

    @property
    def hosted(self) -> T:
        """Return the object, for uses that need no order relative to the commands."""
        assert self._compute.hosted is not None
        return self._compute.hosted

    def progress(self) -> Progress:
        """Return what the object does now."""
        return self._activity.progress()

    def close(self) -> None:
        """End the compute thread after the commands submitted so far."""
        self._end()


class _Compute(Generic[T]):
    """The state of the compute thread. It has no reference to the host, so that the host can be freed."""

    def __init__(
        self,
        create: Callable[[], T],
        commands: type,
        name: str,
        activity: Activity,
        next_order: Callable[[T], Order] | None,
    ) -> None:
        self._create, self._name, self._activity, self._next_order = create, name, activity, next_order
        self._declarations = declarations_of(commands)
        self.queue: SimpleQueue[_Job | _Follow | None] = SimpleQueue()
        self.hosted: T | None = None
        self._early: dict[int, _Job] = {}
        """Jobs that arrived before jobs with smaller numbers, by number."""
        self._next_number = 0
        self._failed: Failure | None = None
        """The failure of the calls of an order."""

    def run(self) -> None:
        with self._activity.running():
            while self._run_next():
                pass

    # Each step below is a method, so that no local variable keeps arguments and results of a job during the next wait.

    def _run_next(self) -> bool:
        """Wait for a job and finish all jobs whose turn has come. Returns whether more jobs may follow."""
        job = self._activity.idle(self.queue.get)
        if job is None:
            return False
        if isinstance(job, _Follow):
            self._follow(job.ended)
        elif job.number is None:
            self._finish(job)
        else:
            self._early[job.number] = job
            del job
            while self._next_number in self._early:
                self._finish_next()
        return True

    def _follow(self, ended: Future[Any]) -> None:
        while (result := self._outcome(self._follow_next)) is True:
            pass
        if isinstance(result, Failure):
            self._failed = result
        self._tell([ended], result or None)

    def _follow_next(self) -> bool:
        """Wait for an order and execute it. Returns whether more orders may follow."""
        assert self.hosted is not None and self._next_order is not None
        order = self._activity.idle(partial(self._next_order, self.hosted))
        if isinstance(order, int):
            while self._next_number <= order:
                if self._next_number in self._early:
                    self._finish_next()
                elif isinstance(job := self._activity.idle(self.queue.get), _Job) and job.number is not None:
                    self._early[job.number] = job
                    del job
        elif order is not None:
            run_calls(self.hosted, order, self._declarations, self._activity)
        return order is not None

    def _finish_next(self) -> None:
        self._finish(self._early.pop(self._next_number))
        self._next_number += 1

    def _finish(self, job: _Job) -> None:
        result = self._outcome(partial(self._run, job.calls))
        self._tell(job.futures, result if self._failed is None else AfterFailure(self._failed, result))

    def _tell(self, futures: Sequence[Future[Any]], result: Any) -> None:
        try:
            for future in futures:
                future.set_result(result)
        finally:  # first tell the caller the cause; failures of other processes are consequences
            reply = result.reply if isinstance(result, AfterFailure) else result
            if isinstance(reply, Failure) and self.hosted is not None:
                self.hosted.announce_failure()

    def _run(self, calls: Sequence[Call]) -> Any:
        if self.hosted is None:
            self.hosted = self._create()
        return run_calls(self.hosted, calls, self._declarations, self._activity)

    def _outcome(self, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except BaseException as error:  # a layer may even call sys.exit(); the caller must get this error too
            what = self._name if self.hosted is None else self.hosted.describe()
            return Failure.of(error, what, self._activity.doing)


def run_calls(hosted: Any, calls: Sequence[Call], declarations: Mapping[str, Declaration], activity: Activity) -> Any:
    """Run calls of commands one after another, and return the result of the last call."""
    result = None
    for name, args, kwargs in calls:
        if doing := declarations[name].doing:
            activity.doing = doing
        result = getattr(hosted, name)(*args, **kwargs)
    return result


@rpc.functions.async_execution
def perform(host: Any, calls: Sequence[Call], number: int | None = None) -> Future[Any]:
    """Run commands on the host behind the ``RRef``; see :meth:`Host.submit`."""
    future: Future[Any] = host.local_value().submit(calls, number)
    return future


@rpc.functions.async_execution
def follow(host: Any) -> Future[Any]:
    """Make the host behind the ``RRef`` follow orders; see :meth:`Host.follow`."""
    future: Future[Any] = host.local_value().follow()
    return future


def progress(host: Any) -> Progress:
    """Return what the object of the host behind the ``RRef`` does now; see :meth:`Host.progress`."""
    answer: Progress = host.local_value().progress()
    return answer


def close(host: Any) -> None:
    """End the compute thread of the host behind the ``RRef``; see :meth:`Host.close`."""
    host.local_value().close()
