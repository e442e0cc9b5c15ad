"""One process of a trial: its small copy of the optimizer, and the comparison with the process that has everything."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from strategies.optim.calls import hyperparameters
from strategies.optim.restricted import is_by_element
from strategies.optim.small_copies import CopyingWay, RowIndex, rows_of, small_copy, small_parameters

_TOLERANCE = 1e-4


class TrialProcess:
    """A small copy of an optimizer over some of the parameters, or over some of their rows.

    Attributes:
        optimizer: The copy.
        pieces: The small parameters that the copy steps, by the number of the parameter in ``sample``.
        rows: The rows of the small parameters of which ``pieces`` consist.

    Args:
        optimizer: The original.
        sample: The parameters that have small copies.
        share: The parameters in ``sample`` that this process steps.
        rows: See above.
        way: How the copy is made.
    """

    def __init__(
        self, optimizer: Optimizer, sample: Sequence[Tensor], share: Sequence[Tensor], rows: RowIndex, way: CopyingWay
    ) -> None:
        numbers = {id(p): k for k, p in enumerate(sample)}
        small = {
            key: rows_of(p, rows) for key, p in zip(numbers, small_parameters(sample), strict=True) if p[rows].numel()
        }
        stepped = [p for p in share if id(p) in small]
        self.optimizer = small_copy(optimizer, small, stepped, rows, way)
        self.pieces = {numbers[id(p)]: small[id(p)] for p in stepped}
        self.rows, self._way = rows, way
        self._start = {k: p.detach().clone() for k, p in self.pieces.items()}

    def set_gradients(self, grads: Sequence[Tensor]) -> None:
        """Give each piece its part of the gradient of the small parameter."""
        for k, p in self.pieces.items():
            grad = grads[k][self.rows].to(p, copy=True)  # the step may change it
            p.grad = grad.to_sparse(1) if self._way.sparse and p.ndim else grad

    def difference(self, whole: "TrialProcess", *, leads: bool) -> str:
        """Describe what differs from the process that steps everything; return an empty string if nothing differs.

        Args:
            whole: The process that steps everything.
            leads: Whether the hyperparameters of this process count.
        """
        shapes, everywhere = {k: p.shape for k, p in whole.pieces.items()}, [*map(whole._state, whole.pieces)]
        for k, p in self.pieces.items():
            value = whole.pieces[k].detach()
            change = value - whole._start[k]
            rounding = 8 * torch.finfo(value.dtype).eps * _largest(value)
            tolerance = _TOLERANCE * _largest(change) + rounding
            if not _close(change[self.rows], p.detach() - self._start[k], atol=tolerance):
                return "the values of a parameter"
        for k in self.pieces:
            if where := _differing(_rows_of_state(whole._state(k), shapes[k], self.rows), self._state(k), everywhere):
                return f"the state {where} of a parameter"
        if not leads:
            return ""
        groups, owns = hyperparameters(whole.optimizer), hyperparameters(self.optimizer)
        for number, (group, own) in enumerate(zip(groups, owns, strict=True)):
            if where := _differing(group, {**own, **{key: group[key] for key in self._element_counts(whole, number)}}):
                return f"{where} of parameter group {number}"
        where = _differing(_common_state(whole.optimizer), _common_state(self.optimizer))
        return f"the state {where}" if where else ""

    def go_on_from(self, whole: "TrialProcess") -> None:
        """Drop states that ``whole`` does not have, and take over its numbers of elements, as from its checkpoint."""
        for k in self.pieces:
            _leave_out(self._state(k), whole._state(k))
        for number, (group, like) in enumerate(
            zip(self.optimizer.param_groups, whole.optimizer.param_groups, strict=True)
        ):
            group.update({key: like[key] for key in self._element_counts(whole, number)})

    def _state(self, k: int) -> Any:
        return self.optimizer.state.get(self.pieces[k], {})

    def _element_counts(self, whole: "TrialProcess", number: int) -> list[str]:
        """Return the keys of hyperparameters that equal the number of elements of a group, here and in ``whole``."""
        groups = [process.optimizer.param_groups[number] for process in (whole, self)]
        sizes = [sum(p.numel() for p in group["params"]) for group in groups]
        return [
            key
            for key in groups[0]
            if all(
                type(group.get(key)) is int and group[key] == size for group, size in zip(groups, sizes, strict=True)
            )
        ]


def _common_state(optimizer: Optimizer) -> dict[Any, Any]:
    """Return the states that do not belong to a parameter."""
    return {key: state for key, state in optimizer.state.items() if not isinstance(key, Tensor)}


def _rows_of_state(state: Any, shape: Sequence[int], rows: RowIndex) -> Any:
    """Return a state for some rows: tensors with an entry for each element of the parameter are cut to these rows."""
    if isinstance(state, dict):
        return {key: _rows_of_state(value, shape, rows) for key, value in state.items()}
    if rows is ... or not isinstance(state, Tensor) or not is_by_element(state, shape):
        return state
    part = state.reshape(shape)[rows]
    return part if state.ndim == len(shape) else part.flatten()


def _leave_out(state: Any, like: Any) -> None:
    """Delete the entries of a state that are missing in another state of the same parameter."""
    for key in [*state]:
        if key not in like:
            del state[key]
        elif isinstance(state[key], dict) and isinstance(like[key], dict):
            _leave_out(state[key], like[key])


def _differing(one: Mapping[Any, Any], other: Mapping[Any, Any], elsewhere: Sequence[Mapping[Any, Any]] = ()) -> str:
    """Return the key of the first value that differs, or an empty string.

    Args:
        one: The values in the process that steps everything.
        other: The values in one of the several processes.
        elsewhere: The values of the same kind in the process that steps everything, for all parameters. Some optimizers
            keep a number for all parameters, such as the number of steps, in the state of the first parameter. With
            several processes, each process has a first parameter.
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
