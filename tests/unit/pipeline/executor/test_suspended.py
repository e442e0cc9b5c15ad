"""Code suspended where it calls the module: who runs when, what each has for itself, and how it ends."""

import contextvars
import gc
import os
import random
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from greenlet import greenlet
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from strategies.pipeline.executor.suspended import Steps, SuspendedStep, take_modes

CPU = torch.device("cpu")


@pytest.fixture
def steps() -> Steps:
    return Steps(CPU)


def module(steps: Steps, input: Any) -> Any:
    """What the module's forward does."""
    step = steps.current
    assert step is not None
    return step.call(input)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([1], "called 'down' before 'up', but .* in the order of module=\\['up', 'down'\\]"),
        ([0, 0], "called 'up' twice"),
        ([0, 1, 1], "called 'down' twice"),
    ],
)
def test_lists_are_called_in_their_order(calls: list[int], message: str) -> None:
    steps = Steps(CPU, ["'up'", "'down'"])

    def code() -> None:
        for number in calls:
            step = steps.current
            assert step is not None
            step.call(f"input {number}", number)

    def run() -> None:
        step = steps.begin(code, seed=0)
        for number in calls:
            assert step.has_called and step.input == f"input {number}"
            step.resume()

    with pytest.raises(RuntimeError, match=message):
        run()


def test_control_is_handed_over(steps: Steps) -> None:
    order: list[str] = []

    def code(m: int) -> Callable[[], str]:
        def run() -> str:
            order.append(f"before {m}")
            output = module(steps, ("input", m))
            order.append(f"after {m}")
            return f"{output} done"

        return run

    begun: list[SuspendedStep] = []
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


def test_code_runs_on_the_thread_of_the_lead(steps: Steps) -> None:
    seen = []

    def run() -> None:
        seen.append(threading.get_ident())
        module(steps, 0)
        seen.append(threading.get_ident())

    for step in [steps.begin(run, seed=0) for _ in range(3)]:
        step.resume()
    assert seen == [threading.get_ident()] * 6


def test_code_may_call_the_module_in_a_greenlet_of_its_own(steps: Steps) -> None:
    def run() -> list[Any]:
        return [greenlet(lambda: module(steps, "input")).switch(), "end"]

    step = steps.begin(run, seed=0)
    assert step.input == "input"
    step.resume("output")
    assert step.result == ["output", "end"]


class Named(TorchFunctionMode):
    """Adds its name to a list whenever a function of torch is called."""

    def __init__(self, name: str, seen: list[str]) -> None:
        super().__init__()
        self.name, self.seen = name, seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.add:
            self.seen.append(self.name)
        return func(*args, **(kwargs or {}))


class NamedDispatch(TorchDispatchMode):
    """Does the same one level below."""

    def __init__(self, name: str, seen: list[str]) -> None:
        super().__init__()
        self.name, self.seen = name, seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor:
            self.seen.append(self.name)
        return func(*args, **(kwargs or {}))


def test_modes_of_torch_are_a_step_s_own_and_those_of_the_lead(steps: Steps) -> None:
    seen: list[str] = []
    x = torch.ones(2, requires_grad=True)

    def noted(name: str) -> list[str]:
        """The modes under which a sum is computed here, and whether autograd's saved tensors go through hooks."""
        seen.clear()
        _ = torch.add(x, x) * x
        return [name, *seen]

    def run(name: str) -> list[list[str]]:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            seen.append(f"pack {name}")
            return tensor

        with Named(name, seen), NamedDispatch(f"dispatch {name}", seen), saved_tensors_hooks(pack, lambda t: t):
            before = noted("before")
            module(steps, None)
            return [before, noted("after"), [str(torch.empty(1).device)]]

    def modes(name: str) -> list[str]:
        return [name, "dispatch " + name, f"pack {name}", f"pack {name}"]

    with torch.device("meta"):
        one, other = steps.begin(lambda: run("one"), 0), steps.begin(lambda: run("other"), 0)
        assert noted("lead") == ["lead"] and torch.empty(1).is_meta
        one.resume()
        assert noted("lead") == ["lead"] and torch.empty(1).is_meta
        other.resume()
    assert noted("lead") == ["lead"] and not torch.empty(1).is_meta
    for step, name in (one, "one"), (other, "other"):
        own = modes(name)
        assert step.result == [["before", *own], ["after", *own], ["meta"]]


def test_a_step_that_fails_leaves_no_mode(steps: Steps) -> None:
    def run() -> None:
        Named("left", []).__enter__()
        torch.set_grad_enabled(False)
        raise Expected

    with pytest.raises(Expected):
        steps.begin(run, 0)
    assert take_modes() == ([], [], []) and torch.is_grad_enabled()


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
            with torch.autocast("cpu", enabled=False):
                seen.append((x @ x).dtype)
        torch.set_default_dtype(before)
        return seen

    one = steps.begin(lambda: run(torch.float64), 0)
    assert torch.get_default_dtype() == torch.float32 and not torch.is_autocast_enabled("cpu")
    other = steps.begin(lambda: run(torch.float32), 0)
    one.resume()
    assert torch.get_default_dtype() == torch.float32
    other.resume()
    assert one.result == [torch.float64, torch.bfloat16, torch.float32]
    assert other.result == [torch.float32, torch.bfloat16, torch.float32]
    assert torch.get_default_dtype() == torch.float32


def test_each_use_of_a_weight_under_autocast_has_its_own_graph(steps: Steps) -> None:
    """The lead computes with the same weight between the parts of a step, and frees the graph of its conversion."""
    weight = torch.ones(2, 2, requires_grad=True)

    def use() -> torch.Tensor:
        return (torch.ones(2, 2) @ weight).sum()

    def run() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            before = use()
            module(steps, None)
            return before + use()

    started = [steps.begin(run, 0) for _ in range(2)]
    for step in started:
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = use()
            loss.backward()
        step.resume()
        step.result.backward()
    assert torch.equal(weight.grad, torch.full((2, 2), 2.0 * 8))


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

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

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
        for _ in range(2):
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
        assert len(seen) == 15 and [ref() for ref in seen] == [None] * 15
    finally:
        gc.enable()


class Keeps(nn.Module):
    """Has attributes that steps set."""

    def __init__(self) -> None:
        super().__init__()
        self.number: Any = 0
        self.count, self.entries = 0, dict[str, int]()


def test_attributes_that_a_step_sets_are_its_own() -> None:
    kept = Keeps()
    steps = Steps(CPU, modules=[kept])

    def code(m: int) -> None:
        kept.number, kept.entries["m"], kept.made = m, m, m
        kept.count += 1
        module(steps, m)
        assert (kept.number, kept.entries, kept.made) == (m, {"m": m}, m)
        kept.total = getattr(kept, "total", 0) + 1
        if m == 0:
            del kept.made

    begun = [steps.begin(partial(code, m), seed=m) for m in range(2)]
    begun[0].resume()
    assert (kept.number, kept.count, kept.entries, kept.total) == (1, 2, {"m": 1}, 1) and not hasattr(kept, "made")
    begun.append(steps.begin(partial(code, 2), seed=2))
    assert kept.count == 3  # the third step has seen what the second one has set, although the first one ran in between
    for step in begun[1:]:
        step.resume()
    assert (kept.number, kept.count, kept.entries, kept.total, kept.made) == (2, 3, {"m": 2}, 3, 2)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_script_module_keeps_its_buffers() -> None:
    norm = torch.jit.script(nn.BatchNorm1d(1))
    steps = Steps(CPU, modules=[norm])

    def code(m: int) -> None:
        norm(torch.ones(2, 1))
        module(steps, m)

    begun = [steps.begin(partial(code, m), seed=m) for m in range(2)]
    for step in begun:
        step.resume()
    assert norm.num_batches_tracked == 2


def test_equal_values_and_modes_that_a_step_sets_are_its_own() -> None:
    kept, head = Keeps(), nn.Dropout()
    steps = Steps(CPU, modules=[kept, head])
    seen = []

    def code(m: int) -> None:
        kept.number = "before"  # the same object for all steps
        head.eval()
        module(steps, m)
        seen.append((kept.number, head.training))
        kept.number = "after"
        head.train()

    begun = [steps.begin(partial(code, m), seed=m) for m in range(2)]
    for m in range(2, 4):
        begun[m - 2].resume()
        begun.append(steps.begin(partial(code, m), seed=m))
    for step in begun[2:]:
        step.resume()
    assert seen == [("before", False)] * 4 and (kept.number, head.training) == ("after", True)


def test_sums_that_the_first_step_begins_add_up() -> None:
    kept = Keeps()
    steps = Steps(CPU, modules=[kept])
    kept.number = None

    def code() -> None:
        if kept.number is None:
            kept.number = 0
        module(steps, None)
        kept.number += 1

    begun = [steps.begin(code, seed=m) for m in range(3)]
    for step in begun:
        step.resume()
    assert kept.number == 3


def test_what_layers_store_for_a_step_is_its_own() -> None:
    kept = Keeps()
    steps = Steps(CPU, modules=[kept])
    seen: list[Any] = []

    def code(m: int) -> None:
        kept.number, kept.entries = None, {}
        module(steps, m)
        seen.append((kept.number, kept.entries))

    for _ in range(2):  # in the second pass, the attributes already are None and a dict
        begun = [steps.begin(partial(code, m), seed=m) for m in range(3)]
        for m, step in enumerate(begun):
            with step.own_attributes():
                kept.number, kept.entries["m"], kept.count = m, m, kept.count + 1
            step.resume()
    assert seen == [(m, {"m": m}) for m in range(3)] * 2 and kept.count == 6


def test_numbers_add_up_between_two_calls() -> None:
    kept = Keeps()
    steps = Steps(CPU, ["'up'", "'down'"], modules=[kept])

    def code() -> None:
        for number in range(2):
            step = steps.current
            assert step is not None
            step.call(None, number)
            kept.count += number == 0

    begun = [steps.begin(code, seed=m) for m in range(3)]
    for _ in range(2):
        for step in begun:
            step.resume()
    assert kept.count == 3
