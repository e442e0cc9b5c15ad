"""Runs user code that is suspended where it calls the pipelined module, and resumed with the module's output.

    lead   begin ─┐                 ┌─ sends the input ... has the output ─┐                   ┌─ backward pass
    step          └─ x = before() ──┘                                      └─ loss = after(y) ─┘

The lead is the driver's main thread. Each step has its own thread, but only the lead or one step runs at any time: they
pass control to each other like coroutines, which ordinary user code cannot be turned into. Each step has its own random
state and its own default dtype, both global to the process, so code that runs in between does not affect them.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any

import torch

from strategies.pipeline.stage.layers import (
    PassContext,
    random_state,
    seed_device,
    set_random_state,
)


class Abandoned(BaseException):
    """Ends a step that will get no output. Not an ``Exception``, so that user code does not catch it."""


class Step:
    """One run of a function, begun by :meth:`Steps.begin`."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.has_called = False
        """Whether the function has called the module and is suspended until it gets the output."""
        self.input: Any = None
        """The argument of that call. The caller of :meth:`Steps.begin` sets it to ``None`` to free its memory."""
        self.context: PassContext | None = None
        """The settings of the thread at that call."""
        self.result: Any = None
        """The return value of the function."""
        self._device, self._seed = device, seed
        self._random_state: list[Any] | None = None
        self._default_dtype: torch.dtype | None = None
        self._ended = False
        self._to_step: SimpleQueue[tuple[bool, Any]] = SimpleQueue()
        self._to_lead: SimpleQueue[BaseException | None] = SimpleQueue()

    def resume(self, output: Any = None) -> None:
        """Return ``output`` from the function's call of the module, and wait until the function has ended.

        Raises:
            Exception: Whatever the function raises.
        """
        self.has_called = False
        self._hand_over(True, output)

    def abandon(self) -> None:
        """End the function if it is suspended."""
        if not self._ended:
            with suppress(BaseException):
                self._hand_over(False, None)

    def _hand_over(self, go_on: bool, output: Any) -> None:
        dtype_of_lead = torch.get_default_dtype()
        try:
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
        finally:
            torch.set_default_dtype(dtype_of_lead)
        if error is not None:
            raise error

    def call(self, input: Any) -> Any:
        """Suspend the step in its call of the module; runs on the step's thread and returns the module's output."""
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
        """Run the function; called on the step's thread."""
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
    """Begins steps on a few threads, which are reused: each new thread causes page faults in a new malloc arena.

    Each step leaves the process's random state as its own has become; the lead restores that of the process at the end.

    Args:
        number: Maximum number of steps that are suspended at the same time.
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
        """Run a function until it calls the module or ends.

        Raises:
            Exception: Whatever the function raises.
        """
        step = Step(seed, self._device)
        self._threads.submit(copy_context().run, self._run, step, function)
        try:
            step.resume()
        except BaseException:  # KeyboardInterrupt too, during which the function still runs
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
        """End the threads; each ends after its step."""
        self._threads.shutdown(wait=False)
