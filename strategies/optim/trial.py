"""Finds out whether an optimizer can be divided over processes, by steps of small copies, as a whole and in parts.

    one process          step of all parameters ──────────────┐
    several processes    step of part 0, step of part 1 ──────┴─▶ same parameters, states and hyperparameters?

A part is some of the parameters, or, under ZeRO stage 3, some rows of every parameter. The copies have a few parameters
of a few elements each, with random values. The original is not changed. A step of a copy also shows how large the
states of each parameter are.
"""

import copy
import inspect
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.common.generators import generator_states, used_since
from strategies.common.live_bytes import LiveBytes
from strategies.common.trees import tensors_in
from strategies.optim.calls import INSTEAD, draws_message, hyperparameters, set_hyperparameters
from strategies.optim.restricted import is_by_element, parameters_of, put_together, taken_apart

_STEPS = 10
_TIMED_STEPS = 7
_ELEMENTS = 3
"""How many elements a copy of a parameter has along each dimension."""

_ELEMENTS_FOR_SIZES = 2**16
"""How many elements a copy has whose states are measured: optimizers with 8-bit states use 32 bits for small ones."""

_ROWS = 2
"""How many of these the first of two copies has, if each copy has some rows of every parameter."""

_PER_PART = 2
"""How many parameters of each group and part have a copy; one, if there are many groups."""

_MANY_GROUPS = 16
_TOLERANCE = 1e-4


def check_divisible(optimizer: Optimizer, parts: Sequence[Collection[Tensor]] | None = None) -> None:
    """Check that processes that each step some of the parameters get the result of one process.

    Args:
        optimizer: The optimizer of the whole model.
        parts: For a pipeline, the parameters of each process; the last process is the driver, whose hyperparameters the
            others use. By default, the check is for ranks that may divide the parameters in any way, each with its own
            hyperparameters.

    Raises:
        ValueError: If the results differ, or if the optimizer has no parameters.
    """
    name = type(optimizer).__name__
    if parts is None and not parameters_of(optimizer):
        raise ValueError(f"{name} has no parameters, so there is no state to divide; give it those to train.")
    inner = [type(value).__name__ for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    if inner:
        raise ValueError(
            f"{name} steps another optimizer ({inner[0]}) within its own step, which other processes cannot follow; "
            "return the inner optimizer."
        )
    shares, alone = _shares(optimizer, parts), parts is not None and len(parts) == 1
    everything = [p for share in shares for p in share]
    missing = _required_arguments(type(optimizer))
    with _undisturbed(everything):
        if not set(missing) - {"closure"}:
            whole, attempt = _tried_as_a_whole(optimizer, everything, always_closure=bool(missing), may_draw=alone)
        if missing:
            raise ValueError(_needs_argument(name, ", ".join(missing)))
        try:
            divided = _Trial(optimizer, shares, attempt, leads=parts is not None, may_draw=alone).run(whole)
        except Exception as error:
            raise ValueError(
                f"{name} cannot be divided over processes: its step of a part of the parameters fails "
                f"({type(error).__name__}: {error}). Use {INSTEAD}"
            ) from error
    for one, several in zip(whole, divided, strict=True):
        if where := _difference(one, several):
            raise ValueError(
                f"{name} cannot be divided over processes: what it does to one parameter depends on parameters in "
                f"other processes, for example by a norm or a step size over all of them (in a trial on small copies "
                f"{where} differed). If an option of {name} does that, turn it off; to clip by the norm of all "
                f"gradients, set the Trainer's gradient_clip_val, which counts every process. Otherwise use {INSTEAD}"
            )


def check_by_element(optimizer: Optimizer) -> None:
    """Check that processes that each step some rows of every parameter get the result of one process.

    Args:
        optimizer: The optimizer of the whole model, which has passed :func:`check_divisible`.

    Raises:
        ValueError: If the results differ.
    """
    name = type(optimizer).__name__
    sample = [p for share in _shares(optimizer, None) for p in share]
    with _undisturbed(sample):
        whole, attempt = _tried_as_a_whole(optimizer, sample, always_closure=False)
        try:
            by_rows = _Trial(optimizer, [sample, sample], attempt, by_rows=True).run(whole)
        except Exception as error:
            where = f"the step of some rows fails ({type(error).__name__}: {error})"
        else:
            where = next(
                (f"{found} differed" for pair in zip(whole, by_rows, strict=True) if (found := _difference(*pair))), ""
            )
    if where:
        raise ValueError(
            f"{name} cannot be used under stage=3, where each process steps some rows of every parameter: what it does "
            f"to one element depends on others, for example by a norm or by a product of matrices (in a trial on small "
            f"copies, {where}). Use stage=2, which leaves parameters whole, or an optimizer that updates each element "
            "by itself, such as AdamW."
        )


def state_bytes(optimizer: Optimizer) -> dict[Tensor, int]:
    """Return how large the states of each trained parameter are, in bytes.

    Only states with an element for each element of the parameter count, so the states of an optimizer that keeps a
    matrix in parts, such as Adafactor, are larger than this in fact, and none is smaller.

    Returns:
        The bytes by parameter; for all of them 0 if a small copy of the optimizer cannot be stepped.
    """
    alike: dict[Any, list[Tensor]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if p.requires_grad:
                alike.setdefault((number, p.ndim, p.dtype, p.device), []).append(p)
    largest = [max(parameters, key=Tensor.numel) for parameters in alike.values()]
    sizes = dict.fromkeys(chain.from_iterable(alike.values()), 0)
    with _undisturbed(largest):
        for attempt in (_Attempt(False, False), _Attempt(False, True)):
            try:
                per_element = _state_bytes_per_element(optimizer, largest, attempt)
            except Exception:  # optimizers raise errors of any type, and need not be tried here to be used
                continue
            for parameters, number_bytes in zip(alike.values(), per_element, strict=True):
                sizes.update({p: number_bytes * p.numel() for p in parameters})
            break
    return sizes


def _state_bytes_per_element(optimizer: Optimizer, sample: Sequence[Tensor], attempt: "_Attempt") -> list[int]:
    """Step a copy over copies of ``sample``; return the bytes of state for each element of each of them."""
    small = _small_parameters(sample, _shape_for_sizes)
    own = _small_copy(optimizer, dict(zip(map(id, sample), small, strict=True)), sample, attempt)
    for p in small:
        grad = torch.ones_like(p)
        p.grad = grad.to_sparse(1) if attempt.sparse and p.ndim else grad
    if (switch := _switch(own, "train")) is not None:
        switch()
    own.step()
    return [
        sum(value.element_size() for value in tensors_in(dict(own.state.get(p, {}))) if value.numel() == p.numel())
        for p in small
    ]


@dataclass(frozen=True)
class StepCost:
    """What a step of an optimizer over some parameters costs.

    Attributes:
        seconds: The median time of a step.
        extra_bytes: What the step takes at most, beyond parameters, gradients and states.
        together: Whether it takes this for all parameters at the same time (``foreach``), or for one after another.
    """

    seconds: float = 0.0
    extra_bytes: int = 0
    together: bool = False

    @classmethod
    def of_all(cls, parts: Sequence["StepCost"]) -> "StepCost":
        """Return the cost of a step over several groups of parameters."""
        together = [part.extra_bytes for part in parts if part.together]
        after = [part.extra_bytes for part in parts if not part.together]
        extra = max(sum(together), *after, 0)
        return cls(sum(part.seconds for part in parts), extra, together=bool(together))


class StepCosts:
    """Measures steps of an optimizer, on copies of some of its parameters that are as large as these.

    Parameters of the same shapes, dtypes and groups are measured once.

    Attributes:
        refused: The error of a copy that could not be stepped.

    Args:
        optimizer: The optimizer, which is not changed.
        between: Called before each step that is measured.
        clock: Returns the time, after all work on the devices is done.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        between: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._optimizer, self._between, self._clock = optimizer, between, clock
        self._group_of = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._known: dict[Any, StepCost] = {}
        self.refused: Exception | None = None

    def of(self, parameters: Iterable[Tensor]) -> StepCost:
        """Return the cost of a step over those of the parameters that the optimizer steps.

        It is nothing if a copy of the optimizer cannot be stepped, and for parameters on the ``meta`` device.
        """
        stepped = [p for p in parameters if p in self._group_of and p.requires_grad and not p.is_meta]
        key = tuple((self._group_of[p], p.shape, p.dtype, p.device) for p in stepped)
        if key not in self._known:
            self._known[key] = self._measured(stepped) if stepped else StepCost()
        return self._known[key]

    def _measured(self, stepped: Sequence[Tensor]) -> StepCost:
        threads = torch.get_num_threads()
        for sparse in (False, True):
            with _undisturbed(stepped):
                torch.set_num_threads(threads)
                try:
                    return self._steps(stepped, _Attempt(False, sparse))
                except Exception as error:  # optimizers raise errors of any type
                    refused = error
        self.refused = refused
        return StepCost()

    def _steps(self, stepped: Sequence[Tensor], attempt: "_Attempt") -> StepCost:
        copies = _small_parameters(stepped, list)
        own = _small_copy(self._optimizer, dict(zip(map(id, stepped), copies, strict=True)), stepped, attempt)
        for p in copies:
            grad = torch.full_like(p, 1e-3)
            p.grad = grad.to_sparse(1) if attempt.sparse and p.ndim else grad
        if (switch := _switch(own, "train")) is not None:
            switch()
        own.step()  # makes the states
        with LiveBytes() as live:
            own.step()
        seconds = []
        for _ in range(_TIMED_STEPS):
            self._between()
            begin = self._clock()
            own.step()
            seconds.append(self._clock() - begin)
        return StepCost(statistics.median(seconds), live.peak, self._is_together(stepped))

    def _is_together(self, stepped: Sequence[Tensor]) -> bool:
        """Return whether a step works on lists of tensors: if asked to, and for CUDA by default."""
        for p in stepped:
            group = self._optimizer.param_groups[self._group_of[p]]
            by_default = "foreach" in group and p.is_cuda and not group.get("fused")
            if group.get("foreach") or (group.get("foreach") is None and by_default):
                return True
        return False


def _shape_for_sizes(shape: Sequence[int]) -> list[int]:
    """Return a shape of few elements with a different size for each dimension, so that no two parts look alike."""
    side = int(_ELEMENTS_FOR_SIZES ** (1 / max(1, len(shape))))
    return [min(size, max(1, side - place)) for place, size in enumerate(shape)]


class _Refused(ValueError):
    """An error for which no other attempt can make up."""


@dataclass(frozen=True)
class _Attempt:
    """A way to make small copies: with or without the optimizer's states, with dense or sparse gradients."""

    with_state: bool
    sparse: bool


_ATTEMPTS = (_Attempt(True, False), _Attempt(False, False), _Attempt(True, True))


@dataclass
class _Result:
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


def _required_arguments(cls: type[Optimizer]) -> list[str]:
    """Return the arguments of ``step`` that have no default."""
    _, *parameters = inspect.signature(cls.step).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variable]


def _needs_argument(name: str, what: str) -> str:
    return (
        f"{name}.step needs an argument ({what}), but each process steps its own parameters by step() without "
        f"arguments, when their gradients are there. Give it a default in a subclass that steps from these gradients, "
        f"or use {INSTEAD}"
    )


def _shares(optimizer: Optimizer, parts: Sequence[Collection[Tensor]] | None) -> list[list[Tensor]]:
    """Return, for each part, some parameters of each group that represent the others."""
    many = len(optimizer.param_groups) > _MANY_GROUPS
    number = 1 if many else _PER_PART
    groups = [[p for p in g["params"] if p.is_floating_point() or p.is_complex()] for g in optimizer.param_groups]
    if parts is None:  # two ranks, to which parameters are dealt in turn
        chosen = [(k + g, p) for g, group in enumerate(groups) for k, p in enumerate(group[: 2 * number])]
        return [share for rank in range(2) if (share := [p for place, p in chosen if place % 2 == rank])]
    owned = [{id(p) for p in part} for part in parts]
    return [[p for group in groups for p in [p for p in group if id(p) in own][:number]] for own in owned]


def _tried_as_a_whole(
    optimizer: Optimizer, sample: Sequence[Tensor], *, always_closure: bool, may_draw: bool = False
) -> tuple[list[_Result], _Attempt]:
    """Return the results of one process, and the first way to make copies that works."""
    errors: list[Exception] = []
    for attempt in _ATTEMPTS:
        try:
            trial = _Trial(optimizer, [sample], attempt, always_closure=always_closure, may_draw=may_draw)
            return trial.run(), attempt
        except _Refused:
            raise
        except Exception as error:  # optimizers raise errors of any type
            errors.append(error)
    raise ValueError(
        f"{type(optimizer).__name__} cannot be tried on small copies of its parameters "
        f"({type(errors[0]).__name__}: {errors[0]}), so it is unknown whether it can be divided over processes. Use "
        f"{INSTEAD}"
    ) from errors[0]


class _Trial:
    """Steps of small copies of an optimizer.

    Args:
        optimizer: The original.
        shares: The parameters that each copy steps.
        attempt: How copies are made.
        leads: Whether the last copy sends its hyperparameters to the others before they step.
        always_closure: Whether a step without a closure fails.
        by_rows: Whether all shares are the same, and each copy steps other rows of these parameters.
        may_draw: Whether a step may draw random numbers, as in a run with one process.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        shares: Sequence[Sequence[Tensor]],
        attempt: _Attempt,
        *,
        leads: bool = False,
        always_closure: bool = False,
        by_rows: bool = False,
        may_draw: bool = False,
    ) -> None:
        self._name, self._attempt = type(optimizer).__name__, attempt
        self._takes_closure = len(inspect.signature(type(optimizer).step).parameters) > 1
        self._leads, self._always_closure, self._may_draw = leads, always_closure, may_draw
        copied = {id(p) for share in shares for p in share}
        sample = [p for p in dict.fromkeys(parameters_of(optimizer)) if id(p) in copied]
        self._copies = []
        pieces: dict[int, list[Tensor]] = {id(p): [] for p in sample}
        for number, share in enumerate(shares):
            small = dict(zip(map(id, sample), _small_parameters(sample), strict=True))
            if by_rows:
                rows = slice(_ROWS) if number == 0 else slice(_ROWS, None)
                small = {key: _rows_of(p, rows) for key, p in small.items() if len(p[rows])}
            stepped = [p for p in share if id(p) in small]
            self._copies.append(_small_copy(optimizer, small, stepped, attempt, rows if by_rows else slice(None)))
            for p in stepped:
                pieces[id(p)].append(small[id(p)])
        self._leader = self._copies[-1]
        self._pieces = [pieces[id(p)] for p in sample]
        """For each parameter the one that is stepped in its place, or those with its rows."""
        self._parameters = [piece for parts in self._pieces for piece in parts]
        self._gpus = [p.device for p in self._parameters if p.is_cuda]
        self._start = self._values()
        self._generator = torch.Generator().manual_seed(1)
        self._directions = [torch.randn(value.shape, generator=self._generator) for value in self._start]

    def run(self, whole: Sequence[_Result] = ()) -> list[_Result]:
        """Return the results at several moments: in the middle, after the last step, and after an infinite gradient.

        Args:
            whole: The results of one process, if they are known. In the middle, the copies lose states that it has not
                and get its numbers of elements, as if they went on from its checkpoint.
        """
        results = []
        self._call("train")
        for number in range(_STEPS):
            self._step(number)
            if number == _STEPS // 2:
                self._call("eval")
                results.append(self._result())
                if whole:
                    self._go_on_from(whole[0])
                self._call("train")
        results.append(self._result())
        if not whole or len(results) < len(whole):
            try:
                self._step(_STEPS, infinite=True)
            except Exception:  # the optimizer refuses infinite gradients by an error
                if whole:
                    raise
            else:
                results.append(self._result())
        return results

    def _step(self, number: int, *, infinite: bool = False) -> None:
        calls, before = 0, [p.detach().clone() for p in self._parameters]

        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise _Refused(
                    f"{self._name} evaluates the loss several times within a step, in which each process changes its "
                    f"own parameters only, so it cannot be divided over processes. Use {INSTEAD}"
                )
            if any(not torch.equal(p, b) for p, b in zip(self._parameters, before, strict=True)):
                raise _Refused(
                    f"{self._name} changes parameters within its step before it evaluates the loss, which other "
                    f"processes cannot follow, so it cannot be divided over processes. Use {INSTEAD}"
                )
            self._set_gradients(number, infinite)
            self._step_others()
            return torch.tensor(1.0 / (number + 1))

        if self._takes_closure and (self._always_closure or number % 2 == 0):
            step: Any = self._leader.step
            self._seeded(lambda: step(closure))
            return
        self._set_gradients(number, infinite)
        self._step_others()
        try:
            self._seeded(self._leader.step)
        except Exception as error:
            if len(self._copies) == 1 and not infinite:
                what = f"a closure; without it: {type(error).__name__}: {error}"
                raise _Refused(_needs_argument(self._name, what)) from error
            raise

    def _step_others(self) -> None:
        for own in self._copies[:-1]:
            self._lead(own)
            self._seeded(own.step)

    def _seeded(self, step: Callable[..., Any]) -> None:
        """Step from the same random state each time, and refuse steps that draw random numbers they must not draw."""
        random.seed(0)
        np.random.seed(0)
        torch.default_generator.manual_seed(0)
        for gpu in self._gpus:
            torch.cuda.default_generators[gpu.index].manual_seed(0)
        before = generator_states()
        step()
        if not self._may_draw and (used := used_since(before)):
            raise _Refused(draws_message(self._name, used))

    def _call(self, method: str) -> None:
        """Switch the copies to a mode, if the optimizer has modes."""
        for own in self._copies:  # the last copy is the leader
            if (switch := _switch(own, method)) is not None:
                if own is not self._leader:
                    self._lead(own)
                switch()

    def _lead(self, own: Optimizer) -> None:
        if self._leads:
            set_hyperparameters(own, hyperparameters(self._leader))

    def _set_gradients(self, number: int, infinite: bool) -> None:
        for k, (pieces, direction) in enumerate(zip(self._pieces, self._directions, strict=True)):
            size = 10.0 ** (((3 * k + 2 * number) % 7 - 3) / 1.5)  # 0.01 to 100, different for each parameter
            noise = torch.randn(direction.shape, generator=self._generator)
            if number == _STEPS - 1:
                size *= 1e4
            grad = ((direction + 0.5 * noise) * size).clamp(-1e4, 1e4)
            if infinite and k == 0:
                grad = torch.full_like(grad, math.inf)
            parts = grad.split([len(p) for p in pieces]) if len(pieces) > 1 else [grad]
            for p, part in zip(pieces, parts, strict=True):
                own = part.to(p)
                p.grad = own.to_sparse(1) if self._attempt.sparse and p.ndim else own

    def _states(self) -> list[list[Any]]:
        """Return the states of the pieces of each parameter."""
        of = {id(p): own for own in self._copies for p in parameters_of(own)}
        return [[of[id(p)].state.get(p, {}) for p in pieces] for pieces in self._pieces]

    def _go_on_from(self, whole: _Result) -> None:
        for states, like in zip(self._states(), whole.states, strict=True):
            for state in states:
                _leave_out(state, like)
        groups, _, sizes = whole.common[0]
        for own in self._copies:
            for group, size, like, whole_size in zip(own.param_groups, _sizes(own), groups, sizes, strict=True):
                group.update({key: like[key] for key in _counts(like, whole_size, group, size)})

    def _result(self) -> _Result:
        values = self._values()
        states = [
            _merged([copy.deepcopy(dict(state)) for state in states], pieces)
            for states, pieces in zip(self._states(), self._pieces, strict=True)
        ]
        heard = [self._leader] if self._leads else self._copies
        common = [
            (hyperparameters(own), {k: s for k, s in own.state.items() if not isinstance(k, Tensor)}, _sizes(own))
            for own in heard
        ]
        changes = [v - s for v, s in zip(values, self._start, strict=True)]
        return _Result(changes, values, states, copy.deepcopy(common))

    def _values(self) -> list[Tensor]:
        return [torch.cat([p.detach() for p in p_]) if len(p_) > 1 else p_[0].detach().clone() for p_ in self._pieces]


def _rows_of(small: Tensor, rows: slice) -> Tensor:
    """Return a parameter that has some rows of a small one."""
    own = nn.Parameter(small.detach()[rows].clone())
    vars(own).update(vars(small))
    return own


def _merged(states: Sequence[dict[Any, Any]], pieces: Sequence[Tensor]) -> dict[Any, Any]:
    """Return the state of a whole parameter, given those of its rows."""
    if len(states) == 1:
        return states[0]
    merged: dict[Any, Any] = {}
    for key in dict.fromkeys(key for state in states for key in state):
        own = [state.get(key) for state in states]
        if all(isinstance(v, Tensor) and is_by_element(v, p.shape) for v, p in zip(own, pieces, strict=True)):
            merged[key] = torch.cat([v for v in own if isinstance(v, Tensor)])
        elif all(isinstance(v, dict) for v in own):
            merged[key] = _merged([v for v in own if isinstance(v, dict)], pieces)
        else:  # a number that is the same for all rows; if it is not, this differs from the state of one process
            merged[key] = own[0] if all(_alike(own[0], other) for other in own) else own
    return merged


def _leave_out(state: Any, like: Any) -> None:
    """Delete the entries of a state that another state of the same parameter has not."""
    for key in [*state]:
        if key not in like:
            del state[key]
        elif isinstance(state[key], dict) and isinstance(like[key], dict):
            _leave_out(state[key], like[key])


def _few_elements(shape: Sequence[int]) -> list[int]:
    return [min(size, _ELEMENTS) for size in shape]


def _small_parameters(
    sample: Sequence[Tensor], shape_of: Callable[[Sequence[int]], list[int]] = _few_elements
) -> list[Tensor]:
    """Return random parameters with the same number of dimensions, dtype and device; equal at each call."""
    generator = torch.Generator().manual_seed(0)
    made: list[Tensor] = []
    for p in sample:
        value = torch.randn(shape_of(p.shape), generator=generator).to(p.dtype).to("cpu" if p.is_meta else p.device)
        small = nn.Parameter(value)
        vars(small).update({name: own for name, own in vars(p).items() if not isinstance(own, Tensor)})
        made.append(small)
    return made


def _small_copy(
    optimizer: Optimizer,
    small: Mapping[int, Tensor],
    share: Sequence[Tensor],
    attempt: _Attempt,
    rows: slice = slice(None),
) -> Optimizer:
    """Return a copy of the optimizer over some of the small parameters, or over some rows of them."""
    cls, attributes = taken_apart(optimizer)
    kept = {id(p) for p in share}
    # References to a parameter become references to the small one, or to one that is never stepped.
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
    if attempt.with_state:
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
    except Exception:  # copying raises whatever the object's methods raise
        return value


def _small_state(value: Any, original: Tensor, small: Tensor, memo: Mapping[int, Any], rows: slice) -> Any:
    """Return the part of a state that belongs to the first elements of its parameter, or to some rows of these."""
    if isinstance(value, list | tuple):
        return type(value)([_small_state(item, original, small, memo, rows) for item in value])
    if not isinstance(value, Tensor):
        return _copied(value, memo)
    if value.is_meta:
        value = torch.zeros_like(value, device="cpu")
    value = value.detach()
    if value.ndim == 1 and original.ndim != 1 and value.numel() == original.numel():  # flattened
        return value[: small.numel()].clone()
    first = value[tuple(slice(_ELEMENTS) for _ in value.shape)]
    return (first[rows] if value.shape == original.shape and value.ndim else first).clone()


def _switch(optimizer: Optimizer, mode: str) -> Callable[[], Any] | None:
    """Return the method that switches an optimizer to a mode; ``None`` if it has no modes."""
    function = getattr(type(optimizer), mode, None)
    return partial(function, optimizer) if inspect.isfunction(function) and _takes_nothing(function) else None


def _takes_nothing(method: Callable[..., Any]) -> bool:
    _, *others = inspect.signature(method).parameters.values()
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in others)


@contextmanager
def _undisturbed(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Restore random states and the number of threads afterwards, and ignore warnings of optimizers."""
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


def _difference(one: _Result, several: _Result) -> str:
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
            same = {key: group[key] for key in _counts(group, size, other, other_size)}
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


def _sizes(optimizer: Optimizer) -> list[int]:
    """Return the number of elements of the parameters of each group."""
    return [sum(p.numel() for p in group["params"]) for group in optimizer.param_groups]


def _counts(group: Mapping[str, Any], size: int, other: Mapping[str, Any], other_size: int) -> list[str]:
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
