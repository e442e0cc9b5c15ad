"""Finds out whether an optimizer can be divided over processes, by stepping small copies as a whole and in parts.

    one process          step of all parameters ──────────────┐
    several processes    step of part 0, step of part 1 ──────┴─▶ same parameters, states and hyperparameters?

A part is some of the parameters, or, under ZeRO stage 3, some rows of every parameter. The copies have a few parameters
of a few elements each, with random values, and get the same gradients. They are compared in the middle of the steps,
after the last step, and after an infinite gradient. In the middle, the several processes continue as from a checkpoint
of one process. The original is not changed.
"""

import inspect
import math
import random
from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from strategies.common.random_seeds import generator_states, used_since
from strategies.optim.calls import INSTEAD, draws_message, hyperparameters, set_hyperparameters
from strategies.optim.restricted import parameters_of
from strategies.optim.small_copies import WAYS, CopyingWay, RowIndex, mode_switch, undisturbed
from strategies.optim.trial_process import TrialProcess

_STEPS = 10

_ROWS = slice(2), slice(2, None)
"""The rows of the two processes of a trial in which each process steps some rows of every parameter."""

_PER_PART = 2
"""Number of parameters of each group and part that have a copy; one, if there are many groups."""

_MANY_GROUPS = 16


def check_divisible(optimizer: Optimizer, parts: Sequence[Collection[Tensor]] | None = None) -> None:
    """Check that several processes, each of which steps some of the parameters, get the result of one process.

    Args:
        optimizer: The optimizer of the whole model.
        parts: For a pipeline, the parameters of each process. The last process is the driver, whose hyperparameters all
            workers use. By default, the check is for ranks that may divide the parameters in any way, each with its own
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
    if missing := _required_arguments(type(optimizer)):
        raise ValueError(
            f"{name}.step needs an argument ({', '.join(missing)}), but each process steps its own parameters by "
            "step() without arguments, when their gradients are there. Give it a default in a subclass that steps from "
            f"these gradients, or use {INSTEAD}"
        )
    shares = [(share, ...) for share in _shares(optimizer, parts)]
    if where := _tried(optimizer, shares, leads=parts is not None):
        raise ValueError(
            f"{name} cannot be divided over processes: what it does to one parameter depends on parameters in "
            f"other processes, for example by a norm or a step size over all of them (in a trial on small copies, "
            f"{where}). If an option of {name} does that, turn it off; to clip by the norm of all gradients, set the "
            f"Trainer's gradient_clip_val, which counts every process. Otherwise use {INSTEAD}"
        )


def check_by_element(optimizer: Optimizer, option: str, instead: str) -> None:
    """Check that several processes, each of which steps some rows of every parameter, get the result of one process.

    Args:
        optimizer: The optimizer of the whole model, which has passed :func:`check_divisible`.
        option: The option that needs this, for the message.
        instead: What to use instead, which leaves parameters whole.

    Raises:
        ValueError: If the results differ.
    """
    sample = [p for share in _shares(optimizer, None, with_scalars=False) for p in share]  # a scalar has no rows
    if where := _tried(optimizer, [(sample, rows) for rows in _ROWS], leads=False):
        raise ValueError(
            f"{type(optimizer).__name__} cannot be used under {option}, where each process steps some rows of every "
            f"parameter: what it does to one element depends on others, for example by a norm or by a product of "
            f"matrices (in a trial on small copies, {where}). Use {instead}, which leaves parameters whole, or an "
            "optimizer that updates each element by itself, such as AdamW."
        )


class _Refused(ValueError):
    """An error that does not depend on how the optimizer is copied."""


def _required_arguments(cls: type[Optimizer]) -> list[str]:
    """Return the arguments of ``step`` that have no default."""
    _, *parameters = inspect.signature(cls.step).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variable]


def _shares(
    optimizer: Optimizer, parts: Sequence[Collection[Tensor]] | None, *, with_scalars: bool = True
) -> list[list[Tensor]]:
    """Return, for each part, some parameters of each group that represent all its parameters."""
    number = 1 if len(optimizer.param_groups) > _MANY_GROUPS else _PER_PART
    groups = [
        [
            p
            for p in group["params"]
            if (p.is_floating_point() or p.is_complex()) and (p.ndim or with_scalars) and p.numel()
        ]
        for group in optimizer.param_groups
    ]
    if parts is None:  # two ranks, which get the parameters alternately
        chosen = [(k + g, p) for g, group in enumerate(groups) for k, p in enumerate(group[: 2 * number])]
        return [share for rank in range(2) if (share := [p for place, p in chosen if place % 2 == rank])]
    owned = [{id(p) for p in part} for part in parts]
    return [[p for group in groups for p in [p for p in group if id(p) in own][:number]] for own in owned]


def _tried(optimizer: Optimizer, shares: Sequence[tuple[Sequence[Tensor], RowIndex]], *, leads: bool) -> str:
    """Describe the difference, for the first way to copy that works; return an empty string if nothing differs.

    Args:
        optimizer: The original.
        shares: The parameters that each process steps, and the rows of these parameters.
        leads: Whether the last process sends its hyperparameters to the other processes before they step.
    """
    errors: list[Exception] = []
    chosen = {id(p) for share, _ in shares for p in share}
    sample = [p for p in dict.fromkeys(parameters_of(optimizer)) if id(p) in chosen]
    with undisturbed(sample):
        for way in WAYS:
            try:
                return _Trial(optimizer, sample, shares, way, leads=leads).run()
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
    """Compares steps of one process with steps of several processes; see :func:`_tried` for the arguments.

    Attributes:
        whole: A list with the process that steps all parameters.
        several: The processes that divide the parameters, the driver last; empty if the driver steps all parameters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        sample: Sequence[Tensor],
        shares: Sequence[tuple[Sequence[Tensor], RowIndex]],
        way: CopyingWay,
        *,
        leads: bool,
    ) -> None:
        self._name, self._leads = type(optimizer).__name__, leads
        self._takes_closure = len(inspect.signature(type(optimizer).step).parameters) > 1
        alone = leads and len(shares) == 1
        self.whole = [TrialProcess(optimizer, sample, sample, ..., way)]
        self.several = [] if alone else [TrialProcess(optimizer, sample, *share, way) for share in shares]
        self._gpus = {p.device for p in sample if p.is_cuda}
        self._generator = torch.Generator().manual_seed(1)
        self._directions = [self._random(p) for p in self.whole[0].pieces.values()]

    def run(self) -> str:
        """Describe the difference; return an empty string if nothing differs.

        Raises:
            Exception: If the step of the process with all parameters fails.
        """
        self._call("train")
        for number in range(_STEPS):
            if where := self._step(number):
                return where
            if number == _STEPS // 2:
                self._call("eval")
                if where := self._difference():
                    return where
                for process in self.several:
                    process.go_on_from(self.whole[0])
                self._call("train")
        if where := self._difference():
            return where
        try:
            where = self._step(_STEPS, infinite=True)
        except Exception:  # the optimizer refuses infinite gradients by an error
            return ""
        return where or self._difference()

    def _difference(self) -> str:
        """Describe the first difference between the process with all parameters and the several processes."""
        for process in self.several:
            leads = not self._leads or process is self.several[-1]
            if where := process.difference(self.whole[0], leads=leads):
                return f"{where} differed"
        return ""

    def _step(self, number: int, *, infinite: bool = False) -> str:
        """Step the process with all parameters, then the several processes; return why these cannot step, or ``""``."""
        grads = self._gradients(number, infinite)
        self._step_together(self.whole, number, grads)
        if self.several:
            try:
                self._step_together(self.several, number, grads)
            except Exception as error:
                return f"the step of a part fails ({type(error).__name__}: {error})"
        return ""

    def _step_together(self, processes: Sequence[TrialProcess], number: int, grads: Sequence[Tensor]) -> None:
        *others, driver = processes
        pieces = [p for process in processes for p in process.pieces.values()]
        calls, before = 0, [p.detach().clone() for p in pieces]

        def backward() -> None:
            for process in processes:
                process.set_gradients(grads)
            for process in others:
                self._lead(process)
                self._seeded(process.optimizer.step)

        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise _Refused(
                    f"{self._name} evaluates the loss several times within a step, in which each process changes its "
                    f"own parameters only, so it cannot be divided over processes. Use {INSTEAD}"
                )
            if any(not torch.equal(p, b) for p, b in zip(pieces, before, strict=True)):
                raise _Refused(
                    f"{self._name} changes parameters within its step before it evaluates the loss, which other "
                    f"processes cannot follow, so it cannot be divided over processes. Use {INSTEAD}"
                )
            backward()
            return torch.tensor(1.0 / (number + 1))

        step: Callable[..., object] = driver.optimizer.step
        if self._takes_closure and number % 2:
            self._seeded(partial(step, closure))
        else:
            backward()
            self._seeded(step)

    def _seeded(self, step: Callable[[], object]) -> None:
        """Step from the same random state each time, and refuse steps that must not draw random numbers but do."""
        random.seed(0)
        np.random.seed(0)
        torch.default_generator.manual_seed(0)
        for gpu in self._gpus:
            torch.cuda.default_generators[gpu.index].manual_seed(0)
        before = generator_states()
        step()
        if self.several and (used := used_since(before)):
            raise _Refused(draws_message(self._name, used))

    def _call(self, mode: str) -> None:
        """Switch the copies to a mode, if the optimizer has modes."""
        for process in (*self.whole, *self.several):
            if (switch := mode_switch(process.optimizer, mode)) is not None:
                self._lead(process)
                switch()

    def _lead(self, process: TrialProcess) -> None:
        """Give a process the hyperparameters of the driver, as in a pipeline before each step and call."""
        if self._leads and process in self.several[:-1]:
            set_hyperparameters(process.optimizer, hyperparameters(self.several[-1].optimizer))

    def _gradients(self, number: int, infinite: bool) -> list[Tensor]:
        grads = []
        for k, direction in enumerate(self._directions):
            size = 10.0 ** (((3 * k + 2 * number) % 7 - 3) / 1.5)  # 0.01 to 100, different for each parameter
            if number == _STEPS - 1:
                size *= 1e4
            grads.append(((direction + 0.5 * self._random(direction)) * size).clamp(-1e4, 1e4))
        if infinite and grads:
            grads[0].fill_(math.inf)
        return grads

    def _random(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self._generator)
