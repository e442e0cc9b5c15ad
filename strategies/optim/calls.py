"""Calls of the user's optimizer that other processes repeat: ``step``, and methods that its class adds to torch's.

Each call carries its arguments, which must be of plain types, and the current hyperparameters of the optimizer. The
hyperparameters may change from step to step, so learning-rate schedulers stay in the process in which the user made
them.

Other processes repeat (*follow*) only calls by user code. What an optimizer calls within its own step or methods runs
in every process anyway, because every process makes the step or calls the method::

    optimizer.step(closure)       user code      followed: every process steps
      ├─ step pre-hooks           user code
      ├─ body of step             own code
      │    ├─ super().step()      own code       not followed: a part of this step
      │    ├─ self.eval()         own code       not followed: a part of this step
      │    └─ closure()           user code
      └─ step post-hooks          user code
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from strategies.common.patching import replaced
from strategies.common.random_seeds import generator_states, used_since
from strategies.common.torch_compat import tree_map_only

INSTEAD = (
    "an optimizer that updates each parameter from its own gradient and state, such as AdamW, or train with "
    "strategy='ddp' or in one process."
)
"""The advice in messages about an optimizer that cannot be divided."""

_running: ContextVar[tuple[Optimizer, ...]] = ContextVar("optimizers whose own code runs", default=())
"""The optimizers whose own code runs in this thread, the innermost last; empty while user code runs."""

_added: WeakKeyDictionary[type[Optimizer], tuple[str, ...]] = WeakKeyDictionary()
"""Results of :func:`added_methods`, which ZeRO needs for each bucket in each step."""


# Whose code runs


def runs_own_code(optimizer: Optimizer | None = None) -> bool:
    """Return whether code of ``optimizer``, or of any optimizer if it is left out, runs in this thread.

    This covers steps of optimizers that :func:`track_steps` tracks, and methods that :func:`follow_methods` follows.
    """
    running = _running.get()
    return bool(running) if optimizer is None else any(each is optimizer for each in running)


@contextmanager
def own_code(optimizer: Optimizer) -> Iterator[None]:
    """Context whose body is marked as code of ``optimizer``."""
    token = _running.set((*_running.get(), optimizer))
    try:
        yield
    finally:
        _running.reset(token)


@contextmanager
def user_code() -> Iterator[None]:
    """Context whose body is marked as user code."""
    token = _running.set(())
    try:
        yield
    finally:
        _running.reset(token)


def track_steps(
    optimizer: Optimizer, draws: "Draws | None" = None, hook: Callable[..., Any] | None = None
) -> Callable[[], None]:
    """Mark the body of every ``step`` of an optimizer as the optimizer's own code; see :func:`runs_own_code`.

    Two step hooks enclose the body. The method ``step`` of the object is replaced as well, since torch calls no hook
    after a step that raises.

    Args:
        optimizer: The optimizer.
        draws: Refuses steps whose body draws random numbers.
        hook: A pre-hook that is called after all pre-hooks of the user, which may change hyperparameters.

    Returns:
        A function that ends the tracking.
    """
    ahead = [optimizer.register_step_pre_hook(each) for each in (hook, partial(_begin, draws)) if each is not None]
    end = optimizer.register_step_post_hook(partial(_end, draws))
    method, had, tracks = optimizer.step, "step" in vars(optimizer), True

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not tracks:  # tracking has ended, but a learning-rate scheduler still holds this function
            return method(*args, **kwargs)
        for handle in ahead:
            _hooks_of(handle).move_to_end(handle.id)  # behind all pre-hooks of the user
        behind = _hooks_of(end)
        first = [end.id, *(number for number, each in behind.items() if isinstance(each, _AfterStep))]
        if [*behind][: len(first)] != first:  # ahead of all post-hooks of the user, one of which may step again
            for number in reversed(first):
                behind.move_to_end(number, last=False)
        with nullcontext() if runs_own_code(self) else user_code():  # a step may call itself
            return method(*args, **kwargs)

    # Schedulers look for an attribute of the function, and GradScaler reads the signature.
    vars(step).update(vars(getattr(method, "__func__", method)), __wrapped__=type(optimizer).step)
    tracked = vars(optimizer)["step"] = MethodType(step, optimizer)

    def undo() -> None:
        nonlocal tracks
        tracks = False
        for handle in (*ahead, end):
            handle.remove()
        if vars(optimizer).get("step") is tracked:
            if had:
                vars(optimizer)["step"] = method
            else:
                del vars(optimizer)["step"]

    return undo


def _begin(draws: "Draws | None", optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if draws is not None and not runs_own_code(optimizer):
        draws.begin()
    _running.set((*_running.get(), optimizer))


def _end(draws: "Draws | None", optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _running.set(_running.get()[:-1])
    if draws is not None and not runs_own_code(optimizer):
        draws.check()


def _hooks_of(handle: Any) -> Any:
    """Return the ordered dict of hooks to which a handle belongs."""
    return handle.hooks_dict_ref()


# Random numbers


class Draws:
    """Refuses steps in which an optimizer's own code draws random numbers.

    Each process has its own generators, so it would draw different numbers than one process that makes the whole step.
    Before training starts, a trial on small copies (:mod:`~strategies.optim.trial`) finds most optimizers that draw
    random numbers. Some draw only for large parameters or in few steps. This class finds these by comparing the states
    of the global generators before and after each step.

    Args:
        optimizer: The optimizer.
        is_divided: Whether several processes make the step. Otherwise no step is refused.
        refused: Type of the error.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        is_divided: Callable[[], bool] = lambda: True,
        refused: type[Exception] = RuntimeError,
    ) -> None:
        self._name, self._is_divided, self._refused = type(optimizer).__name__, is_divided, refused
        self._before: dict[str, Any] = {}

    def begin(self) -> None:
        """Read the states of the generators, when the optimizer's own code begins or continues."""
        self._before = generator_states() if self._is_divided() else {}

    def check(self) -> None:
        """Compare the states, when the optimizer's own code ends or calls user code.

        Raises:
            Exception: Of the type ``refused``, if random numbers have been drawn.
        """
        if self._before and (used := used_since(self._before)):
            raise self._refused(draws_message(self._name, used))

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            self.check()


def draws_message(name: str, used: Iterable[str]) -> str:
    """Return the error message for an optimizer of the class ``name`` that has used some generators."""
    return (
        f"{name} draws random numbers in its step (from {' and '.join(used)}). Each process steps its own parameters "
        "and would draw other numbers than one process, so it cannot be divided over processes. If an option of "
        f"{name} switches that off, set it; if a thread that you have started draws them at the same time, give that "
        f"thread its own generator. Otherwise use {INSTEAD}"
    )


# Steps

Update = Callable[[Optimizer, dict[str, Any]], None]
"""Called with an optimizer and the arguments of its step, without the closure."""

Evaluate = Callable[[Optimizer, dict[str, Any], Callable[[], Any]], Any]
"""Called with an optimizer, the arguments of its step and the closure; returns what the closure returns."""


def follow_steps(
    optimizer: Optimizer,
    update: Update,
    *,
    evaluate: Evaluate = lambda optimizer, arguments, closure: closure(),
    is_divided: Callable[[], bool] = lambda: True,
    refused: type[Exception] = RuntimeError,
) -> Callable[[], None]:
    """Call ``update`` in each step of an optimizer, as soon as the gradients for the step are computed.

    The call is made after the closure if the step gets a closure, and before the step otherwise. A step within another
    step of the same optimizer (``super().step()``) does not count.

    Args:
        optimizer: The user's optimizer.
        update: Called once in each step.
        evaluate: Calls the closure.
        is_divided: Whether other processes make a part of the step. The optimizer must then draw no random numbers.
        refused: Type of the error for a step that evaluates its closure twice or draws random numbers.

    Returns:
        A function that undoes this.
    """
    draws = Draws(optimizer, is_divided, refused)
    return track_steps(optimizer, draws, _StepHook(update, evaluate, refused, draws))


def after_steps(optimizer: Optimizer, function: Callable[[Optimizer], None]) -> Callable[[], None]:
    """Call a function with the optimizer after each step of the optimizer; return a function that undoes this.

    If the steps are tracked (:func:`track_steps`), the function is called before all post-hooks of the user.
    """
    return optimizer.register_step_post_hook(_AfterStep(function)).remove


@dataclass(frozen=True)
class _AfterStep:
    """The step hook that :func:`after_steps` registers."""

    function: Callable[[Optimizer], None]

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.function(optimizer)


@dataclass(frozen=True)
class _StepHook:
    update: Update
    evaluate: Evaluate
    refused: type[Exception]
    draws: Draws

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if runs_own_code(optimizer):
            return None
        closure, arguments = arguments_of_step(optimizer, args, kwargs)
        if closure is None:
            self.update(optimizer, arguments)
            return None
        return args[:1], {**arguments, "closure": _CalledOnce(self, optimizer, arguments, closure)}


class _CalledOnce:
    """A closure that an optimizer may evaluate once in a step, followed by the update."""

    def __init__(
        self, hook: _StepHook, optimizer: Optimizer, arguments: dict[str, Any], closure: Callable[[], Any]
    ) -> None:
        self._hook, self._optimizer, self._arguments = hook, optimizer, arguments
        self._closure: Callable[[], Any] | None = closure

    def __call__(self) -> Any:
        if self._closure is None:
            raise self._hook.refused(
                f"{type(self._optimizer).__name__} evaluates the loss several times within a step, but other processes "
                "update their parameters after the first time. Use an optimizer that makes one update from one "
                "gradient, such as AdamW."
            )
        closure, self._closure = self._closure, None
        self._hook.draws.check()
        with user_code():
            result = self._hook.evaluate(self._optimizer, self._arguments, closure)
        self._hook.update(self._optimizer, self._arguments)
        self._hook.draws.begin()
        return result


# What travels with a call


def arguments_of_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Callable[[], Any] | None, dict[str, Any]]:
    """Return the closure and the other arguments, by name, that a step pre-hook has received.

    Raises:
        TypeError: If an argument cannot be sent to another process.
    """
    if len(args) == 1 and kwargs.keys() <= {"closure"}:
        return kwargs.get("closure"), {}
    signature = inspect.signature(type(optimizer).step)
    _, *bound = signature.bind(*args, **kwargs).arguments.items()
    others: dict[str, Any] = {}
    for name, value in bound:
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            others.update(value)
        else:
            others[name] = value
    closure = others.pop("closure", None)
    _check_plain(f"{type(optimizer).__name__}.step", others)
    return closure, others


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the groups of an optimizer without the parameters: learning rates, betas, weight decays and so on.

    Tensors are copied to the CPU, because RPC sends only CPU tensors, and because schedulers may change a tensor in
    place before it is sent.
    """
    return [
        {name: _copied(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]


def _copied(value: Any) -> Any:
    if type(value) in (bool, int, float, str, type(None)):  # searching a value for tensors takes several microseconds
        return value
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), value)


def set_hyperparameters(optimizer: Optimizer, values: Iterable[Mapping[str, Any]]) -> None:
    """Set hyperparameters that :func:`hyperparameters` returned, on an optimizer with the same groups."""
    for group, new in zip(optimizer.param_groups, values, strict=True):
        group.update(new)


def _check_plain(method: str, arguments: Any) -> None:
    if foreign := _foreign(arguments):
        raise TypeError(
            f"{method} was called with a {foreign}. Parameters that it changes live in other processes, where it is "
            "called too, and only numbers, flags, strings and containers of those are sent to them. Call it before or "
            "after fit, or keep what it needs in the optimizer from the start."
        )


def _foreign(value: Any) -> str:
    """Return the name of the class of an object in ``value`` that is not of a plain type, or an empty string."""
    if type(value) in (dict, list, tuple, set):
        items = [*value, *value.values()] if isinstance(value, dict) else value
        return next((found for item in items if (found := _foreign(item))), "")
    plain = isinstance(value, bool | int | float | complex | str | bytes | None | torch.dtype | torch.device)
    return "" if plain else type(value).__name__


# Other methods


@dataclass(frozen=True)
class MethodCall:
    """A call of a method that an optimizer's class adds to torch's.

    Attributes:
        name: Name of the method.
        args: Positional arguments, all of plain types.
        kwargs: Keyword arguments, all of plain types.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def on(self, optimizer: Optimizer) -> Any:
        """Make the call on an optimizer in this process."""
        method = getattr(type(optimizer), self.name)  # the attribute of the object is a FollowedMethod
        with own_code(optimizer):
            return method(optimizer, *self.args, **self.kwargs)


def added_methods(optimizer: Optimizer) -> tuple[str, ...]:
    """Return the public methods that an optimizer's class adds to ``torch.optim.Optimizer``, such as ``eval``."""
    cls = type(optimizer)
    if cls not in _added:
        names = [name for name in dir(cls) if not name.startswith("_") and not hasattr(Optimizer, name)]
        _added[cls] = tuple(name for name in names if isinstance(inspect.getattr_static(cls, name), FunctionType))
    return _added[cls]


def follow_methods(
    optimizer: Optimizer, call: Callable[[Optimizer, MethodCall], Any], holders: Iterable[Any]
) -> list[Callable[[], None]]:
    """Make every process repeat calls of the methods that an optimizer's class adds to torch's.

    Args:
        optimizer: The user's optimizer.
        call: Makes such a call in every process and returns its result.
        holders: Objects around the optimizer that have the same methods, such as a ``LightningOptimizer``.

    Returns:
        Functions that undo this.
    """
    return [
        replaced(holder, name, partial(_call_method, optimizer, call, name))
        for name in added_methods(optimizer)
        for holder in (optimizer, *holders)
    ]


def _call_method(
    optimizer: Optimizer, call: Callable[[Optimizer, MethodCall], Any], name: str, /, *args: Any, **kwargs: Any
) -> Any:
    made = MethodCall(name, args, kwargs)
    if runs_own_code(optimizer):
        return made.on(optimizer)
    _check_plain(f"{type(optimizer).__name__}.{name}", [args, kwargs])
    return call(optimizer, made)


def same_result(optimizer: Optimizer, call: MethodCall, result: Any, ask: Callable[[], Mapping[str, Any]]) -> Any:
    """Return the result of a method. Each process computes it from its own parameters, and all must be equal.

    Args:
        optimizer: The optimizer.
        call: The call.
        result: The result in this process.
        ask: Returns the results in the other processes, by the description of the process.

    Raises:
        RuntimeError: If the results differ or cannot be compared.
    """
    method = f"{type(optimizer).__name__}.{call.name}"
    if foreign := _foreign(result):
        raise RuntimeError(
            f"{method} returned a {foreign}, which belongs to the parameters of this process only; other processes "
            "have the rest of them. A method that returns nothing, numbers or strings can be called in mid-fit."
        )
    for process, other in ask().items():
        if other != result:
            raise RuntimeError(
                f"{method} returned {result!r} for the parameters of this process, but {other!r} for those of "
                f"{process}, so neither is the value for all of them. Compute it from the optimizer's state_dict(), "
                "which is whole."
            )
    return result


def same_result_on_ranks(optimizer: Optimizer, call: MethodCall, result: Any, group: ProcessGroup) -> Any:
    """Return the result of a method that every rank of a group has called; see :func:`same_result`.

    Nothing is compared if the method returned ``None`` or the optimizer itself.
    """

    def ask() -> dict[str, Any]:
        everyone: list[Any] = [None] * group.size()
        dist.all_gather_object(everyone, result, group=group)
        return {f"rank {rank}": other for rank, other in enumerate(everyone)}

    return result if result is None or result is optimizer else same_result(optimizer, call, result, ask)
