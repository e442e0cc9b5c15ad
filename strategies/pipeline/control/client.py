"""The driver's calls to stages, and what ends its waits: the reply, the message, or a failure of any process.

RemoteStage          sends numbered calls of commands ──▶ results
                              │ what fails
other threads ── add ──▶ Failures ──▶ ends RemoteStage.result and InterruptibleWait at once, with the cause
"""

import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import torch
from torch import futures
from torch.distributed import rpc

from strategies.commands.declaration import Call, declarations_of
from strategies.commands.failure import Failure
from strategies.commands.host import perform, progress
from strategies.common.errors import PeerFailed, WorkerLost, is_consequence
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.transport.channel import Sender, unrecorded

P = ParamSpec("P")
R = TypeVar("R")
StageCommand = Callable[Concatenate[StageCommands, P], R]
"""A method of :class:`StageCommands`, such as ``StageCommands.backward``."""

_CHANGING = frozenset(name for name, declared in declarations_of(StageCommands).items() if declared.changes_values)
"""Names of the commands after which parameters, buffers or gradients of a stage may be others."""

_NUM_BEFORE_CHANNEL = 4
"""The command with this number in a row of commands without a result, and those after it, go over the data plane. A
step that asks stages for the norms of gradients has three in a row: to change between RPC and data plane costs more."""

_MESSAGE_BYTES = 512
"""Commands on the data plane take a multiple of this size."""

_DIAGNOSIS_SECONDS = 2.0
"""How long to wait for the cause of a failure that is only the consequence of another one."""

_NUM_QUESTIONS = 3
"""How often to ask how a process has ended; each takes up to half a second, all of them less than the time above."""

_RPC_TRANSPORT = "originated at tensorpipe/"
"""Part of each error of a connection of RPC."""


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
            is_first = not self._found
            is_first_cause = not consequence and all(consequence for _, consequence in self._found)
            self._found.append((error, consequence))
        # Without the lock: the callbacks of futures run here, end waits for devices, and may block.
        if is_first_cause:
            self._cause.set_result(None)
        if is_first:
            self.first.set_result(None)

    @property
    def any(self) -> bool:
        """Whether there is a failure."""
        return bool(self._found)

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
        """Raise the first failure that is not a consequence; if there is none within 2 s, the first consequence.

        Raises:
            WorkerLost: Instead of an error of gloo, if a connection was lost although no process has failed.
            RuntimeError: Instead of ``StopIteration``, at which Lightning's loop would end the epoch without an error.
        """
        wait([self._cause], _DIAGNOSIS_SECONDS)
        with self._lock:
            self.raised = True
            causes = [error for error, consequence in self._found if not consequence]
            # A stage that did not answer is named in its error; an error of its neighbour, or of a connection with it,
            # does not name it. On a busy machine the exit status of a killed worker comes too late to be a cause.
            consequences = sorted(
                (error for error, _ in self._found),
                key=lambda e: (not isinstance(e, WorkerLost), isinstance(e, PeerFailed)),
            )
            first = (causes or consequences)[0]
        if isinstance(first, StopIteration):
            raise _not_ending_loops(first) from first
        if not causes and "gloo/transport" in str(first):
            raise WorkerLost(
                f"the data plane between the stages has failed, although every stage's process still runs: {first}"
            ) from first
        raise first


def _not_ending_loops(error: StopIteration) -> RuntimeError:
    return RuntimeError(f"a layer or the loss raised {error!r}, an exception that ends iterations")


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


class NotCopyable:
    """An object with connections to other processes, which a copy of the module that holds it could not share."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(
            "a module whose layers live in several processes cannot be copied or pickled as long as they do. Copy or "
            "save its state_dict(), which has the values of all of them, or copy a module that lives in one process."
        )


@dataclass(frozen=True)
class StageProcess:
    """The process of a stage, as the driver reaches it without RPC.

    Attributes:
        description: The process in words.
        ended: Returns how the process ended, or ``None`` while it runs.
        doing: Returns what the process does or did last, in words.
        kill: Ends the process.
    """

    description: str
    ended: Callable[[], str | None]
    doing: Callable[[], str]
    kill: Callable[[], None]


@dataclass(frozen=True)
class _Called:
    """Whom a call was made to.

    Attributes:
        process: The process of the stage then.
        lost: Done if that process has been given up.
        failures: Where its failures are recorded.
        replies: The replies of that process.
    """

    process: StageProcess
    lost: Future[None]
    failures: Failures
    replies: "_InOrder"


class _InOrder:
    """Handles the replies of a process in the order of its calls, though threads of RPC may bring them in another one.

    So whoever has the result of a call knows of the failures of all calls before it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived: dict[int, Callable[[], None]] = {}
        self._next = 0
        self._is_handling = False

    def arrived(self, number: int, handle: Callable[[], None]) -> None:
        """Handle the reply to a call, once those to the calls before it have been handled."""
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


class RemoteStage(NotCopyable):
    """Sends commands to a stage on a worker.

    A command is a method of :class:`~strategies.pipeline.control.commands.StageCommands`, followed by its arguments:

        remote.tell(StageCommands.backward, number)      send it; it has no result
        remote.start(StageCommands.num_kept)             send it, do not wait for the result
        remote.queue(StageCommands.discard, number)      send it with the next call
        remote.call(StageCommands.grads)                 send it and wait for the result
        remote.read(StageCommands.value, "0.weight")     the same for user code; refused while a pass runs
        remote.rescue(StageCommands.attributes)          the same, even if another stage has failed

    Each call is one RPC, whatever the number of commands it carries, and has no time limit: how long a stage computes
    depends on the model. :class:`~strategies.pipeline.control.watch.Watch` finds a stage that hangs. When several
    commands without a result follow one another, the next ones go over the data plane, which costs less:

        driver  ── RPC take_commands ──▶ ── message ──▶ ── message ──▶ ... ── end ──▶ ── RPC of another command ──▶
                ◀── reply, after the end or as soon as a command fails ──

    Args:
        name: The RPC name of the worker.
        host: The ``RRef`` to the :class:`~strategies.commands.host.Host` of the stage.
        description: The stage in words.
        process: The process of the stage.
        failures: Where failures of the stage are recorded.
    """

    def __init__(self, name: str, host: Any, description: str, process: StageProcess, failures: Failures) -> None:
        self._name, self._host, self.description, self.process = name, host, description, process
        self.failures = failures
        self._number, self._replies = 0, _InOrder()
        self._lost: Future[None] = Future()
        self._queued: deque[Call] = deque()  # the garbage collector may append from any thread
        self._end: Callable[[], None] | None = None
        self._channel: Sender | None = None
        self._takes_commands = False
        self._num_told = self._num_taking = 0
        self.version = 0
        """Changes whenever the stage may have changed a parameter, a buffer or a gradient."""
        self.in_pass = False
        """Whether micro-batches go through the pipeline, so that the stage may wait for the driver."""
        self.has_closed = False
        """Whether the pipeline has ended."""
        self.is_gathered = True
        """Whether the driver has the values of the stage when the pipeline has ended."""

    def close(self) -> None:
        """Refuse reading from now on, because the pipeline has ended.

        Stand-ins of tensors may outlive the pipeline and refer to this client, which then must not refer to the data
        plane, whose port would stay open, nor to failures: tracebacks refer to stand-ins in turn, and Python's garbage
        collector does not free a cycle that contains a tensor to which autograd refers.
        """
        self.has_closed, self.failures = True, Failures()
        self._channel = self._end = None

    def renew(self, name: str, host: Any, process: StageProcess, failures: Failures) -> None:
        """Send commands to another process from now on, which has taken over the stage of the one before.

        What has not been sent is dropped.

        Args:
            name: Its RPC name.
            host: The ``RRef`` to its host.
            process: The process.
            failures: Where failures of the stage are recorded from now on.
        """
        self._name, self._host, self.process, self.failures = name, host, process, failures
        self._number, self._replies, self._lost = 0, _InOrder(), Future()
        self._queued.clear()
        self._end = self._channel = None
        self._takes_commands, self._num_told, self._num_taking = False, 0, 0
        self.version += 1
        self.in_pass = False

    @property
    def has_ended(self) -> bool:
        """Whether the process of the stage has ended, and the values of its layers are lost."""
        return self.process.ended() is not None

    @property
    def is_lost(self) -> bool:
        """Whether :meth:`give_up` has been called."""
        return self._lost.done()

    def give_up(self, why: str) -> None:
        """Kill the process of the stage, and record that as a failure."""
        error = WorkerLost(f"{self.description}, {self.process.description}, {why}")
        self.failures.add(error, consequence=self.failures.raised)
        self._lost.set_result(None)
        self.process.kill()

    def doing(self) -> str:
        """Return what the stage does or did last, in words, without asking its process."""
        return self.process.doing()

    @property
    def has_queued(self) -> bool:
        """Whether commands wait for the next call."""
        return bool(self._queued)

    def queue(self, command: StageCommand[P, R], *args: P.args, **kwargs: P.kwargs) -> None:
        """Queue a command, to be run just before that of the next call. Its result is dropped."""
        self.version += command.__name__ in _CHANGING
        self._queued.append((command.__name__, args, kwargs))

    def queue_zero_grad(self, name: str, set_to_none: bool, module: int = 0) -> None:
        """Queue the clearing of a parameter's gradient; consecutive ones become one command."""
        command, arguments, _ = self._queued[-1] if self._queued else ("", (), {})
        if command == StageCommands.zero_grads.__name__ and arguments[1:] == (set_to_none, module):
            self.version += 1
            arguments[0].append(name)
        else:
            self.queue(StageCommands.zero_grads, [name], set_to_none, module)

    def connect(self, channel: Sender) -> None:
        """Use a channel of the data plane for commands without a result."""
        self._channel = channel

    def tell(self, command: StageCommand[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Send a command that has no result, with the queued ones ahead of it.

        Failures are recorded as soon as they are known.
        """
        channel, told = self._channel, self._num_told + 1
        if channel is None or not (self._takes_commands or told == _NUM_BEFORE_CHANNEL):
            self.start(command, *args, **kwargs)
            self._num_told = told
            return
        if not self._takes_commands:
            self._num_taking += 1
            self.start_until(self._end_commands, StageCommands.take_commands, self._num_taking)
            self._takes_commands = True
        self.version += command.__name__ in _CHANGING
        self._send([*self._taken_from_queue(), (command.__name__, args, kwargs)], channel)

    def _send(self, calls: list[Call] | None, channel: Sender) -> None:
        message = pickle.dumps((self._num_taking, calls))
        padded = message.ljust(-(-len(message) // _MESSAGE_BYTES) * _MESSAGE_BYTES, b"\0")  # few different layouts
        with suppress(RuntimeError):  # the process of the stage has ended, which the reply to take_commands reports
            channel.send(torch.frombuffer(bytearray(padded), dtype=torch.uint8), 0, 0)

    def _end_commands(self) -> None:
        if self._takes_commands and self._channel is not None:
            self._send(None, self._channel)
        self._takes_commands = False  # last: where Ctrl-C interrupts this, the next command does it again

    def _taken_from_queue(self) -> list[Call]:
        return [self._queued.popleft() for _ in range(len(self._queued))]

    def start(self, command: StageCommand[P, R], *args: P.args, **kwargs: P.kwargs) -> "Future[R]":
        """Send a command, with the queued ones ahead of it, without waiting for it.

        Failures are recorded as soon as they are known; see :meth:`result`.
        """
        self.version += command.__name__ in _CHANGING
        self._num_told = 0
        if self._end is not None:
            self._end()  # if Ctrl-C interrupts this, the next command does it again
            self._end = None
        done: Future[R] = Future()
        calls = [*self._taken_from_queue(), (command.__name__, args, kwargs)]
        arguments = (self._host, calls, self._number)
        reply: Any
        try:
            reply = unrecorded(rpc.rpc_async, self._name, perform, args=arguments, timeout=0)
        except RuntimeError as error:
            if cause_of(error, self.description, self.process) is error:
                raise  # else RPC knows already that the process has ended
            reply = futures.Future()
            reply.set_exception(error)
        number = self._number
        self._number += 1
        # Those of now: who leads the stages may have others by the time of the reply, and the stage another process.
        called = _Called(self.process, self._lost, self.failures, self._replies)
        reply.add_done_callback(lambda reply: called.replies.arrived(number, lambda: self._settle(reply, done, called)))
        return done

    def start_until(
        self, end: Callable[[], None], command: StageCommand[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Run a command that goes on until ``end`` is called; the next command calls it before it is sent."""
        self.start(command, *args, **kwargs)
        self._end = end

    def beside(
        self, function: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> "futures.Future[R]":
        """Call ``function(host, ...)`` in the process of the stage, on a thread of RPC, while commands run.

        Args:
            function: A function whose first argument is the ``RRef`` to the host.
            args: Its other positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            A future whose ``wait`` returns the result, or raises an exception, which is no failure of the stage.
        """
        arguments = (self._host, *args)
        reply: Any = unrecorded(rpc.rpc_async, self._name, function, args=arguments, kwargs=kwargs, timeout=0)
        return reply

    def cause_of(self, error: Exception) -> Exception:
        """Return why a call of :meth:`beside` failed: the process cannot be reached, or what the function raised."""
        return cause_of(error, self.description, self.process)

    def ask_for_progress(self) -> Any:
        """Ask what the stage does; the answer is a :class:`~strategies.common.activity.Progress`."""
        return self.beside(progress)

    def result(self, started: "Future[R]") -> R:
        """Wait for the result of a command that :meth:`start` has sent.

        Raises:
            Exception: The first failure of any stage, with the type that it had there. After that has been raised, only
                a failure of this command, so that what a broken pipeline still holds can be fetched.
        """
        if not self.failures.raised:
            _wait_for_any(started, self.failures.first)
            if self.failures.any:
                self.failures.raise_cause()
        return self._rescued(started)

    def call(self, command: StageCommand[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a command and wait for its result; see :meth:`result`."""
        return self.result(self.start(command, *args, **kwargs))

    def read(self, command: StageCommand[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a command that only reads, on behalf of user code, which may ask at any time.

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
        return self.call(command, *args, **kwargs)

    def check_gathered(self) -> None:
        """Check that the values of the stage can still be read, or have been brought back.

        Raises:
            RuntimeError: If they were left when the pipeline ended.
        """
        if self.has_closed and not self.is_gathered:
            raise RuntimeError(
                f"the values of {self.description} were not brought back when the run ended, because gather_on_end is "
                "False or the model was built without memory (in configure_model). Load a checkpoint that was saved "
                "during the run (load_from_checkpoint, load_state_dict, or ckpt_path of the next run), or pass "
                "RPCSequentialStrategy(gather_on_end=True) if the model fits into this process"
            )

    def rescue(self, command: StageCommand[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a command and wait for its result, even if another stage has failed.

        Raises:
            WorkerLost: If this stage has been given up.
        """
        return self._rescued(self.start(command, *args, **kwargs))

    def _rescued(self, started: "Future[R]") -> R:
        _wait_for_any(started, self._lost)
        if self.is_lost and not started.done():
            raise WorkerLost(f"{self.description}, {self.process.description}, was declared lost")
        return started.result()

    def _settle(self, reply: Any, done: "Future[Any]", called: "_Called") -> None:
        """Pass on the reply to a call; runs on a thread of RPC."""
        process, failures = called.process, called.failures
        try:
            value = reply.value()
        except Exception as error:
            ended = _how_it_ended(process)
            if ended is None and _RPC_TRANSPORT in str(error):
                process.kill()  # nothing reaches it any more, and others would wait for it until the time-out
            what = f"{self.description}, {process.description}"
            lost = WorkerLost(f"{what}, {ended or f'did not answer: {error}'}")
            killed_by_us = called.lost.done() or (ended is None and is_consequence(error))
            failures.add(lost, consequence=killed_by_us)
            done.set_exception(lost)
            return
        if isinstance(value, Failure):
            failed = value.exception()
            if isinstance(failed, StopIteration):
                failed, failed.__cause__ = _not_ending_loops(failed), failed
            failures.add(failed, consequence=value.consequence)
            done.set_exception(failed)
        else:
            done.set_result(value)


def cause_of(error: Exception, stage: str, process: StageProcess) -> Exception:
    """Return why a call of RPC failed: the process has ended or cannot be reached, or else ``error`` itself.

    Args:
        error: What the call raised.
        stage: The stage in words.
        process: Its process.
    """
    ended = _how_it_ended(process)
    if ended is None and _RPC_TRANSPORT not in str(error):
        return error
    return WorkerLost(f"{stage}, {process.description}, {ended or f'did not answer: {error}'}")


def _how_it_ended(process: StageProcess) -> str | None:
    """Return how a process has ended, which a busy machine tells some time after the connections have closed."""
    return next(filter(None, (process.ended() for _ in range(_NUM_QUESTIONS))), None)


def _wait_for_any(*futures: Future[Any]) -> None:
    wait(futures, return_when=FIRST_COMPLETED)


@contextmanager
def leading(failures: Failures, remotes: Iterable[RemoteStage], fail: Callable[[], None]) -> Iterator[None]:
    """Lead micro-batches through stages: user code cannot read their values meanwhile, and errors get their cause.

    May be nested.

    Args:
        failures: Failures of the stages. One that is known before the body runs is raised instead.
        remotes: The stages on workers.
        fail: Called if the body raises, Ctrl-C included, so that no stage waits for this process.

    Raises:
        Exception: The first failure of any process that is not a consequence of another one.
    """
    if failures.any:
        failures.raise_cause()
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
