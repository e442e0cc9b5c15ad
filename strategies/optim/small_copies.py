"""Small copies of an optimizer: over a few parameters of a few elements each, with random values and its states.

The original is not changed.
"""

import copy
import inspect
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.optim.restricted import parameters_of, put_together, taken_apart

RowIndex = slice | EllipsisType
"""An index of a parameter: a slice for some of its rows, or ``...`` for the whole parameter, even if it is a scalar."""

ELEMENTS = 3
"""Number of elements of a copy of a parameter along each dimension."""


@dataclass(frozen=True)
class CopyingWay:
    """A way to make small copies: with or without the optimizer's states, with dense or sparse gradients."""

    with_state: bool
    sparse: bool


WAYS = (CopyingWay(True, False), CopyingWay(False, False), CopyingWay(True, True))


def _few_elements(shape: Sequence[int]) -> list[int]:
    return [min(size, ELEMENTS) for size in shape]


def small_parameters(
    sample: Sequence[Tensor], shape_of: Callable[[Sequence[int]], list[int]] = _few_elements
) -> list[Tensor]:
    """Return random parameters with the same number of dimensions, dtype and device; each call returns equal values."""
    generator = torch.Generator().manual_seed(0)
    made: list[Tensor] = []
    for p in sample:
        value = torch.randn(shape_of(p.shape), generator=generator).to(p.dtype).to("cpu" if p.is_meta else p.device)
        small = nn.Parameter(value)
        vars(small).update({name: own for name, own in vars(p).items() if not isinstance(own, Tensor)})
        made.append(small)
    return made


def rows_of(small: Tensor, rows: RowIndex) -> Tensor:
    """Return a parameter that consists of some rows of a small parameter."""
    if rows is ...:
        return small
    own = nn.Parameter(small.detach()[rows].clone())
    vars(own).update(vars(small))
    return own


def small_copy(
    optimizer: Optimizer,
    small: Mapping[int, Tensor],
    share: Sequence[Tensor],
    rows: RowIndex,
    way: CopyingWay,
) -> Optimizer:
    """Return a copy of the optimizer over some of the small parameters, or over some of their rows."""
    cls, attributes = taken_apart(optimizer)
    kept = {id(p) for p in share}
    # References to a parameter become references to its small copy, or to a parameter that is never stepped.
    memo: dict[int, Any] = {id(p): small.get(id(p), nn.Parameter(torch.zeros(1))) for p in parameters_of(optimizer)}
    state = copy.copy(optimizer.state)
    state.clear()
    new = {name: _copied(value, memo) for name, value in attributes.items() if name not in ("param_groups", "state")}
    new["param_groups"] = [
        {
            **{name: _copied(value, memo) for name, value in group.items() if name != "params"},
            "params": [small[id(p)] for p in group["params"] if id(p) in kept and id(p) in small],
        }
        for group in optimizer.param_groups
    ]
    if way.with_state:
        for key, value in optimizer.state.items():
            if not isinstance(key, Tensor):
                state[key] = _copied(value, memo)
            elif id(key) in kept:
                like = small[id(key)]
                state[like] = {name: _small_state(own, key, like, memo, rows) for name, own in value.items()}
    new["state"] = state
    return put_together(cls, new)


def _copied(value: Any, memo: Mapping[int, Any]) -> Any:
    """Return a copy of a value that a step may change; a value that cannot be copied is shared."""
    if isinstance(value, nn.Module):
        return value
    if isinstance(value, torch.Generator):
        return value.clone_state()
    try:
        return copy.deepcopy(value, dict(memo))
    except Exception:  # copying calls methods of the object, which may raise anything
        return value


def _small_state(value: Any, original: Tensor, small: Tensor, memo: Mapping[int, Any], rows: RowIndex) -> Any:
    """Return the part of a state for the first elements of its parameter, or for some rows of these elements."""
    if isinstance(value, list | tuple):
        return type(value)([_small_state(item, original, small, memo, rows) for item in value])
    if not isinstance(value, Tensor):
        return _copied(value, memo)
    if value.is_meta:
        value = torch.zeros_like(value, device="cpu")
    value = value.detach()
    if value.ndim == 1 and original.ndim != 1 and value.numel() == original.numel():  # flattened
        return value[: small.numel()].clone()
    first = value[tuple(slice(ELEMENTS) for _ in value.shape)]
    return (first[rows] if value.shape == original.shape else first).clone()


def mode_switch(optimizer: Optimizer, mode: str) -> Callable[[], Any] | None:
    """Return the method that switches an optimizer to a mode; ``None`` if it has no modes."""
    function = getattr(type(optimizer), mode, None)
    return partial(function, optimizer) if inspect.isfunction(function) and _takes_nothing(function) else None


def _takes_nothing(method: Callable[..., Any]) -> bool:
    _, *others = inspect.signature(method).parameters.values()
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in others)


@contextmanager
def undisturbed(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Context that ignores warnings of optimizers, and restores random states and the number of threads on exit."""
    python, numbers, threads = random.getstate(), np.random.get_state(), torch.get_num_threads()
    gpus = {p.device.index for p in parameters if p.is_cuda}
    with torch.random.fork_rng(devices=sorted(gpus)), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)  # several threads are slower for so few elements
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            random.setstate(python)
            np.random.set_state(numbers)
