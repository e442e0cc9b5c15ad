"""One optimizer over several processes: each runs the user's optimizer, restricted to the parameters that it owns.

``configure_optimizers`` runs once, on the whole model. What changes from step to step (learning rates, betas, ...) is
in ``param_groups`` and travels with each step, so schedulers stay where the user made them. Parameters are numbered
over all groups, as in ``Optimizer.state_dict()``.
"""

import inspect
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from strategies.common.torch_compat import norms_of, tree_map_only

_HOOKED_STEP = Optimizer.profile_hook_step(Optimizer.step).__code__
"""Of the function that torch puts around ``step`` of each class, to call the hooks."""


def restricted(optimizer: Optimizer, owned: Collection[Tensor]) -> Optimizer:
    """The same optimizer over those of its parameters that are in ``owned``.

    Every group is kept, an empty one too, so that groups have the same place everywhere. Hooks and the ``step`` that a
    learning-rate scheduler patches into the instance stay behind; they belong to the original.

    Args:
        optimizer: Any optimizer that steps its parameters from their gradients.
        owned: The parameters to keep; compared by identity.

    Returns:
        A new optimizer of the same class that shares the parameters and their state with the original.
    """
    kept = {id(tensor) for tensor in owned}
    cls, attributes = taken_apart(optimizer)
    attributes["param_groups"] = [
        {**group, "params": [p for p in group["params"] if id(p) in kept]} for group in optimizer.param_groups
    ]
    attributes["state"] = defaultdict(
        dict, {key: s for key, s in optimizer.state.items() if id(key) in kept or not isinstance(key, Tensor)}
    )
    return put_together(cls, attributes)


def taken_apart(optimizer: Optimizer) -> tuple[type[Optimizer], dict[str, Any]]:
    """Class and attributes, without hooks and without methods patched into the instance.

    For pickling: ``Optimizer.__getstate__`` loses the attributes that a subclass adds.
    """
    patched = {"step", "zero_grad", "state_dict", "load_state_dict", *added_methods(optimizer)}
    return type(optimizer), {k: v for k, v in vars(optimizer).items() if k not in patched and not k.endswith("_hooks")}


def put_together(cls: type[Optimizer], attributes: dict[str, Any]) -> Optimizer:
    """The inverse of :func:`taken_apart`."""
    optimizer = object.__new__(cls)
    optimizer.__setstate__(attributes)
    return optimizer


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Everything in the groups of ``optimizer`` but the parameters: learning rates, betas, weight decays, ...

    Tensors are copied: schedulers change them in place, perhaps before they have been sent.
    """
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), groups)


def set_hyperparameters(optimizer: Optimizer, values: Iterable[Mapping[str, Any]]) -> None:
    """The counterpart of :func:`hyperparameters`, on an optimizer with the same groups."""
    for group, new in zip(optimizer.param_groups, values, strict=True):
        group.update(new)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of all groups, in the order in which ``state_dict`` numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def numbers_of(optimizer: Optimizer, owned: Collection[Tensor]) -> list[int]:
    """The numbers of those parameters of ``optimizer`` that are in ``owned``, in order."""
    kept = {id(tensor) for tensor in owned}
    return [number for number, parameter in enumerate(parameters_of(optimizer)) if id(parameter) in kept]


def part_of(states: Mapping[Any, Any], numbers: Collection[int]) -> dict[Any, Any]:
    """Out of the states of a whole optimizer those of some parameters, and what it keeps under other keys."""
    wanted = set(numbers)
    return {key: state for key, state in states.items() if key in wanted or not isinstance(key, int)}


def in_order(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """States by the numbers of parameters; what an optimizer keeps under other keys comes last."""
    return dict(sorted(states.items(), key=lambda item: item[0] if isinstance(item[0], int) else math.inf))


def load_states(optimizer: Optimizer, states: Mapping[Any, Any]) -> None:
    """Loads the state of single parameters, converted to their device and type as ``load_state_dict`` does it.

    Args:
        optimizer: The optimizer, which may be restricted.
        states: Number of the parameter *in this optimizer* to its state, and what it keeps under other keys.
    """
    current = optimizer.state_dict()
    optimizer.load_state_dict({"state": dict(states), "param_groups": current["param_groups"]})


def check_optimizer_states(optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]) -> None:
    """Checks that the states in a checkpoint belong to the optimizers, before any of them is loaded.

    Raises:
        ValueError: If they do not.
    """
    if len(optimizers) != len(states):
        raise ValueError(
            f"the checkpoint has the states of {len(states)} optimizers, but configure_optimizers returned "
            f"{len(optimizers)}; none has been loaded"
        )
    for k, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
        check_optimizer_state(optimizer, state, f"optimizer {k}, a {type(optimizer).__name__}")


def check_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any], words: str) -> None:
    """Checks a state dict for one optimizer; see :func:`check_optimizer_states`."""
    saved = state.get("param_groups", [])  # a stand-in for an optimizer has none
    sizes = [[len(group["params"]) for group in groups] for groups in (optimizer.param_groups, saved)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{words}, has groups of {sizes[0]} parameters, but its state is for groups of {sizes[1]}; nothing of it "
            "has been loaded"
        )
    known = {number for group in saved for number in group["params"]}
    if foreign := [key for key in state.get("state", {}) if isinstance(key, int) and key not in known]:
        raise ValueError(
            f"{words}, has {len(parameters_of(optimizer))} parameters, but its state has unexpected entries "
            f"{foreign}; nothing of it has been loaded"
        )


def norms_of_gradients(parameters: Iterable[Tensor], norm_type: float) -> list[Tensor | None]:
    """The norm of the gradient of each parameter, a scalar; ``None`` where there is no gradient."""
    listed = list(parameters)
    grads = [p.grad for p in listed if p.grad is not None]
    norms = iter(norms_of(grads, norm_type) if grads else ())
    return [None if p.grad is None else next(norms) for p in listed]


def within_a_step(optimizer: Optimizer) -> bool:
    """For a step hook: whether this step is only a part of another one of the same optimizer.

    Where a subclass calls ``super().step()``, torch calls the hooks of that call too, but only if the base class has
    been used by itself before.
    """
    frame: FrameType | None = sys._getframe(1)
    depth = 0
    while frame is not None:
        depth += frame.f_code is _HOOKED_STEP and frame.f_locals["self"] is optimizer
        frame = frame.f_back
    return depth > 1


def added_methods(optimizer: Optimizer) -> tuple[str, ...]:
    """The public methods that an optimizer's class adds to those of ``torch.optim.Optimizer``, such as ``eval``."""
    cls = type(optimizer)
    if cls not in _added:
        names = [name for name in dir(cls) if not name.startswith("_") and not hasattr(Optimizer, name)]
        _added[cls] = tuple(name for name in names if isinstance(inspect.getattr_static(cls, name), FunctionType))
    return _added[cls]


_added: WeakKeyDictionary[type[Optimizer], tuple[str, ...]] = WeakKeyDictionary()
"""What :func:`added_methods` has found."""


@contextmanager
def narrowed(optimizer: Optimizer, owned: Iterable[Tensor]) -> Iterator[None]:
    """Within this, the groups of an optimizer have those of their parameters that are in ``owned``."""
    kept, whole = {id(p) for p in owned}, [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in kept]
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters


def arguments_of_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Callable[[], Any] | None, dict[str, Any]]:
    """What a step pre-hook gets: the closure, and the other arguments by their names.

    Raises:
        TypeError: If another process cannot make the step with these arguments.
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
    check_plain(f"{type(optimizer).__name__}.step", others)
    return closure, others


def check_plain(method: str, arguments: Any) -> None:
    """Checks that a method can be called in other processes with the same arguments.

    Raises:
        TypeError: If some are other than numbers, flags, strings and containers of those.
    """
    if foreign := _foreign(arguments):
        raise TypeError(
            f"{method} was called with a {foreign}. Parameters that it changes live in other processes, where it is "
            "called too, and only numbers, flags, strings and containers of those are sent to them. Call it before or "
            "after fit, or keep what it needs in the optimizer from the start."
        )


def check_same_result(method: str, result: Any, others: Mapping[str, Any]) -> None:
    """Checks that a method has returned in other processes, each for its own parameters, what it has here.

    Args:
        method: Its name.
        result: What it returned here.
        others: What it returned elsewhere, by a description of the process.

    Raises:
        RuntimeError: If the results differ or cannot be compared, so that none is that of one process.
    """
    if foreign := _foreign(result):
        raise RuntimeError(
            f"{method} returned a {foreign}, which belongs to the parameters of this process only; other processes "
            "have the rest of them. A method that returns nothing, numbers or strings can be called in mid-fit."
        )
    for process, other in others.items():
        if other != result:
            raise RuntimeError(
                f"{method} returned {result!r} for the parameters of this process, but {other!r} for those of "
                f"{process}, so neither is the value for all of them. Compute it from the optimizer's state_dict(), "
                "which is whole."
            )


def _foreign(value: Any) -> str:
    """The class of something that is not plain, if there is some."""
    if type(value) in (dict, list, tuple, set):
        items = [*value, *value.values()] if isinstance(value, dict) else value
        return next((found for item in items if (found := _foreign(item))), "")
    plain = isinstance(value, bool | int | float | complex | str | bytes | None | torch.dtype | torch.device)
    return "" if plain else type(value).__name__


class CalledOnce:
    """A closure that an optimizer may evaluate once in a step, and what is done after it.

    Args:
        closure: The user's.
        then: Called after it.
        refusal: Makes the error for a second evaluation.
    """

    def __init__(self, closure: Callable[[], Any], then: Callable[[], None], refusal: Callable[[], Exception]) -> None:
        self._closure: Callable[[], Any] | None = closure
        self._then, self._refusal = then, refusal

    def __call__(self) -> Any:
        if self._closure is None:
            raise self._refusal()
        closure, self._closure = self._closure, None
        result = closure()
        self._then()
        return result


class CarriedMethod:
    """Stands for a method of an optimizer that users call, and does what ``carry`` does instead.

    Where the optimizer calls it itself, in its step or in another method, every process does so, and nothing is to be
    carried.

    Args:
        optimizer: Whose method.
        name: Its name.
        carry: Called with the optimizer, the name, the method, its arguments and its keywords.
    """

    def __init__(self, optimizer: Optimizer, name: str, carry: Callable[..., Any]) -> None:
        self.optimizer, self._name, self._carry = optimizer, name, carry
        self._method = getattr(type(optimizer), name).__get__(optimizer)  # one in the instance would be such as this

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_called_by_itself(self.optimizer, sys._getframe(1)):
            return self._method(*args, **kwargs)
        check_plain(f"{type(self.optimizer).__name__}.{self._name}", [args, kwargs])
        return self._carry(self.optimizer, self._name, self._method, args, kwargs)


def _is_called_by_itself(optimizer: Optimizer, frame: FrameType | None) -> bool:
    """Whether a frame runs code of an optimizer's own step or methods, and not a closure or a hook of the user."""
    inner: FrameType | None = None
    while frame is not None:
        if frame.f_code is CalledOnce.__call__.__code__:
            return False
        if frame.f_code is CarriedMethod.__call__.__code__ and frame.f_locals["self"].optimizer is optimizer:
            return True
        if frame.f_code is _HOOKED_STEP and frame.f_locals["self"] is optimizer:
            step = frame.f_locals["func"]
            return inner is None or inner.f_code is getattr(step, "__code__", inner.f_code)
        inner, frame = frame, frame.f_back
    return False
