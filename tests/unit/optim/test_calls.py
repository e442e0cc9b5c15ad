"""Which calls of an optimizer other processes follow: those by user code, not those by its own step and methods."""

import inspect
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from strategies.optim.calls import (
    MethodCall,
    after_steps,
    arguments_of_step,
    follow_methods,
    follow_steps,
    hyperparameters,
    own_code,
    runs_own_code,
    same_result,
    set_hyperparameters,
    track_steps,
)


class Noting(SGD):
    """Its step calls the step of the base class, and its methods call each other."""

    fails = False

    def step(self, closure: Any = None, *, factor: float = 1.0) -> Any:
        result = super().step(closure)
        self.note("in step")
        if self.fails:
            raise ArithmeticError("in the body")
        return result

    def note(self, word: str) -> None:
        self.state[self].setdefault("notes", []).append(word)

    def note_twice(self, word: str) -> str:
        self.note(word)
        self.note(word)
        return word


@pytest.fixture
def optimizer() -> Noting:
    SGD([nn.Parameter(torch.ones(1))], 0.1)  # so that torch puts hooks around the step of the base class, too
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return Noting([weight], 0.1)


class Followed:
    """Notes what other processes would be asked to do."""

    def __init__(self, optimizer: Optimizer, **options: Any) -> None:
        self.updates: list[dict[str, Any]] = []
        self.calls: list[MethodCall] = []
        self.undo = [follow_steps(optimizer, lambda _, arguments: self.updates.append(arguments), **options)]
        self.undo += follow_methods(optimizer, self.call, [])

    def call(self, optimizer: Optimizer, call: MethodCall) -> Any:
        self.calls.append(call)
        return call.on(optimizer)


def test_a_step_within_a_step_is_not_followed(optimizer: Noting) -> None:
    followed = Followed(optimizer)
    for _ in range(2):
        optimizer.step(factor=2.0)
    assert followed.updates == [{"factor": 2.0}] * 2 and followed.calls == []
    assert optimizer.state[optimizer]["notes"] == ["in step"] * 2


class CallsItself(SGD):
    """Its step calls its own step once more."""

    def step(self, closure: Any = None, *, inner: bool = False) -> Any:
        return super().step(closure) if inner else self.step(closure, inner=True)


def test_a_step_that_calls_itself_is_followed_once() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = CallsItself([weight], 0.1)
    followed = Followed(optimizer)
    optimizer.step()
    assert followed.updates == [{}] and followed.calls == []


def test_after_a_step_that_failed_the_next_one_is_followed(optimizer: Noting) -> None:
    followed = Followed(optimizer)
    optimizer.fails = True
    with pytest.raises(ArithmeticError) as kept:  # as are the frames of the step
        optimizer.step()
    optimizer.fails = False
    assert not runs_own_code()
    optimizer.note("by the user")
    optimizer.step()
    assert len(followed.updates) == 2 and [call.args for call in followed.calls] == [("by the user",)]
    del kept


def test_methods_are_followed_where_user_code_calls_them(optimizer: Noting) -> None:
    followed = Followed(optimizer)

    def closure() -> torch.Tensor:
        optimizer.note("closure")
        return torch.ones(())

    assert optimizer.step(closure) == 1.0
    assert optimizer.note_twice("user") == "user"
    assert [(call.name, *call.args) for call in followed.calls] == [("note", "closure"), ("note_twice", "user")]
    assert optimizer.state[optimizer]["notes"] == ["closure", "in step", "user", "user"]


def test_step_hooks_are_user_code() -> None:
    """Whether they have been registered before or after the tracking began."""
    plain = SGD([nn.Parameter(torch.ones(1))], 0.1)
    seen: list[tuple[str, bool]] = []
    plain.register_step_pre_hook(lambda *_: seen.append(("early pre-hook", runs_own_code(plain))))
    plain.register_step_post_hook(lambda *_: seen.append(("early post-hook", runs_own_code(plain))))
    undo = track_steps(plain)
    plain.register_step_pre_hook(lambda *_: seen.append(("late pre-hook", runs_own_code(plain))))
    plain.register_step_post_hook(lambda *_: seen.append(("late post-hook", runs_own_code(plain))))
    plain.step(lambda: seen.append(("body", runs_own_code(plain))) or torch.ones(()))
    undo()
    assert seen == [
        ("early pre-hook", False),
        ("late pre-hook", False),
        ("body", True),
        ("early post-hook", False),
        ("late post-hook", False),
    ]


def test_the_update_has_what_a_later_hook_sets(optimizer: Noting) -> None:
    rates: list[float] = []
    follow_steps(optimizer, lambda own, _: rates.append(own.param_groups[0]["lr"]))
    optimizer.register_step_pre_hook(lambda own, *_: own.param_groups[0].update(lr=0.5))
    optimizer.step()
    assert rates == [0.5]


def test_the_update_comes_after_the_closure(optimizer: Noting) -> None:
    order: list[str] = []
    follow_steps(
        optimizer,
        lambda *_: order.append("update"),
        evaluate=lambda optimizer, arguments, closure: (order.append("evaluate"), closure())[1],
    )
    optimizer.step(lambda: order.append("closure"))
    assert order == ["evaluate", "closure", "update"]


def test_a_closure_is_evaluated_once(optimizer: Noting) -> None:
    class Twice(SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            return closure()

    twice = Twice([nn.Parameter(torch.ones(1))], 0.1)
    follow_steps(twice, lambda *_: None, refused=LookupError)
    with pytest.raises(LookupError, match=r"Twice evaluates the loss several times within a step, .*such as AdamW"):
        twice.step(lambda: None)


class DrawsIfLarge(Optimizer):
    """Draws where a trial on small copies does not see it."""

    draw: Any = None

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        if max(p.numel() for group in self.param_groups for p in group["params"]) > 9:
            self.draw()
        return loss


@pytest.mark.parametrize(
    ("draw", "generator"),
    [
        (lambda: torch.rand(1), "torch's generator on the CPU"),
        (random.random, "Python's random"),
        (np.random.rand, "numpy.random"),
    ],
)
@pytest.mark.parametrize("with_closure", [True, False])
def test_a_step_that_draws_random_numbers_is_refused(draw: Any, generator: str, with_closure: bool) -> None:
    closures = [lambda: torch.rand(1)] if with_closure else []  # user code may draw
    weight = nn.Parameter(torch.ones(16))
    optimizer = DrawsIfLarge([weight])
    divided, before, after = True, list[Any](), list[Any]()
    optimizer.register_step_pre_hook(lambda *_: before.append(torch.rand(1)))
    follow_steps(optimizer, lambda *_: torch.rand(1), is_divided=lambda: divided, refused=LookupError)
    optimizer.register_step_post_hook(lambda *_: after.append(torch.rand(1)))
    optimizer.draw = lambda: None
    optimizer.step(*closures)
    assert (len(before), len(after)) == (1, 1)
    optimizer.draw = draw
    message = rf"DrawsIfLarge draws random numbers in its step \(from {re.escape(generator)}\)"
    with pytest.raises(LookupError, match=message):
        optimizer.step(*closures)
    assert len(after) == 1 and not runs_own_code()
    divided = False  # one process makes the whole step
    optimizer.step(*closures)
    assert len(after) == 2


def test_a_draw_before_the_closure_is_refused(optimizer: Noting) -> None:
    class Early(SGD):
        def step(self, closure: Any = None) -> Any:
            random.random()
            return super().step(closure)

    early = Early([nn.Parameter(torch.ones(1))], 0.1)
    follow_steps(early, lambda *_: None)
    with pytest.raises(RuntimeError, match="Early draws random numbers"):
        early.step(lambda: None)


@pytest.mark.parametrize("early", [True, False])
def test_schedulers(early: bool) -> None:
    """A scheduler replaces ``step`` of the object as well, before or after it is tracked."""
    optimizer = SGD([nn.Parameter(torch.ones(1))], 0.1)
    schedulers = [StepLR(optimizer, 1)] if early else []
    before = dict(vars(optimizer))
    followed = Followed(optimizer)
    schedulers.append(StepLR(optimizer, 1))
    for _ in range(2):
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()  # which would warn if it had missed the step
    assert len(followed.updates) == 2
    assert list(inspect.signature(SGD([nn.Parameter(torch.ones(1))], 0.1).step).parameters) == ["closure"]
    for undo in followed.undo:
        undo()
    if early:
        assert vars(optimizer)["step"] is before["step"]
    optimizer.step()
    assert len(followed.updates) == 2 and not optimizer._optimizer_step_pre_hooks


def test_what_a_tracked_step_shows(optimizer: Noting) -> None:
    expected = inspect.signature(optimizer.step)
    undo = track_steps(optimizer)
    assert inspect.signature(optimizer.step) == expected
    undo()
    assert "step" not in vars(optimizer) and not optimizer._optimizer_step_post_hooks


def test_own_code_of_several_optimizers(optimizer: Noting) -> None:
    other = SGD([nn.Parameter(torch.ones(1))], 0.1)
    with own_code(optimizer), own_code(other):
        assert runs_own_code() and runs_own_code(optimizer) and runs_own_code(other)
    with own_code(other):
        assert not runs_own_code(optimizer)


def test_arguments_of_a_step(optimizer: Noting) -> None:
    assert arguments_of_step(optimizer, (optimizer,), {}) == (None, {})
    assert arguments_of_step(optimizer, (optimizer, print), {"factor": 2.0}) == (print, {"factor": 2.0})
    with pytest.raises(TypeError, match=r"Noting\.step was called with a Tensor"):
        arguments_of_step(optimizer, (optimizer,), {"factor": torch.ones(1)})


def test_a_result_is_the_same_in_every_process(optimizer: Noting) -> None:
    call = MethodCall("note_twice", ("word",), {})
    assert same_result(optimizer, call, 1.5, lambda: {"stage 0": 1.5}) == 1.5
    with pytest.raises(RuntimeError, match=r"Noting\.note_twice returned 1\.5 .*, but 2\.5 for those of stage 1"):
        same_result(optimizer, call, 1.5, lambda: {"stage 0": 1.5, "stage 1": 2.5})
    with pytest.raises(RuntimeError, match=r"Noting\.note_twice returned a Tensor, which belongs to the parameters of"):
        same_result(optimizer, call, [torch.ones(1)], dict)


def test_hyperparameters_follow() -> None:
    whole, part = (AdamW([{"params": [nn.Parameter(torch.ones(2))]}, {"params": []}]) for _ in range(2))
    whole.param_groups[0].update(lr=0.25, betas=(0.5, 0.6))
    assert "params" not in hyperparameters(whole)[0]
    set_hyperparameters(part, hyperparameters(whole))
    assert part.param_groups[0]["lr"] == 0.25 and part.param_groups[0]["betas"] == (0.5, 0.6)
    assert len(part.param_groups[0]["params"]) == 1
    with pytest.raises(ValueError, match="shorter"):
        set_hyperparameters(part, hyperparameters(whole)[:1])


def test_after_each_step_of_the_user_a_function_is_called() -> None:
    optimizer, called = SGD([nn.Parameter(torch.ones(2))]), []
    undo = after_steps(optimizer, called.append)
    optimizer.step()
    undo()
    optimizer.step()
    assert called == [optimizer]


def test_the_function_is_called_before_the_hooks_of_the_user() -> None:
    """Under ZeRO it shares the new values, which these hooks may read or change."""
    optimizer, called = SGD([nn.Parameter(torch.ones(2))]), list[str]()
    optimizer.register_step_post_hook(lambda *_: called.append("early"))
    after_steps(optimizer, lambda own: called.append("in step" if runs_own_code(own) else "after step"))
    optimizer.register_step_post_hook(lambda *_: called.append("late"))
    follow_steps(optimizer, lambda *_: None)
    optimizer.step()
    assert called == ["after step", "early", "late"]


def test_a_hook_of_the_user_may_step_again() -> None:
    optimizer, called = SGD([nn.Parameter(torch.ones(2))]), list[int]()

    def again(*_: Any) -> None:
        called.append(len(called))
        if len(called) == 1:
            optimizer.step()

    optimizer.register_step_post_hook(again)
    for _ in range(2):
        after_steps(optimizer, lambda own: None)
    follow_steps(optimizer, lambda *_: None)
    optimizer.step()
    assert called == [0, 1]


def test_tensors_among_hyperparameters_are_sent_by_way_of_the_cpu() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], 0.1)
    optimizer.param_groups[0]["scale"] = torch.ones((), device="meta")
    with pytest.raises(NotImplementedError, match="meta"):  # which has no values to copy to the CPU
        hyperparameters(optimizer)
