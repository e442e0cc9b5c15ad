"""Finds out whether an optimizer can be divided over processes, by steps of small copies, as a whole and in parts.

    one process          step of all parameters ──────────────┐
    several processes    step of part 0, step of part 1 ──────┴─▶ same parameters, states and hyperparameters?

A part is some of the parameters, or, under ZeRO stage 3, some rows of every parameter. The copies have a few parameters
of a few elements each, with random values. The original is not changed.
"""

import copy
import inspect
import math
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from strategies.common.generators import generator_states, used_since
from strategies.optim.calls import INSTEAD, draws_message, hyperparameters, set_hyperparameters
from strategies.optim.restricted import parameters_of
from strategies.optim.small_copies import (
    WAYS,
    CopyingWay,
    mode_switch,
    rows_of,
    small_copy,
    small_parameters,
    undisturbed,
)
from strategies.optim.trial_results import TrialResult, difference, element_counts, group_sizes, merged_state

_STEPS = 10

_ROWS = 2
"""How many rows the first of two copies has, if each copy has some rows of every parameter."""

_PER_PART = 2
"""How many parameters of each group and part have a copy; one, if there are many groups."""

_MANY_GROUPS = 16


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
    with undisturbed(everything):
        if not set(missing) - {"closure"}:
            whole, way = _tried_as_a_whole(optimizer, everything, always_closure=bool(missing), may_draw=alone)
        if missing:
            raise ValueError(_needs_argument(name, ", ".join(missing)))
        try:
            divided = _Trial(optimizer, shares, way, leads=parts is not None, may_draw=alone).run(whole)
        except Exception as error:
            raise ValueError(
                f"{name} cannot be divided over processes: its step of a part of the parameters fails "
                f"({type(error).__name__}: {error}). Use {INSTEAD}"
            ) from error
    for one, several in zip(whole, divided, strict=True):
        if where := difference(one, several):
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
    with undisturbed(sample):
        whole, way = _tried_as_a_whole(optimizer, sample, always_closure=False)
        try:
            by_rows = _Trial(optimizer, [sample, sample], way, by_rows=True).run(whole)
        except Exception as error:
            where = f"the step of some rows fails ({type(error).__name__}: {error})"
        else:
            where = next(
                (f"{found} differed" for pair in zip(whole, by_rows, strict=True) if (found := difference(*pair))), ""
            )
    if where:
        raise ValueError(
            f"{name} cannot be used under stage=3, where each process steps some rows of every parameter: what it does "
            f"to one element depends on others, for example by a norm or by a product of matrices (in a trial on small "
            f"copies, {where}). Use stage=2, which leaves parameters whole, or an optimizer that updates each element "
            "by itself, such as AdamW."
        )


class _Refused(ValueError):
    """An error that every other way to copy would give as well."""


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
) -> tuple[list[TrialResult], CopyingWay]:
    """Return the results of one process, and the first way to make copies that works."""
    errors: list[Exception] = []
    for way in WAYS:
        try:
            trial = _Trial(optimizer, [sample], way, always_closure=always_closure, may_draw=may_draw)
            return trial.run(), way
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
        way: How copies are made.
        leads: Whether the last copy sends its hyperparameters to the others before they step.
        always_closure: Whether a step without a closure fails.
        by_rows: Whether all shares are the same, and each copy steps other rows of these parameters.
        may_draw: Whether a step may draw random numbers, as in a run with one process.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        shares: Sequence[Sequence[Tensor]],
        way: CopyingWay,
        *,
        leads: bool = False,
        always_closure: bool = False,
        by_rows: bool = False,
        may_draw: bool = False,
    ) -> None:
        self._name, self._way = type(optimizer).__name__, way
        self._takes_closure = len(inspect.signature(type(optimizer).step).parameters) > 1
        self._leads, self._always_closure, self._may_draw = leads, always_closure, may_draw
        copied = {id(p) for share in shares for p in share}
        sample = [p for p in dict.fromkeys(parameters_of(optimizer)) if id(p) in copied]
        self._copies = []
        pieces: dict[int, list[Tensor]] = {id(p): [] for p in sample}
        for number, share in enumerate(shares):
            small = dict(zip(map(id, sample), small_parameters(sample), strict=True))
            if by_rows:
                rows = slice(_ROWS) if number == 0 else slice(_ROWS, None)
                small = {key: rows_of(p, rows) for key, p in small.items() if len(p[rows])}
            stepped = [p for p in share if id(p) in small]
            self._copies.append(small_copy(optimizer, small, stepped, way, rows if by_rows else slice(None)))
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

    def run(self, whole: Sequence[TrialResult] = ()) -> list[TrialResult]:
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
            if (switch := mode_switch(own, method)) is not None:
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
                p.grad = own.to_sparse(1) if self._way.sparse and p.ndim else own

    def _states(self) -> list[list[Any]]:
        """Return the states of the pieces of each parameter."""
        of = {id(p): own for own in self._copies for p in parameters_of(own)}
        return [[of[id(p)].state.get(p, {}) for p in pieces] for pieces in self._pieces]

    def _go_on_from(self, whole: TrialResult) -> None:
        for states, like in zip(self._states(), whole.states, strict=True):
            for state in states:
                _leave_out(state, like)
        groups, _, sizes = whole.common[0]
        for own in self._copies:
            for group, size, like, whole_size in zip(own.param_groups, group_sizes(own), groups, sizes, strict=True):
                group.update({key: like[key] for key in element_counts(like, whole_size, group, size)})

    def _result(self) -> TrialResult:
        values = self._values()
        states = [
            merged_state([copy.deepcopy(dict(state)) for state in states], pieces)
            for states, pieces in zip(self._states(), self._pieces, strict=True)
        ]
        heard = [self._leader] if self._leads else self._copies
        common = [
            (hyperparameters(own), {k: s for k, s in own.state.items() if not isinstance(k, Tensor)}, group_sizes(own))
            for own in heard
        ]
        changes = [v - s for v, s in zip(values, self._start, strict=True)]
        return TrialResult(changes, values, states, copy.deepcopy(common))

    def _values(self) -> list[Tensor]:
        return [torch.cat([p.detach() for p in p_]) if len(p_) > 1 else p_[0].detach().clone() for p_ in self._pieces]


def _leave_out(state: Any, like: Any) -> None:
    """Delete the entries of a state that another state of the same parameter has not."""
    for key in [*state]:
        if key not in like:
            del state[key]
        elif isinstance(state[key], dict) and isinstance(like[key], dict):
            _leave_out(state[key], like[key])
