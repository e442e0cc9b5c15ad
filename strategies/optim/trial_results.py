"""What steps of small copies have changed, and whether that is the same for one process and for several."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from strategies.optim.restricted import is_by_element

_TOLERANCE = 1e-4


@dataclass
class TrialResult:
    """Results of steps.

    Attributes:
        changes: Change of each parameter since the start.
        values: Value of each parameter.
        states: State of each parameter.
        common: For each process whose hyperparameters count: those of all groups, states that belong to no parameter,
            and the number of elements of each group.
    """

    changes: list[Tensor]
    values: list[Tensor]
    states: list[Any]
    common: list[Any]


def merged_state(states: Sequence[dict[Any, Any]], pieces: Sequence[Tensor]) -> dict[Any, Any]:
    """Return the state of a whole parameter, given those of its rows."""
    if len(states) == 1:
        return states[0]
    merged: dict[Any, Any] = {}
    for key in dict.fromkeys(key for state in states for key in state):
        own = [state.get(key) for state in states]
        if all(isinstance(v, Tensor) and is_by_element(v, p.shape) for v, p in zip(own, pieces, strict=True)):
            merged[key] = torch.cat([v for v in own if isinstance(v, Tensor)])
        elif all(isinstance(v, dict) for v in own):
            merged[key] = merged_state([v for v in own if isinstance(v, dict)], pieces)
        else:  # a number that is the same for all rows; if it is not, this differs from the state of one process
            merged[key] = own[0] if all(_alike(own[0], other) for other in own) else own
    return merged


def difference(one: TrialResult, several: TrialResult) -> str:
    """Return in words what differs between the results of one process and of several, or an empty string."""
    for k, (change, other) in enumerate(zip(one.changes, several.changes, strict=True)):
        finite = change[change.isfinite()]
        rounding = 8 * torch.finfo(change.dtype).eps * _largest(one.values[k])
        if not _close(change, other, atol=_TOLERANCE * _largest(finite) + rounding):
            return "the values of a parameter"
    for state, other in zip(one.states, several.states, strict=True):
        if where := _differing(state, other, one.states):
            return f"the state {where} of a parameter"
    for groups, states, sizes in several.common:
        pairs = zip(one.common[0][0], one.common[0][2], groups, sizes, strict=True)
        for number, (group, size, other, other_size) in enumerate(pairs):
            same = {key: group[key] for key in element_counts(group, size, other, other_size)}
            if where := _differing(group, {**other, **same}):
                return f"{where} of parameter group {number}"
        if where := _differing(one.common[0][1], states):
            return f"the state {where}"
    return ""


def _differing(one: Mapping[Any, Any], other: Mapping[Any, Any], elsewhere: Sequence[Mapping[Any, Any]] = ()) -> str:
    """Return the key of the first value that differs, or an empty string.

    Args:
        one: The values of one process.
        other: The values of several processes.
        elsewhere: The same kind of values of one process, for all parameters. Some optimizers keep a number of all
            parameters, such as that of the steps, with the first one; with several processes, each has a first one.
    """
    for key in (*one, *(key for key in other if key not in one)):
        if key not in other:
            return repr(key)
        if key not in one:
            if not any(_is_number(values.get(key)) and _alike(values[key], other[key]) for values in elsewhere):
                return repr(key)
        elif isinstance(one[key], Mapping) and isinstance(other[key], Mapping):
            if _differing(one[key], other[key], [v[key] for v in elsewhere if isinstance(v.get(key), Mapping)]):
                return repr(key)
        elif not _alike(one[key], other[key]):
            return repr(key)
    return ""


def group_sizes(optimizer: Optimizer) -> list[int]:
    """Return the number of elements of the parameters of each group."""
    return [sum(p.numel() for p in group["params"]) for group in optimizer.param_groups]


def element_counts(group: Mapping[str, Any], size: int, other: Mapping[str, Any], other_size: int) -> list[str]:
    """Return the keys of hyperparameters that are the number of elements of the group, in one process and another."""
    return [
        key
        for key, value in group.items()
        if type(value) is int and value == size and type(other.get(key)) is int and other[key] == other_size
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0)


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or not (one.is_floating_point() or one.is_complex()):
            return one.shape == other.shape and torch.equal(one, other)
        return _close(one, other, atol=_TOLERANCE * _largest(one))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return not _differing(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float | int) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=_TOLERANCE) or (math.isnan(one) and math.isnan(other))
    return type(one) is type(other) and (not isinstance(one, str | bool) or one == other)


def _close(one: Tensor, other: Tensor, *, atol: float) -> bool:
    return torch.allclose(one, other, rtol=_TOLERANCE, atol=atol, equal_nan=True)


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0
