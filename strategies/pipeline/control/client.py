"""The driver's end of the control plane: numbered commands to the stages, and the first failure of any of them."""

import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

from torch.distributed import rpc

from strategies.commands.declaration import Call, call_of, declaration_of
from strategies.common.errors import PeerFailed, WorkerLost, is_consequence
from strategies.pipeline.control.calls import Failure, perform, progress
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.transport.channel import unrecorded

_DIAGNOSIS_SECONDS = 2.0
"""How long to look for the cause of a failure that is only the consequence of another one."""


P = ParamSpec("P")
R = TypeVar("R")
StageCommand = Callable[Concatenate[StageCommands, P], R]
"""A method of :class:`StageCommands`, not yet bound to a stage."""


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

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raises the cause of what goes wrong within, which may be another process's."""
        try:
            yield
        except BaseException as error:  # Ctrl-C as well
            self.add(error, consequence=is_consequence(error))
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
        self._waits: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._ended: SimpleQueue[tuple[Callable[[], Any] | None, BaseException | None]] = SimpleQueue()
        self._has_ended = False
        failures.first.add_done_callback(self._wake)
        threading.Thread(target=self._work, name="relay-wait", daemon=True).start()

    def __call__(self, wait_for_message: Callable[[], Any]) -> None:
        if self._has_ended:
            raise RuntimeError("the pipeline has ended, so nothing more can arrive from its stages")
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
        """Lets the thread end, when what it may still wait for has come or the connection is closed."""
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


class NotCopied:
    """What holds connections to other processes, which a copy of the module that holds it could not share."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(
            "a module whose layers live in several processes cannot be copied or pickled as long as they do. Copy or "
            "save its state_dict(), which has the values of all of them, or copy a module that lives in one process."
        )


class RemoteStage(NotCopied):
    """Sends commands to one stage. Each call is one RPC, whatever the number of commands it carries.

    A call has no time limit: how long a stage computes is the model's affair. A stage that hangs is found by
    :class:`~strategies.pipeline.control.watch.Watch`.

    Args:
        name: The RPC name of the worker.
        stage: The ``RRef`` to its :class:`~strategies.pipeline.worker.process.Host`.
        description: The stage in words.
        process: Its process in words.
        ended: Tells how that process ended, or ``None``.
        doing: Tells what that process does or did last.
        kill: Ends that process.
        failures: Where failures go.
    """

    def __init__(
        self,
        name: str,
        stage: Any,
        description: str,
        *,
        process: str,
        ended: Callable[[], str | None],
        doing: Callable[[], str],
        kill: Callable[[], None],
        failures: Failures,
    ) -> None:
        self._name, self._stage, self.description, self._process = name, stage, description, process
        self._ended, self._doing, self._kill, self.failures = ended, doing, kill, failures
        self._number = 0
        self._lost: Future[None] = Future()
        self._queued: deque[Call] = deque()  # the garbage collector may append from any thread
        self._end: Callable[[], None] | None = None
        self.version = 0
        """Another number whenever the stage may have changed a parameter, a buffer or a gradient."""
        self.in_pass = False
        """Whether the driver leads micro-batches through the stages, which may wait for it."""
        self.has_closed = False
        """Whether the pipeline has ended."""

    def close(self) -> None:
        """Ends reading, with the pipeline.

        Stand-ins may outlive the pipeline, and refer to this. They must not keep what it failed with: tracebacks refer
        to stand-ins in turn, and a tensor that autograd refers to is in no cycle that Python's garbage collector frees.
        """
        self.has_closed, self.failures = True, Failures()

    @property
    def has_ended(self) -> bool:
        """Whether the worker's process is gone, and its layers with it."""
        return self._ended() is not None

    @property
    def is_lost(self) -> bool:
        """Whether the stage has been given up."""
        return self._lost.done()

    def give_up(self, why: str) -> None:
        """Ends the stage's process, which is beyond help, and notes that as a failure."""
        error = WorkerLost(f"{self.description}, {self._process}, {why}")
        self.failures.add(error, consequence=self.failures.raised)
        self._lost.set_result(None)
        self._kill()

    def doing(self) -> str:
        """What the stage does or did last, in words, as far as that is known without asking it."""
        return self._doing()

    @property
    def has_queued(self) -> bool:
        """Whether commands wait for the next call."""
        return bool(self._queued)

    def queue(self, command: StageCommand[P, R], *args: P.args, **kwargs: P.kwargs) -> None:
        """Queue a command, to be run just before that of the next call. Its result is dropped."""
        self._note(command)
        self._queued.append(call_of(command, *args, **kwargs))

    def queue_zero_grad(self, name: str, set_to_none: bool, module: int = 0) -> None:
        """Queue the clearing of a parameter's gradient; consecutive ones become one command."""
        clear = call_of(StageCommands.zero_grads, [name], set_to_none, module)
        last = self._queued[-1] if self._queued else None
        if last is not None and last[0] == clear[0] and last[1][1:] == clear[1][1:]:
            self._note(StageCommands.zero_grads)
            last[1][0].append(name)
        else:
            self.queue(StageCommands.zero_grads, [name], set_to_none, module)

    def start(self, command: StageCommand[P, R], *args: P.args, **kwargs: P.kwargs) -> "Future[R]":
        """Run a command after those before it, without waiting.

        Failures are recorded as soon as they are known; see :meth:`result`.
        """
        self._note(command)
        if self._end is not None:
            self._end()  # if Ctrl-C interrupts this, the next command does it again
            self._end = None
        done: Future[R] = Future()
        calls = [self._queued.popleft() for _ in range(len(self._queued))]
        calls.append(call_of(command, *args, **kwargs))
        arguments = (self._stage, self._number, calls)
        reply: Any = unrecorded(rpc.rpc_async, self._name, perform, args=arguments, timeout=0)
        self._number += 1
        failures = self.failures  # those of now: who leads the stages may have others by the time of the reply
        reply.add_done_callback(lambda reply: self._settle(reply, done, failures))
        return done

    def start_until(
        self, end: Callable[[], None], command: StageCommand[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Run a command that goes on until ``end`` is called; the next command calls it before it is sent."""
        self.start(command, *args, **kwargs)
        self._end = end

    def beside(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls ``function(stage, *arguments)`` on the worker while the stage goes on with its commands.

        Returns:
            What waits for the result: its ``wait`` raises what went wrong, which is no failure of the stage.
        """
        return unrecorded(rpc.rpc_async, self._name, function, args=(self._stage, *arguments), timeout=0)

    def ask_for_progress(self) -> Any:
        """Asks how far the stage is; the answer will be a :class:`~strategies.common.activity.Progress`."""
        return self.beside(progress)

    def result(self, started: "Future[R]") -> R:
        """Waits for what :meth:`start` began.

        Raises:
            Exception: The first failure of any stage, with the type that it had there. Once that has been raised, only
                a failure of this command: what can still be saved from a broken pipeline is.
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
        """Runs a command that only reads, for user code, which may ask at any time.

        Raises:
            RuntimeError: If the stage cannot answer now.
        """
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

    def rescue(self, command: StageCommand[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Like :meth:`call`, but goes on if another stage has failed.

        Raises:
            WorkerLost: If this one has been given up.
        """
        return self._rescued(self.start(command, *args, **kwargs))

    def _note(self, command: Callable[..., Any]) -> None:
        self.version += declaration_of(command).changes_values

    def _rescued(self, started: "Future[R]") -> R:
        _wait_for_any(started, self._lost)
        if self.is_lost and not started.done():
            raise WorkerLost(f"{self.description}, {self._process}, has been given up")
        return started.result()

    def _settle(self, reply: Any, done: "Future[Any]", failures: Failures) -> None:
        """Runs on a thread of RPC as soon as the reply is there."""
        try:
            value = reply.value()
        except Exception as error:
            ended = self._ended()
            lost = WorkerLost(f"{self.description}, {self._process}, {ended or f'did not answer: {error}'}")
            killed_by_us = self.is_lost or (ended is None and is_consequence(error))
            failures.add(lost, consequence=killed_by_us)
            done.set_exception(lost)
            return
        if isinstance(value, Failure):
            failed = rebuilt(value)
            failures.add(failed, consequence=value.consequence)
            done.set_exception(failed)
        else:
            done.set_result(value)


def _wait_for_any(*futures: Future[Any]) -> None:
    wait(futures, return_when=FIRST_COMPLETED)


@contextmanager
def in_pass(remotes: Iterable[RemoteStage]) -> Iterator[None]:
    """Within this, micro-batches go through the stages."""
    outermost = [remote for remote in remotes if not remote.in_pass]
    for remote in outermost:
        remote.in_pass = True
    try:
        yield
    finally:
        for remote in outermost:
            remote.in_pass = False


def rebuilt(failure: Failure) -> BaseException:
    """The exception of another process, with the traceback there as its cause."""
    try:
        error = pickle.loads(failure.pickled)
        assert isinstance(error, BaseException)
    except Exception:  # not picklable, or only where it was raised; its traceback tells all the same
        error = RuntimeError(f"{failure.where} failed: {failure.traceback.strip().splitlines()[-1]}")
    error.__cause__ = RemoteTraceback(failure.where, failure.traceback)
    return error
