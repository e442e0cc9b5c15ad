"""User code that stops where it calls the pipelined module, and goes on when the output is there.

    lead   begin ─┐                 ┌─ sends the input ... has the output ─┐                   ┌─ backward pass
    step          └─ x = before() ──┘                                      └─ loss = after(y) ─┘

Each step has a thread, but never runs at the same time as the lead or another step: control is handed over, as between
coroutines, which code that knows nothing of them cannot be made into. A step's random numbers are a stream of its own,
so that they do not depend on what runs in between; so is what else belongs to the process: the default dtype.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any

import torch

from strategies.pipeline.stage.layers import (
    PassContext,
    preserved_random_state,
    random_state,
    seed_device,
    set_random_state,
)


class Abandoned(BaseException):
    """Ends a step whose output will not come; no ``Exception``, so that user code does not catch it."""


class Step:
    """One run of a function, made by :meth:`Steps.begin`."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.has_called = False
        """Whether the function has called the module, and waits for its output."""
        self.input: Any = None
        """What it has called the module with; who takes it away lets its memory go."""
        self.context: PassContext | None = None
        """The settings under which it has called the module."""
        self.result: Any = None
        """What the function has returned."""
        self._device, self._seed = device, seed
        self._random_state: list[Any] | None = None
        self._default_dtype: torch.dtype | None = None
        self._ended = False
        self._to_step: SimpleQueue[tuple[bool, Any]] = SimpleQueue()
        self._to_lead: SimpleQueue[BaseException | None] = SimpleQueue()

    def resume(self, output: Any = None) -> None:
        """Gives the function what the module returns, and waits until it has ended.

        Raises:
            Exception: What the function raises.
        """
        self.has_called = False
        self._hand_over(True, output)

    def abandon(self) -> None:
        """Ends the function where it waits, if it does."""
        if not self._ended:
            with suppress(BaseException):
                self._hand_over(False, None)

    def _hand_over(self, go_on: bool, output: Any) -> None:
        with preserved_random_state(self._device), _preserved_default_dtype():
            if self._default_dtype is not None:
                torch.set_default_dtype(self._default_dtype)
            if self._random_state is None:
                seed_device(self._seed, self._device)
            else:
                set_random_state(self._random_state, self._device)
            self._to_step.put((go_on, output))
            error = self._to_lead.get()
            if not self._ended:
                self._random_state, self._default_dtype = random_state(self._device), torch.get_default_dtype()
        if error is not None:
            raise error

    def call(self, input: Any) -> Any:
        """Stands for the module, on the step's own thread."""
        if self.context is not None:
            raise RuntimeError(
                "training_step called the pipelined module twice; schedule='1f1b' runs it once per micro-batch, with "
                "one call in each. Use schedule='gpipe'."
            )
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "training_step called the pipelined module under no_grad, but schedule='1f1b' runs its backward pass "
                "within the same call. Use schedule='gpipe'."
            )
        self.input, self.context, self.has_called = input, PassContext.capture(self._device.type), True
        self._to_lead.put(None)
        go_on, output = self._to_step.get()
        if not go_on:
            raise Abandoned
        return output

    def run(self, function: Callable[[], Any]) -> None:
        """Runs the function, on the step's own thread."""
        go_on, _ = self._to_step.get()
        error: BaseException | None = None
        try:
            if go_on:
                self.result = function()
        except BaseException as caught:
            error = caught
        self._ended = True
        self._to_lead.put(error)


class Steps:
    """Begins steps, on a few threads that are used again: each new one would have its own malloc arena to fault in.

    Args:
        number: How many steps may wait at the same time.
        device: The device of this process.
    """

    def __init__(self, number: int, device: torch.device) -> None:
        self._device = device
        self._threads = ThreadPoolExecutor(number, thread_name_prefix="relay-step")
        self._local = threading.local()

    @property
    def current(self) -> Step | None:
        """The step that the calling thread runs."""
        return getattr(self._local, "step", None)

    def begin(self, function: Callable[[], Any], seed: int) -> Step:
        """Runs a function until it calls the module or ends.

        Raises:
            Exception: What the function raises.
        """
        step = Step(seed, self._device)
        self._threads.submit(copy_context().run, self._run, step, function)
        try:
            step.resume()
        except BaseException:  # Ctrl-C too, at which the function still runs
            step.abandon()
            raise
        return step

    def _run(self, step: Step, function: Callable[[], Any]) -> None:
        self._local.step = step
        try:
            step.run(function)
        finally:
            self._local.step = None

    def close(self) -> None:
        """Ends the threads, once no step runs on them any more."""
        self._threads.shutdown(wait=False)


@contextmanager
def _preserved_default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(before)
