"""Code suspended where it calls the module: who runs when, what each has for itself, and how it ends."""

import contextvars
import gc
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from strategies.pipeline.executor.suspended import Step, Steps

CPU = torch.device("cpu")


@pytest.fixture
def steps() -> Iterator[Steps]:
    """At most three at a time; afterwards, no thread may be left."""
    before = set(threading.enumerate())
    made = Steps(3, CPU)
    yield made
    made.close()
    deadline = time.monotonic() + 10
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


def module(steps: Steps, input: Any) -> Any:
    """What the module's forward does."""
    step = steps.current
    assert step is not None
    return step.call(input)


def test_control_is_handed_over(steps: Steps) -> None:
    order: list[str] = []

    def code(m: int) -> Callable[[], str]:
        def run() -> str:
            order.append(f"before {m}")
            output = module(steps, ("input", m))
            order.append(f"after {m}")
            return f"{output} done"

        return run

    begun: list[Step] = []
    for m in range(3):
        begun.append(steps.begin(code(m), seed=m))
        order.append(f"lead has input {begun[m].input[1]}")
        assert begun[m].has_called and begun[m].result is None
    for m in (1, 0, 2):
        begun[m].resume(f"output {m}")
        order.append(f"lead has result of {m}")
        assert not begun[m].has_called and begun[m].result == f"output {m} done"
    assert order == [
        *(line for m in range(3) for line in (f"before {m}", f"lead has input {m}")),
        *(line for m in (1, 0, 2) for line in (f"after {m}", f"lead has result of {m}")),
    ]
    assert steps.current is None


def test_as_many_threads_as_steps_that_wait(steps: Steps) -> None:
    seen = set()

    def run() -> None:
        seen.add(threading.get_ident())
        module(steps, 0)
        seen.add(threading.get_ident())

    waiting = [steps.begin(run, seed=0) for _ in range(3)]
    for _ in range(20):
        waiting.pop(0).resume()
        waiting.append(steps.begin(run, seed=0))
    for step in waiting:
        step.resume()
    assert len(seen) == 3 and threading.get_ident() not in seen


def test_code_that_does_not_call(steps: Steps) -> None:
    step = steps.begin(lambda: "result", seed=0)
    assert not step.has_called and step.result == "result" and step.input is None
    step.abandon()  # has nothing to end


def test_random_numbers_are_a_step_s_own(steps: Steps) -> None:
    def draw() -> torch.Tensor:
        return torch.tensor([torch.rand(1).item(), random.random()], dtype=torch.float64)

    def run() -> torch.Tensor:
        before = draw()
        module(steps, before)
        return torch.cat([before, draw()])

    alone = {}
    for seed in (5, 6):
        step = steps.begin(run, seed)
        step.resume()
        alone[seed] = step.result
    assert len(set(torch.cat(list(alone.values())).tolist())) == 8

    one, other = steps.begin(run, 5), steps.begin(run, 6)
    draw()
    other.resume()
    one.resume()
    assert torch.equal(one.result, alone[5]) and torch.equal(other.result, alone[6])


def test_default_dtype_and_thread_settings_are_a_step_s_own(steps: Steps) -> None:
    """As where a precision plug-in changes the default dtype around ``training_step``: each one puts back what was."""

    def run(dtype: torch.dtype) -> list[torch.dtype]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            module(steps, None)
            x = torch.ones(1, 1, dtype=torch.float32)
            seen = [torch.ones(1).dtype, (x @ x).dtype]
        torch.set_default_dtype(before)
        return seen

    one = steps.begin(lambda: run(torch.float64), 0)
    assert torch.get_default_dtype() == torch.float32 and not torch.is_autocast_enabled("cpu")
    other = steps.begin(lambda: run(torch.float32), 0)
    one.resume()
    assert torch.get_default_dtype() == torch.float32
    other.resume()
    assert one.result == [torch.float64, torch.bfloat16] and other.result == [torch.float32, torch.bfloat16]
    assert torch.get_default_dtype() == torch.float32


def test_context_variables_are_those_of_the_lead(steps: Steps) -> None:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(3)
    assert steps.begin(variable.get, 0).result == 3


class Expected(Exception):
    pass


def test_errors_are_raised_where_the_step_was_resumed(steps: Steps) -> None:
    def fails() -> None:
        raise Expected("before")

    def fails_later() -> None:
        module(steps, 0)
        raise Expected("after")

    with pytest.raises(Expected, match="before") as caught:
        steps.begin(fails, 0)
    assert "fails" in [entry.name for entry in caught.traceback]  # where the user has to look
    step = steps.begin(fails_later, 0)
    with pytest.raises(Expected, match="after"):
        step.resume()
    step.abandon()
    assert steps.begin(lambda: 1, 0).result == 1


def test_calling_twice_is_refused(steps: Steps) -> None:
    def twice() -> None:
        module(steps, None)
        module(steps, None)

    step = steps.begin(twice, 0)
    with pytest.raises(RuntimeError, match=r"called the pipelined module twice; .* Use schedule='gpipe'"):
        step.resume()


def test_calling_without_gradients_is_refused(steps: Steps) -> None:
    def silent() -> None:
        with torch.no_grad():
            module(steps, None)

    with pytest.raises(RuntimeError, match=r"pipelined module under no_grad, .* Use schedule='gpipe'"):
        steps.begin(silent, 0)


def test_abandoned_code_ends_where_it_waits(steps: Steps) -> None:
    done: list[str] = []

    def careful() -> None:
        try:
            with suppress(Exception):
                module(steps, 0)
            done.append("went on")
        finally:
            done.append("finally")

    def stubborn() -> None:
        try:
            module(steps, 0)
        except BaseException:
            done.append("caught all")
        module(steps, 0)

    for code in (careful, stubborn):
        step = steps.begin(code, 0)
        step.abandon()
        step.abandon()
    assert done == ["finally", "caught all"]
    assert steps.begin(lambda: 1, 0).result == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_ctrl_c_leaves_no_code_waiting(steps: Steps, when: str) -> None:
    """The lead, on the main thread, is interrupted while a step runs, which then calls, or ends."""
    running = threading.Event()

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        running.wait(0.3)  # while it runs on

    def run() -> None:
        if when == "before":
            interrupt()
        module(steps, 0)
        interrupt()

    def lead() -> None:
        step = steps.begin(run, 0)
        try:
            step.resume()
        except BaseException:
            step.abandon()
            raise

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        for _ in range(4):  # more than there are threads
            with pytest.raises(KeyboardInterrupt):
                lead()
    finally:
        signal.signal(signal.SIGINT, before)
    assert steps.begin(lambda: 1, 0).result == 1


class Big:
    pass


def test_nothing_is_kept_of_a_step_that_ended(steps: Steps) -> None:
    seen: list[weakref.ref[Big]] = []

    def run() -> None:
        local, given = Big(), Big()
        seen.extend([weakref.ref(local), weakref.ref(given)])
        output = module(steps, given)
        seen.append(weakref.ref(output))

    kept = []
    gc.disable()  # reference counts must do
    try:
        for _ in range(5):
            step = steps.begin(run, 0)
            step.input = None
            step.resume(Big())
            kept.append(step)
        deadline = time.monotonic() + 5
        while any(ref() is not None for ref in seen) and time.monotonic() < deadline:
            time.sleep(0.01)  # a thread lets go of its function just after the lead goes on
        assert len(seen) == 15 and [ref() for ref in seen] == [None] * 15
    finally:
        gc.enable()
