"""The driver's calls to stages, and what ends its waits: a reply, a message, or a failure of any process.

RemoteStage          sends commands to a stage ──▶ Answer
                              │ failures
other threads ── add ──▶ Failures ──▶ ends Answer.wait and InterruptibleWait at once, with the cause
"""

import itertools
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, Protocol, TypeVar
from weakref import ref

import torch
from torch import futures
from torch.distributed import rpc

from strategies.commands.declaration import Call, declarations_of
from strategies.commands.failure import Failure
from strategies.commands.host import AfterFailure, follow, perform
from strategies.common.errors import PeerFailed, WorkerLost, is_consequence
from strategies.pipeline.control.commands import NamedParameters, StageCommands, meets_replicas
from strategies.pipeline.control.lost_workers import StageProcess, cause_of, loss_of
from strategies.pipeline.transport.link import Sender, unprofiled

P = ParamSpec("P")
R = TypeVar("R")
StageCommand = Callable[Concatenate[StageCommands, P], R]
"""A method of :class:`StageCommands`, such as ``StageCommands.run``."""

_DECLARATIONS = declarations_of(StageCommands)

_MESSAGE_BYTES = 512
"""Orders are padded to a multiple of this size, so that they have few different layouts."""

_MOST_UNDER_WAY = 32
"""How many orders may be under way to a stage after a wait, which begins when 64 are."""

_END_SECONDS = 1.0
"""The time to wait until a stage has seen the end of its orders."""

_DIAGNOSIS_SECONDS = 2.0
"""The time to wait for the cause of a failure that is only the consequence of another failure."""


class Failures:
    """Collects the failures of all processes of a session, from whichever thread detects them.

    A failure is a *consequence* if it results from the failure of another process, such as a closed connection.

    If lost workers are replaced, a new session with a new object of this class follows. The object of an earlier
    session then reports and raises the failures of the present session.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: list[tuple[BaseException, bool]] = []
        self.first: Future[None] = Future()
        """Done as soon as there is a failure."""
        self._cause: Future[None] = Future()
        self._raised = False
        self._interruption: BaseException | None = None
        """The error with which user code has ended during a repair."""
        self.is_replaying = False
        """Whether new workers repeat the log in this session, which becomes the present one after that."""
        self.repair: Future[Failures | None] | None = None
        """Gets the failures of the next session when the lost workers have been replaced, or ``None`` when the failures
        are raised.

        If the attribute is ``None``, nothing replaces workers, and all failures are raised.
        """
        self._successor: Failures | None = None

    @property
    def current(self) -> "Failures":
        """The failures of the present session."""
        found = self
        while found._successor is not None:
            found = found._successor
        return found

    @property
    def raised(self) -> bool:
        """Whether a failure has been raised to the user."""
        return self.current._raised

    def give_way_to(self, successor: "Failures") -> None:
        """End the session of these failures, which have been repaired.

        If an error has been raised to the user meanwhile, the next session knows this error.
        """
        assert self.repair is not None
        with self._lock:
            self._successor = successor
        for error, _ in self._found:
            _drop_frames(error)
        if self._interruption is not None:
            successor.add(self._interruption, consequence=False)
            successor._raised = True
        self.repair.set_result(successor)

    def settle(self) -> None:
        """Wait until all failures have been repaired; return at once if there is no failure.

        Raises:
            Exception: The cause of the failures, if they are not repaired.
        """
        while (current := self.current).any:
            if current.repair is None or current._raised or current.repair.result() is None:
                current.raise_cause()

    def add(self, error: BaseException, *, consequence: bool) -> None:
        """Note a failure, unless the session is over."""
        with self._lock:
            if self._successor is not None:
                _drop_frames(error)
                return
            is_first = not self._found
            is_first_cause = not consequence and all(consequence for _, consequence in self._found)
            self._found.append((error, consequence))
        # Outside the lock: the callbacks of futures run here, where they end waits for devices and may block.
        if is_first_cause:
            self._cause.set_result(None)
        if is_first:
            self.first.set_result(None)

    def _add_raised(self, error: BaseException) -> bool:
        """Note an error of the user's code, which ends with it; return ``False`` if the session is over."""
        with self._lock:
            if self._successor is not None:
                return False
            is_under_repair = bool(self._found) and self.repair is not None and not self.repair.done()
            if is_under_repair:  # the user's code ends with this error, not with the loss
                self._interruption, self._raised = error, True
        if not is_under_repair:
            self.add(error, consequence=is_consequence(error))
        return self._successor is None

    def put_first(self, error: BaseException) -> None:
        """Note an error that is raised in place of the failures so far."""
        with self._lock:
            self._found.insert(0, (error, False))
            self._interruption = None

    @property
    def is_interrupted(self) -> bool:
        """Whether user code has ended with an error of its own during a repair, which goes on."""
        return self._interruption is not None

    @property
    def will_be_repaired(self) -> bool:
        """Whether new workers repeat the commands, so that an answer after a failure does not count."""
        return self.is_replaying or (self.repair is not None and not self.repair.done())

    @property
    def any(self) -> bool:
        """Whether there is a failure."""
        return bool(self.current._found)

    def result_of(self, future: "Future[R]") -> R:
        """Wait for a future, and return its result.

        Raises:
            Exception: The cause of the failures, if a failure occurs during the wait.
        """
        wait_for_any(future, self.first)
        if self.any:
            self.raise_cause()
        return future.result()

    def raise_untold(self) -> None:
        """Raise the cause of the failures, if there are failures and none has been raised."""
        if self.any and not self.raised:
            self.raise_cause()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Context that raises the cause of an exception in its body, which may be a failure of another process."""
        try:
            yield
        except BaseException as error:  # Ctrl-C as well
            while not self.current._add_raised(error):
                pass  # workers have been replaced at this moment
            self.raise_cause()

    def raise_cause(self) -> NoReturn:
        """Raise :meth:`cause`.

        Raises:
            RuntimeError: Instead of ``StopIteration``, at which Lightning's loop would end the epoch without an error.
        """
        current = self.current
        current._raised = True
        cause = current.cause()
        if isinstance(cause, StopIteration):
            raise _not_ending_loops(cause) from cause
        raise cause

    def cause(self) -> BaseException:
        """Return the error with which user code has ended during a repair, or else :meth:`first_cause`."""
        return self.first_cause() if self._interruption is None else self._interruption

    def first_cause(self) -> BaseException:
        """Return the first failure that is not a consequence; if none occurs within 2 s, the first consequence.

        An error of gloo becomes a :class:`WorkerLost` if a connection was lost although no process has failed.
        """
        wait([self._cause], _DIAGNOSIS_SECONDS)
        with self._lock:
            causes = [error for error, consequence in self._found if not consequence]
            # The error of a stage that did not answer names the stage; an error of its neighbour, or of a connection to
            # it, does not. On a busy machine, the exit status of a killed worker comes too late to be a cause.
            consequences = sorted(
                (error for error, _ in self._found),
                key=lambda e: (not isinstance(e, WorkerLost), isinstance(e, PeerFailed)),
            )
            first = (causes or consequences)[0]
        if not causes and "gloo/transport" in str(first):
            lost = WorkerLost(
                f"the data plane between the stages has failed, although every stage's process still runs: {first}"
            )
            lost.__cause__ = first
            return lost
        return first


def _drop_frames(error: BaseException) -> None:
    """Drop what a failure that has been repaired refers to: frames, and errors with frames.

    A frame refers to its caller. The callers belong to user code that goes on, and their variables, such as outputs of
    the model, would live as long as the failure.
    """
    error.__traceback__ = error.__cause__ = error.__context__ = None


def _not_ending_loops(error: StopIteration) -> RuntimeError:
    return RuntimeError(f"a layer or the loss raised {error!r}, an exception that ends iterations")


_HAS_ENDED = "the pipeline has ended, so its stages send no more messages"

_Ended = tuple[Callable[[], Any] | None, BaseException | None]
"""A wait that has ended, with its error; without both, a failure has occurred."""


def _wake(ended: "ref[SimpleQueue[_Ended]]", _: Any) -> None:
    """End a wait after a failure.

    The reference is weak, because failures live as long as the run, and a wait as long as its session.
    """
    if (known := ended()) is not None:
        known.put((None, None))


class InterruptibleWait:
    """Runs waits for messages on a separate thread, so that Ctrl-C or a failure of any process ends them at once.

    A wait inside gloo blocks its thread in C++, where Python runs no signal handlers.

    Args:
        failures: The failures that end a wait.
        outlives_session: Whether the messages come from processes that stay when workers are replaced, such as the
            drivers of other pipelines. The loss of a worker that is replaced then does not end the wait.
    """

    def __init__(self, failures: Failures, *, outlives_session: bool = False) -> None:
        self._failures, self._outlives_session = failures, outlives_session
        self._waits: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._ended: SimpleQueue[_Ended] = SimpleQueue()
        self._has_ended = False
        failures.first.add_done_callback(partial(_wake, ref(self._ended)))
        threading.Thread(target=self._work, name="relay-wait", daemon=True).start()

    def __call__(self, wait_for_message: Callable[[], Any]) -> None:
        """Call a function that waits for a message.

        Raises:
            Exception: The exception of the function, or the cause of the failures if there are any.
            PeerFailed: Instead of the cause, if lost workers may be replaced.
            RuntimeError: If the pipeline has ended.
        """
        ended = self._ended  # which end() replaces
        if self._has_ended:
            raise RuntimeError(_HAS_ENDED)
        if self._failures.any:
            self._give_up()
        self._waits.put(wait_for_message)
        while True:
            which, error = ended.get()
            if which is None and self._has_ended and not self._failures.any:
                raise RuntimeError(_HAS_ENDED)
            if which is None:
                self._give_up()
            if which is wait_for_message:
                break
        if error is not None:
            raise error

    def end(self) -> None:
        """Let the thread end, once its last wait has returned or the connection has been closed."""
        self._has_ended = True
        self._waits.put(None)
        before, self._ended = self._ended, SimpleQueue()  # drops waits whose end nobody awaits, and their connections
        before.put((None, None))

    def _give_up(self) -> None:
        if self._outlives_session:
            self._failures.settle()
            if self._failures.current is not self._failures:
                self._failures = self._failures.current
                self._failures.first.add_done_callback(partial(_wake, ref(self._ended)))
            return
        if self._failures.repair is not None:
            raise PeerFailed("another process has failed, and the wait for a message ends")
        self._failures.raise_cause()

    def _work(self) -> None:
        while (wait_for_message := self._waits.get()) is not None:
            error: BaseException | None = None
            try:
                wait_for_message()
            except BaseException as caught:
                error = caught
            if not self._has_ended:
                self._ended.put((wait_for_message, error))
            wait_for_message = error = None


class NotCopyable:
    """An object with connections to other processes, which a copy of the module that holds the object cannot share."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(
            "a module whose layers live in several processes cannot be copied or pickled as long as they do. Copy or "
            "save its state_dict(), which has the values of all of them, or copy a module that lives in one process."
        )


class _InOrder:
    """Handles the replies of a process in the order of its calls; threads of RPC may bring them in any order.

    So when the result of a call is available, the failures of all earlier calls are known.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived: dict[int, Callable[[], None]] = {}
        self._next = 0
        self._is_handling = False

    def arrived(self, number: int, handle: Callable[[], None]) -> None:
        """Handle the reply to a call, once the replies to all earlier calls have been handled."""
        with self._lock:
            self._arrived[number] = handle
        while True:
            with self._lock:
                if self._is_handling or self._next not in self._arrived:
                    return
                handle = self._arrived.pop(self._next)
                self._is_handling = True
            try:
                handle()
            finally:
                with self._lock:
                    self._next += 1
                    self._is_handling = False


@dataclass
class _Connection:
    """The process of a stage, and what is known of the calls to it.

    Attributes:
        name: The RPC name of the process.
        host: The ``RRef`` to the :class:`~strategies.commands.host.Host` of the stage.
        process: The process.
        failures: Notes the failures of the stage.
        number: The number of the next call.
        replies: The replies to the calls.
        lost: Done if the process has been given up.
        orders: The channel that the stage follows.
        followed: Done when the stage no longer follows it.
        repeated: The last command that the stage repeats although its result has arrived before.
    """

    name: str
    host: Any
    process: StageProcess
    failures: Failures
    number: int = 0
    replies: _InOrder = field(default_factory=_InOrder)
    lost: Future[None] = field(default_factory=Future)
    orders: Sender | None = None
    followed: Future[Any] = field(default_factory=Future)
    repeated: Future[Any] | None = None


class Entry(Protocol):
    """One operation of the driver in a log.

    Attributes:
        size_bytes: The memory that the log needs for the operation.
        is_answered: Whether the driver has the result of the operation, or the operation has no result.
        meets_replicas: Whether a stage may exchange values with the same stage of other replicas in the operation.
    """

    @property
    def size_bytes(self) -> int: ...

    @property
    def meets_replicas(self) -> bool: ...

    @property
    def is_answered(self) -> bool: ...

    def run_again(self) -> None:
        """Repeat the operation in a later session."""


class StageLog(Protocol):
    """Keeps the commands to all stages, to repeat them with new workers; see :mod:`strategies.pipeline.recovery`.

    Attributes:
        failures: The failures of the present session.
        lock: Held while workers are replaced.
    """

    failures: Failures

    @property
    def lock(self) -> AbstractContextManager[Any]: ...

    def perform(self, entry: Entry, run: Callable[[], object]) -> None: ...

    def overcome(self, failures: Failures, error: Exception) -> None: ...


class _SentCalls:
    """Calls without results."""

    is_answered = True

    def __init__(self, stage: "RemoteStage", calls: list[Call]) -> None:
        self._stage, self._message = stage, pickle.dumps(calls)
        self.size_bytes = len(self._message)
        self.meets_replicas = any(map(meets_replicas, calls))

    def run(self) -> None:
        self._stage.transmit(self._message)

    run_again = run


class Answer(Generic[R]):
    """The result of a command, which may be under way.

    Args:
        stage: The stage that runs the command.
        calls: The command, and before it commands without results that are sent with it.
        is_logged: Whether a log may repeat the command.
    """

    def __init__(self, stage: "RemoteStage", calls: list[Call], *, is_logged: bool) -> None:
        self._stage, self._calls = stage, calls
        self._copy = pickle.dumps(calls) if is_logged else b""
        self.size_bytes = len(self._copy)
        self.meets_replicas = any(map(meets_replicas, calls))
        self._result: Future[R] = Future()

    @property
    def is_answered(self) -> bool:
        """Whether the result has arrived."""
        return self._result.done() and self._result.exception() is None

    def run(self) -> None:
        """Send the command."""
        calls, self._calls = self._calls, []
        self._stage.call(calls, self._result)

    def run_again(self) -> None:
        """Send the command to a new process, as far as the result or the state of the stage needs it."""
        calls = pickle.loads(self._copy)
        writes_snapshot = calls[-1][0] == StageCommands.snapshot.__name__
        if not self.is_answered or writes_snapshot:  # a snapshot cannot be used until it has been written again
            self._result = Future()
            self._stage.call(calls, self._result)
        elif not _DECLARATIONS[calls[-1][0]].only_reads:
            self._stage.repeat(calls)
        elif len(calls) > 1:
            self._stage.transmit(pickle.dumps(calls[:-1]))

    def wait(self) -> R:
        """Wait for the result.

        Raises:
            Exception: The first failure of any stage, with its original type. Once this failure has been raised, only a
                failure of this command is raised, so that values that a broken pipeline still holds can be fetched.
        """
        while True:
            failures, result = self._stage.present_failures, self._result
            if failures.raised:
                return self.rescue()
            wait_for_any(result, failures.first)
            failures.settle()
            if failures.current is failures:
                return self.rescue()

    def rescue(self) -> R:
        """Wait for the result, even if another stage has failed.

        Raises:
            WorkerLost: If this stage has been given up.
        """
        while True:
            failures, result = self._stage.present_failures, self._result
            if failures.repair is not None:
                wait_for_any(result, failures.first)
                if not self.is_answered:
                    if failures.repair.result() is not None:
                        continue
                    calls = pickle.loads(self._copy)[-1:]
                    if calls[0][0] == StageCommands.capture.__name__ and result.done() and result.exception():
                        # The reply came before the decision not to repair, so it did not count.
                        self._result = result = Future()
                        self._stage.call(calls, result)
            return self._stage.result_or_loss(result)


class Reply(Generic[R]):
    """The result of a function that runs at the same time as commands of a stage.

    Args:
        stage: The stage.
        function: The function.
        args: Its arguments after the ``RRef`` to the host of the stage.
        is_logged: Whether the function leaves a value on the stage that later commands use.
    """

    size_bytes = 0
    meets_replicas = False
    is_answered = True  # the commands that use the value are sent before the next pass, and so before a snapshot

    def __init__(
        self, stage: "RemoteStage", function: Callable[..., R], args: Sequence[Any], *, is_logged: bool = False
    ) -> None:
        self._stage, self._function, self._args, self._is_logged = stage, function, args, is_logged

    def run(self) -> None:
        """Call the function, after a new process has reached the state that the function may depend on."""
        self._reply: Any = None
        with self._stage.undisturbed():
            self._failures, self._process = self._stage.present_failures, self._stage.process
            if self._stage.has_repeated():
                self._reply = self._stage.begin_beside(self._function, *self._args)

    def run_again(self) -> None:
        """Call the function again, after the commands before it and before the commands that use its value."""
        self._stage.result_or_loss(self._stage.ask_unlogged(StageCommands.num_kept))
        self._process = self._stage.process
        self._reply = self._stage.begin_beside(self._function, *self._args)
        self._reply.wait()

    def wait(self) -> R:
        """Wait for the result.

        Raises:
            WorkerLost: If the process of the stage has ended.
            Exception: The exception of the function, which does not count as a failure of the stage.
        """
        while True:
            failures, reply, process = self._failures, self._reply, self._process
            if reply is None:  # the new process has failed before the function could be called
                assert failures.repair is not None
                if failures.repair.result() is None:
                    raise failures.cause()
            else:
                try:
                    result: R = reply.wait()
                    return result
                except Exception as error:
                    # Ask the process that was called: a new process may have taken over the stage since.
                    cause = cause_of(error, self._stage.description, process)
                    if cause is error or failures.repair is None:
                        raise cause from (None if cause is error else error)
                    failures.add(cause, consequence=False)
                    if failures.repair.result() is None:
                        raise cause from error
            if self._is_logged:
                self._failures = self._stage.present_failures
            else:
                self.run()


class RemoteStage(NotCopyable):
    """Sends commands to a stage on a worker.

    A command is a method of :class:`~strategies.pipeline.control.commands.StageCommands`, followed by its arguments:

        remote.send(StageCommands.run, this, row)            a command without a result
        remote.ask(StageCommands.grad_norms, 0, 2.0).wait()  a command with a result
        remote.beside(progress)                              out of band: a function on a thread of RPC

    :meth:`send` sends each command over the link of the stage in one message. Commands that can wait go with the next
    command. RPC brings results and failures. The order of commands is that of the link:

        driver  ── send ─▶ link: calls                 ──▶ stage
                ── ask ──▶ RPC: calls, link: a number  ──▶ stage ── RPC: the result ──▶ driver
                           RPC: follow                 ──▶ stage ── RPC: how calls on the link failed, or the end ──▶

    No call has a time limit, because the time that a stage computes depends on the model.
    :class:`~strategies.pipeline.control.hanging_stages.Watch` finds a stage that hangs.

    Args:
        name: The RPC name of the worker.
        host: The ``RRef`` to the :class:`~strategies.commands.host.Host` of the stage.
        description: The stage in words.
        process: The process of the stage.
        failures: Notes the failures of the stage.
    """

    def __init__(self, name: str, host: Any, description: str, process: StageProcess, failures: Failures) -> None:
        self._connection = _Connection(name, host, process, failures)
        self.description = description
        self._queued: deque[Call] = deque()  # the garbage collector may append from any thread
        self._log: StageLog | None = None
        self._numbers = itertools.count()
        self.version = 0
        """Changes whenever the stage may have changed a parameter, a buffer or a gradient."""
        self.in_pass = False
        """Whether micro-batches pass through the pipeline, so that the stage may wait for the driver."""
        self.has_closed = False
        """Whether the pipeline has ended."""
        self.is_gathered = True
        """Whether the driver has the values of the stage when the pipeline has ended."""
        self.on_use: Callable[[str, bool], None] = _nothing
        """Called when an operation on the driver combines a tensor of the stage with another tensor.

        The arguments are a description of the stage's tensor, and whether it cannot be read now.
        """

    def close(self) -> None:
        """Refuse reading from now on, because the pipeline has ended.

        Stand-ins of tensors may outlive the pipeline, and they refer to this client. So the client drops its references
        to the data plane, whose port would stay open, and to the log, which has copies of values. It also drops its
        reference to the failures, because their tracebacks refer to stand-ins: Python's garbage collector does not free
        a cycle that contains a tensor to which autograd refers.
        """
        self.has_closed, self.failures = True, Failures()
        self._connection.orders = self._log = None
        self.on_use = _nothing

    @property
    def process(self) -> StageProcess:
        """The present process of the stage."""
        return self._connection.process

    @property
    def failures(self) -> Failures:
        """Notes the failures of the stage."""
        return self._connection.failures

    @failures.setter
    def failures(self, failures: Failures) -> None:
        self._connection.failures = failures

    def renew(self, name: str, host: Any, process: StageProcess, failures: Failures) -> None:
        """Send commands to a new process from now on, which has taken over the stage from the previous process.

        Args:
            name: The RPC name of the new process.
            host: The ``RRef`` to its host.
            process: The new process.
            failures: Notes the failures of the stage from now on.
        """
        self._connection = _Connection(name, host, process, failures)

    def keep_log(self, log: StageLog) -> None:
        """Keep the commands to the stage in a log from now on."""
        self._log = log

    @property
    def present_failures(self) -> Failures:
        """The failures of the session in which operations run: the earlier session while workers are replaced."""
        return self.failures if self._log is None else self._log.failures

    def undisturbed(self) -> AbstractContextManager[Any]:
        """Return a context in which no process takes over the stage."""
        return nullcontext() if self._log is None else self._log.lock

    def new_number(self) -> int:
        """Return a number for a result or a part of the state that the stage keeps until :meth:`StageCommands.free`."""
        return next(self._numbers)

    @property
    def has_ended(self) -> bool:
        """Whether the process of the stage has ended, and the values of its layers are lost."""
        return self.process.ended() is not None

    @property
    def is_lost(self) -> bool:
        """Whether :meth:`give_up` has been called."""
        return self._connection.lost.done()

    def give_up(self, why: str) -> None:
        """Kill the process of the stage, and note that as a failure."""
        error = WorkerLost(f"{self.description}, {self.process.description}, {why}")
        self.failures.add(error, consequence=self.failures.raised)
        self._connection.lost.set_result(None)
        self.process.kill()

    def connect(self, orders: Sender) -> None:
        """Make the stage follow the orders of a channel from now on."""
        now = self._connection
        now.orders = orders
        settle = partial(self._settle, done=now.followed, connection=now)
        self.begin_beside(follow).add_done_callback(settle)

    def disconnect(self) -> None:
        """Make the stage stop following its link, if it still does."""
        now = self._connection
        if now.orders is not None and not now.followed.done() and not now.failures.any:
            self.transmit(pickle.dumps(None))
            wait([now.followed], _END_SECONDS)
        now.orders = None

    def send(self, command: StageCommand[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Send a command that has no result. Failures are noted as soon as they are known."""
        declared = _DECLARATIONS[command.__name__]
        call: Call = (command.__name__, args, kwargs)
        self.version += declared.changes_values
        if declared.can_wait:
            self._queued.append(call)
            return
        calls: list[Call] = [*self._taken_from_queue(), call]
        if self._log is not None:
            order = _SentCalls(self, calls)
            self._log.perform(order, order.run)
        elif self._connection.orders is None:
            self.call(calls, Future())
        else:
            self.transmit(pickle.dumps(calls))

    def send_zero_grad(self, name: str, set_to_none: bool, module: int = 0) -> None:
        """Send :meth:`StageCommands.zero_grad` for a parameter; consecutive calls become one command."""
        match self._queued[-1] if self._queued else None:
            case "zero_grad", (NamedParameters(names, of), to_none), _ if (of, to_none) == (module, set_to_none):
                self.version += 1
                names.append(name)
            case _:
                self.send(StageCommands.zero_grad, NamedParameters([name], module), set_to_none)

    def ask(self, command: StageCommand[P, R], *args: P.args, **kwargs: P.kwargs) -> Answer[R]:
        """Send a command that has a result, without waiting for it."""
        self.version += _DECLARATIONS[command.__name__].changes_values
        calls: list[Call] = [*self._taken_from_queue(), (command.__name__, args, kwargs)]
        answer = Answer[R](self, calls, is_logged=self._log is not None)
        if self._log is None:
            answer.run()
        else:
            self._log.perform(answer, answer.run)
        return answer

    def ask_unlogged(self, command: StageCommand[P, R], *args: P.args, **kwargs: P.kwargs) -> "Future[R]":
        """Send a command that no log keeps, and that no new worker repeats.

        Queued commands, which wait for the next command, stay queued.

        Returns:
            A future that gets the result, or a failure of this stage.
        """
        result = Future[R]()
        self.call([(command.__name__, args, kwargs)], result)
        return result

    def transmit(self, message: bytes) -> None:
        """Send a pickled order over the link, if the stage still follows the link."""
        orders = self._connection.orders
        if orders is None or self._connection.followed.done():
            return
        padded = message.ljust(-(-len(message) // _MESSAGE_BYTES) * _MESSAGE_BYTES, b"\0")
        with suppress(RuntimeError):  # the process of the stage has ended; the reply to ``follow`` reports this
            orders.send(torch.frombuffer(bytearray(padded), dtype=torch.uint8), 0, 0, keep=_MOST_UNDER_WAY)

    def _taken_from_queue(self) -> list[Call]:
        return [self._queued.popleft() for _ in range(len(self._queued))]

    def call(self, calls: Sequence[Call], done: "Future[Any]") -> None:
        """Send commands by RPC.

        Args:
            calls: The commands.
            done: Gets the result of the last command.
        """
        now = self._connection  # another process may have taken over the stage when the reply arrives
        # A Pipe notes the failures of each pass separately. A failure of any other command counts whenever it is known.
        of_pass = now.failures if calls[-1][0] == StageCommands.run.__name__ else None
        number = now.number
        reply = self.begin_beside(perform, calls, number)
        now.number += 1
        settle = partial(self._settle, done=done, connection=now, of_pass=of_pass)
        reply.add_done_callback(lambda reply: now.replies.arrived(number, partial(settle, reply)))
        self.transmit(pickle.dumps(number))  # last: after an interrupt, the next call sends it

    def repeat(self, calls: Sequence[Call]) -> None:
        """Send commands again, of which the last has a result that has arrived before."""
        repeated = Future[Any]()
        self.call(calls, repeated)
        self._connection.repeated = repeated

    def has_repeated(self) -> bool:
        """Wait until the stage has repeated the commands of :meth:`repeat`; return ``False`` if it has failed."""
        repeated = self._connection.repeated
        if repeated is None:
            return True
        wait_for_any(repeated, self._connection.lost)
        return repeated.done() and repeated.exception() is None

    def beside(self, function: Callable[..., R], *args: Any, is_logged: bool = False) -> Reply[R]:
        """Call ``function(host, ...)`` in the process of the stage, on a thread of RPC, while commands run.

        Args:
            function: A function whose first argument is the ``RRef`` to the host. If the worker is lost and replaced,
                the function is called again.
            args: The remaining arguments of the function.
            is_logged: Whether the function leaves a value on the stage that later commands use.
        """
        reply = Reply(self, function, args, is_logged=is_logged)
        if self._log is None or not is_logged:
            reply.run()
        else:
            self._log.perform(reply, reply.run)
        return reply

    def begin_beside(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(host, ...)`` in the present process of the stage; return a future of torch."""
        now = self._connection
        try:
            return unprofiled(rpc.rpc_async, now.name, function, args=(now.host, *args), timeout=0)
        except RuntimeError as error:
            if cause_of(error, self.description, now.process) is error:
                raise  # else RPC knows already that the process has ended
            failed: Any = futures.Future()
            failed.set_exception(error)
            return failed

    def readable(self) -> "RemoteStage":
        """Return the stage if user code, which may ask at any time, can read its values now.

        Raises:
            RuntimeError: If the stage cannot answer now.
        """
        self.check_gathered()
        if self.has_closed:
            raise RuntimeError(
                f"the pipeline has ended, and {self.description} with it: read parameters, buffers and gradients from "
                "the model, not from what was taken of it while the pipeline ran"
            )
        if self.in_pass:
            raise RuntimeError(
                f"values of {self.description} cannot be read while micro-batches go through the pipeline (under "
                "schedule='1f1b' that is all of training_step): read them before or after that, for example in "
                "on_train_batch_start, on_before_optimizer_step or on_train_batch_end. If the loss is computed with a "
                "layer's weight (a tied head), register the weight outside of the pipelined module as well, in "
                "__init__: self.tied = self.sequential_module[0].weight; this process then holds it"
            )
        return self

    def check_gathered(self) -> None:
        """Check that the values of the stage can still be read, or have been returned to the driver.

        Raises:
            RuntimeError: If the values were not returned when the pipeline ended.
        """
        if self.has_closed and not self.is_gathered:
            raise RuntimeError(
                f"the values of {self.description} were not brought back when the run ended, because gather_on_end is "
                "False or the model was built without memory (in configure_model). Load a checkpoint that was saved "
                "during the run (load_from_checkpoint, load_state_dict, or ckpt_path of the next run), or pass "
                "RPCSequentialStrategy(gather_on_end=True) if the model fits into this process"
            )

    def result_or_loss(self, result: "Future[R]") -> R:
        """Wait for the result of a command; see :meth:`Answer.rescue`."""
        wait_for_any(result, self._connection.lost)
        if self.is_lost and not result.done():
            raise WorkerLost(f"{self.description}, {self.process.description}, was declared lost")
        return result.result()

    def _settle(
        self, reply: Any, *, done: "Future[Any]", connection: _Connection, of_pass: Failures | None = None
    ) -> None:
        """Handle the reply to a call; runs on a thread of RPC."""
        failures = of_pass or connection.failures
        try:
            value = reply.value()
        except Exception as error:
            if connection.orders is None and done is connection.followed:
                return  # the pipeline has ended, and the stage with it
            lost, has_ended = loss_of(error, self.description, connection.process)
            killed_by_us = connection.lost.done() or (not has_ended and is_consequence(error))
            failures.add(lost, consequence=killed_by_us)
            done.set_exception(lost)
            return
        if isinstance(value, AfterFailure):
            failed = _add(value.failure, failures)
            if failures.will_be_repaired:
                done.set_exception(failed)  # the reply lacks the effect of an earlier command, which has failed
                return
            value = value.reply
        if isinstance(value, Failure):
            done.set_exception(_add(value, failures))
        else:
            done.set_result(value)


def _add(failure: Failure, failures: Failures) -> BaseException:
    """Note the failure of a command, and return its exception."""
    failed = failure.exception()
    if isinstance(failed, StopIteration):
        failed, failed.__cause__ = _not_ending_loops(failed), failed
    failures.add(failed, consequence=failure.consequence)
    return failed


def _nothing(_: str, in_pass: bool) -> None:
    pass


def wait_for_any(*futures: Future[Any]) -> None:
    """Return when one of the futures is done."""
    wait(futures, return_when=FIRST_COMPLETED)


@contextmanager
def leading(failures: Failures, remotes: Iterable[RemoteStage], fail: Callable[[], None]) -> Iterator[None]:
    """Context in which micro-batches pass through stages: user code cannot read values, and errors get their cause.

    May be nested.

    Args:
        failures: Failures of the stages. A failure that is known before the body runs is raised instead of running it.
        remotes: The stages on workers.
        fail: Called if the body raises, including on Ctrl-C, so that no stage waits for this process.

    Raises:
        Exception: The first failure of any process that is not a consequence of another failure.
    """
    failures.settle()
    outermost = [remote for remote in remotes if not remote.in_pass]
    for remote in outermost:
        remote.in_pass = True
    try:
        with failures.explained():
            try:
                yield
            except BaseException:
                fail()
                raise
    finally:
        for remote in outermost:
            remote.in_pass = False
