"""A host: it holds an object for other processes and runs the object's commands one at a time, on one thread.

RPC threads      submit(calls, number) ──▶ queue ──┐          progress() ──▶ what the object does now
compute thread                                     └──▶ object.command(...) ──▶ future of submit
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch.distributed import rpc
from torch.futures import Future

from strategies.commands.declaration import Call, Declaration, declarations_of
from strategies.commands.failure import Failure
from strategies.common.activity import Activity, Progress


class Hosted(Protocol):
    """What a host needs of its object besides the commands."""

    def describe(self) -> str:
        """Return the object in words, for error messages."""

    def announce_failure(self) -> None:
        """Tell every process that may wait for this object that a command has failed."""


T = TypeVar("T", bound=Hosted)


class _Job(NamedTuple):
    number: int | None
    calls: Sequence[Call]
    futures: Sequence[Future[Any]]


class Host(Generic[T]):
    """Holds an object and runs its commands on a thread of its own.

    The handlers of RPC only queue commands. Computing on their pool of threads, each of which has a malloc arena of its
    own, made a training step 1.4 times as long.

    The compute thread ends after the commands submitted before :meth:`close`, or when nothing refers to the host.

    Args:
        create: Creates the object. The compute thread calls it ahead of the first command, which reports an exception.
        commands: The ``Protocol`` that declares the commands of the object.
        name: The object in words until it exists.
        activity: Where the object records what it does.
        num_callers: The number of processes that call collective commands.
    """

    def __init__(
        self, create: Callable[[], T], commands: type, *, name: str, activity: Activity, num_callers: int = 1
    ) -> None:
        self._declarations, self._activity, self._num_callers = declarations_of(commands), activity, num_callers
        self._collected: dict[str, tuple[list[Call], list[Future[Any]]]] = {}
        self._lock = threading.Lock()
        self._compute = _Compute(create, commands, name, activity)
        self._end = weakref.finalize(self, self._compute.queue.put, None)

    def start(self) -> "Host[T]":
        """Start the compute thread; returns the host."""
        threading.Thread(target=self._compute.run, name="compute", daemon=True).start()
        return self

    def submit(self, calls: Sequence[Call], number: int | None = None) -> Future[Any]:
        """Queue calls of commands. Only the last one may be collective.

        Args:
            calls: They run one after another, without others in between.
            number: Place among the submissions of the only caller, since RPC may deliver them in another order;
                without it they run in the order of arrival.

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

    @property
    def hosted(self) -> T:
        """The object, for what needs no order among the commands."""
        assert self._compute.hosted is not None
        return self._compute.hosted

    def progress(self) -> Progress:
        """Return what the object does now."""
        return self._activity.progress()

    def close(self) -> None:
        """End the compute thread after the commands submitted so far."""
        self._end()


class _Compute(Generic[T]):
    """The state of the compute thread, which keeps no reference to the host."""

    def __init__(self, create: Callable[[], T], commands: type, name: str, activity: Activity) -> None:
        self._create, self._name, self._activity = create, name, activity
        self._declarations = declarations_of(commands)
        self.queue: SimpleQueue[_Job | None] = SimpleQueue()
        self.hosted: T | None = None
        self._early: dict[int, _Job] = {}
        """Jobs that have arrived ahead of earlier ones, by number."""
        self._next_number = 0

    def run(self) -> None:
        self._activity.begin()
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Wait for a job and finish those whose turn it is; returns whether there may be more.

        A method of its own, so that no local variable keeps the arguments and results of a job during the next wait.
        """
        job: _Job | None = self._activity.idle(self.queue.get)
        if job is None:
            return False
        if job.number is None:
            self._finish(job)
            return True
        self._early[job.number] = job
        del job
        while self._next_number in self._early:
            self._finish(self._early.pop(self._next_number))
            self._next_number += 1
        return True

    def _finish(self, job: _Job) -> None:
        result = self._result(job.calls)
        try:
            for future in job.futures:
                future.set_result(result)
        finally:  # after the caller has been told the cause, of which the failures of others are consequences
            if isinstance(result, Failure) and self.hosted is not None:
                self.hosted.announce_failure()

    def _result(self, calls: Sequence[Call]) -> Any:
        try:
            if self.hosted is None:
                self.hosted = self._create()
            result = run_calls(self.hosted, calls, self._declarations, self._activity)
        except BaseException as error:  # a layer may even call sys.exit(); the caller must hear of it
            what = self._name if self.hosted is None else self.hosted.describe()
            return Failure.of(error, what, self._activity.doing)
        return result


def run_calls(hosted: Any, calls: Sequence[Call], declarations: Mapping[str, Declaration], activity: Activity) -> Any:
    """Run calls of commands one after another, and return the result of the last one."""
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


def progress(host: Any) -> Progress:
    """Ask the host behind the ``RRef`` what its object does, while a command runs; see :meth:`Host.progress`."""
    answer: Progress = host.local_value().progress()
    return answer


def close(host: Any) -> None:
    """End the compute thread of the host behind the ``RRef``; see :meth:`Host.close`."""
    host.local_value().close()
