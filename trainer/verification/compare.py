"""Finds differences between two runs that rounding does not explain.

A difference is expressed in units of its *limit*. With the tensors ``a`` of a run and ``b`` of the reference::

    gradients, states    relative * max|b|  +  noise * max of all gradients of the step
    values               relative * (max|b|  +  max of all values), and what an optimizer makes of noise in a gradient
    numbers              relative * max(|b|, 1)
    validation, predict  relative * max(|b|, min(1, max of all tensors of the part))
    hyperparameters      relative * |b|
    checkpoint           as the same values after a step, and otherwise as the validation, by first key

``noise`` is for gradients that would be zero without rounding, such as the gradient of a bias before a normalisation.
In less than float64, an optimizer that divides by the size of the gradient turns this noise into steps of full size. So
where the gradient of the reference is no larger than noise, a value may differ by as much as it has moved.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from trainer.verification.observed_run import ObservedRun, ObservedStep, Values

PARTS = (
    "initial values",
    "losses",
    "gradients",
    "global norm",
    "hyperparameters",
    "parameters",
    "buffers",
    "optimizer states",
    "logged values",
    "validation",
    "checkpoint",
    "predict",
)
"""The parts that are compared, in causal order within a step."""


_SPACINGS = 100
"""The number of spacings of a value's own type by which two runs may differ in any case."""


@dataclass(frozen=True)
class Rounding:
    """How much two runs may differ.

    Attributes:
        relative: Share of the largest value of a tensor.
        noise: Share of the largest gradient of a step.
        described: The reason for these limits.
        safety: How many times the differences that micro-batches alone cause in one process are allowed, if they were
            measured; 0 if these limits do not depend on a measurement.
        least: The share of these limits that is allowed even if micro-batches cause no difference.
        is_measured: Whether these limits come from a measurement.
        absolute: Allowed for each real value in addition, whatever its size.
        steps: The number of steps for which these limits were measured; ``None`` if they hold for all steps.
        later: The limits for later steps.
    """

    relative: float
    noise: float
    described: str
    safety: float = 0.0
    least: float = 1.0
    is_measured: bool = False
    absolute: float = 0.0
    steps: int | None = None
    later: "Rounding | None" = None

    @property
    def is_exact(self) -> bool:
        """Whether the noise is too small for an optimizer to turn it into a step."""
        return self.noise < 1e-9

    def measured(self, share: float, steps: int | None = None) -> "Rounding":
        """Return smaller limits, given what micro-batches alone change in one process.

        Args:
            share: The difference between one process with micro-batches and one process with whole batches, in limits.
            steps: The number of steps in which this was measured; ``None`` for all steps. Differences grow from step to
                step, so later steps keep the present limits.
        """
        if not self.safety:
            return self
        factor = min(1.0, max(self.least, self.safety * share))
        later = None if steps is None else self
        relative, noise = factor * self.relative, factor * self.noise
        return replace(self, relative=relative, noise=noise, is_measured=True, steps=steps, later=later)

    def of_step(self, step: int) -> "Rounding":
        """Return the limits for a step, and for what follows it."""
        return self if self.later is None or self.steps is None or step < self.steps else self.later


def rounding_of(precision: str, narrowest: str) -> Rounding:
    """Return how much runs may differ at most, before a measurement.

    Args:
        precision: The Trainer's precision.
        narrowest: The least precise floating-point type in which ``training_step`` computes.
    """
    eps = torch.finfo(getattr(torch, narrowest, torch.float32)).eps
    if eps < 1e-12:
        return Rounding(1e-9, 1e3 * eps, "float64")
    if precision.startswith("64") and eps < 1e-6:
        return Rounding(2e-5, 2e2 * eps, "float64, with parts in float32", safety=1e3, least=5e-5)
    if eps < 1e-6:  # an optimizer amplifies noise, so a difference may grow from step to step
        return Rounding(2e-3, 1e3 * eps, "float32", safety=100, least=1e-2)
    return Rounding(min(0.2, 24 * eps), 16 * eps, narrowest, safety=4, least=1 / 12)


@dataclass(frozen=True)
class Finding:
    """One value of two runs.

    Attributes:
        step: The optimizer step; for a loss, the step of its batch; ``None`` for what follows the last step.
        part: The part to which the value belongs, one of ``PARTS``.
        name: The name of the value.
        size: The largest absolute difference; infinite if one run lacks the value.
        relative: The size, relative to the largest value of the reference.
        limit: The size that rounding explains.
        actual: The value.
        expected: The value of the reference.
    """

    step: int | None
    part: str
    name: str
    size: float
    relative: float
    limit: float
    actual: Any
    expected: Any

    @property
    def in_limits(self) -> float:
        """The size of the difference in units of the limit."""
        if not self.size:
            return 0.0
        return self.size / self.limit if self.limit else math.inf

    @property
    def is_wrong(self) -> bool:
        """Whether rounding does not explain the difference."""
        return not self.size <= self.limit


def findings(actual: ObservedRun, expected: ObservedRun, rounding: Rounding) -> list[Finding]:
    """Return all values of two runs with their differences, in causal order.

    If one of the runs was stopped earlier, only the steps that both were to make are compared.

    Args:
        actual: The results of the strategy.
        expected: The results of the reference.
        rounding: The allowed differences.
    """
    if actual.stopped_after != expected.stopped_after:
        number = min(each.stopped_after for each in (actual, expected) if each.stopped_after is not None)
        actual, expected = actual.first(number), expected.first(number)
    return list(_RunComparison(actual, expected, rounding).all())


class _RunComparison:
    """Compares two runs.

    Args:
        actual: The results of the strategy.
        expected: The results of the reference.
        rounding: The allowed differences.
    """

    def __init__(self, actual: ObservedRun, expected: ObservedRun, rounding: Rounding) -> None:
        self._actual, self._expected, self._limits = actual, expected, rounding
        self._rounding = rounding  # of the present step
        self._is_noise: dict[str, Tensor] = {}

    def all(self) -> Iterator[Finding]:
        actual, expected = self._actual, self._expected
        yield from self._tensors(None, "initial values", actual.initial, expected.initial, _largest(expected.initial))
        if len(actual.steps) != len(expected.steps):
            yield Finding(
                None, "losses", "number of steps", math.inf, math.inf, 0.0, len(actual.steps), len(expected.steps)
            )
        if len(actual.losses) != len(expected.losses):
            yield Finding(
                None, "losses", "number of losses", math.inf, math.inf, 0.0, len(actual.losses), len(expected.losses)
            )
        done = 0
        for i, (ours, theirs) in enumerate(zip(actual.steps, expected.steps, strict=False)):
            batches, done = range(done, theirs.batches), theirs.batches
            self._rounding = self._limits.of_step(i)
            yield from self._losses(i, batches)
            yield from self._step(i, ours, theirs)
            yield from self._logged(i, actual.logged, expected.logged, batches)
        rest = range(done, len(expected.losses))  # of manual optimization, after its last step
        yield from self._losses(None, rest)
        yield from self._logged(None, actual.logged, expected.logged, rest)
        yield from self._logged(
            None, actual.logged_of_epoch, expected.logged_of_epoch, range(len(expected.logged_of_epoch))
        )
        mine, other = (
            {
                name: value
                for name, value in each.validation.items()
                if name.partition("/dataloader_idx_")[0] not in expected.left_out
            }
            for each in (actual, expected)
        )
        yield from self._values(None, "validation", mine, other, least=_least(other))
        yield from self._checkpoint(actual.checkpoint, expected.checkpoint)
        mine, other = actual.predictions, expected.predictions
        yield from self._values(None, "predict", mine, other, least=_least(other))

    def _losses(self, step: int | None, batches: range) -> Iterator[Finding]:
        ours, theirs = self._actual.losses, self._expected.losses
        scale = max((abs(loss) for loss in theirs if loss is not None), default=1.0)
        for batch in batches:
            one, other = (losses[batch] if batch < len(losses) else None for losses in (ours, theirs))
            yield self._number(step, "losses", f"batch {batch}", one, other, scale)

    def _step(self, i: int, ours: ObservedStep, theirs: ObservedStep) -> Iterator[Finding]:
        rounding = self._rounding
        if self._actual.has_gradients and self._expected.has_gradients:
            scale = _largest(theirs.gradients)
            floor = rounding.noise * scale
            for name in self._in_order(theirs.gradients):
                expected = theirs.gradients[name]
                limit = 0.0 if expected is None else rounding.relative * _max(expected) + floor
                yield self._tensor(i, "gradients", name, ours.gradients.get(name), expected, limit)
                if expected is not None and not rounding.is_exact:
                    quiet = expected.abs() <= limit
                    self._is_noise[name] = self._is_noise.get(name, torch.zeros_like(quiet)) | quiet
            if ours.norm is not None and theirs.norm is not None:
                yield self._number(i, "global norm", "norm", ours.norm, theirs.norm, theirs.norm + scale)
            yield from self._values(i, "hyperparameters", ours.hyperparameters, theirs.hyperparameters, least=0.0)
        buffers = set(self._expected.buffers)
        for part, is_part in (
            ("parameters", lambda name: name not in buffers),
            ("buffers", lambda name: name in buffers),
        ):
            mine, other = ({n: v for n, v in step.values.items() if is_part(n)} for step in (ours, theirs))
            yield from self._tensors(i, part, mine, other, _largest(other))
        yield from self._states(i, "optimizer states", self._named(ours.states), self._named(theirs.states))

    def _checkpoint(self, actual: Values, expected: Values) -> Iterator[Finding]:
        """Compare checkpoints, whose weights, optimizer states and hyperparameters have the limits of a step."""
        for kind in dict.fromkeys(map(self._kind_in_checkpoint, [*expected, *actual])):
            ours, theirs = (
                {path: value for path, value in each.items() if self._kind_in_checkpoint(path) == kind}
                for each in (actual, expected)
            )
            if kind in ("parameters", "buffers"):
                yield from self._tensors(None, "checkpoint", ours, theirs, _largest(theirs))
            elif kind == "optimizer states":
                yield from self._states(None, "checkpoint", ours, theirs)
            else:
                least = 0.0 if kind == "hyperparameters" else _least(theirs)
                yield from self._values(None, "checkpoint", ours, theirs, least=least)

    def _kind_in_checkpoint(self, path: str) -> str:
        """Return the part of a step that has the same value; the first key if there is none."""
        first, _, name = path.partition(".")
        if name in self._expected.initial:
            return "buffers" if name in self._expected.buffers else "parameters"
        if first == "optimizer_states":
            _, _, key = name.partition(".")
            return "hyperparameters" if key.startswith("param_groups.") else "optimizer states"
        return first

    def _logged(
        self, step: int | None, actual: Sequence[Values], expected: Sequence[Values], numbers: range
    ) -> Iterator[Finding]:
        """Compare logged values of the given batches, or of the epoch of the given ranks."""
        for number in numbers:
            ours, theirs = (each[number] if number < len(each) else {} for each in (actual, expected))
            if self._expected.calls is not None:  # other values of one process are not those of a rank
                ours = {name: value for name, value in ours.items() if name in theirs}
            yield from self._values(step, "logged values", ours, theirs)

    def _in_order(self, gradients: Mapping[str, Any]) -> list[str]:
        order = [name for name in self._expected.order if name in gradients]
        return [*order, *(name for name in gradients if name not in set(order))]

    def _tensors(
        self, step: int | None, part: str, actual: Mapping[str, Any], expected: Mapping[str, Any], scale: float
    ) -> Iterator[Finding]:
        for name in dict.fromkeys([*expected, *actual]):
            other = expected.get(name)
            limit = 0.0
            if isinstance(other, Tensor) and _is_real(other):
                relative = max(self._rounding.relative, 2 * torch.finfo(other.dtype).eps)
                limit = relative * (_max(other) + scale)
            yield self._tensor(step, part, name, actual.get(name), other, limit)

    def _named(self, states: Values) -> Values:
        """Return optimizer states by the names of parameters instead of their numbers."""
        found = {}
        for path, value in states.items():
            number, place, *rest = path.split(".")
            name = self._expected.numbered.get(f"{number}.{place}", place)
            found[".".join([number, name, *rest])] = value
        return found

    def _states(self, step: int | None, part: str, actual: Values, expected: Values) -> Iterator[Finding]:
        scales: dict[str, float] = {}
        for path, value in expected.items():
            if isinstance(value, Tensor) and _is_real(value):
                key = path.rpartition(".")[2]
                scales[key] = max(scales.get(key, 0.0), _max(value))
        for path in dict.fromkeys([*expected, *actual]):
            mine, other = actual.get(path), expected.get(path)
            if isinstance(other, Tensor) and isinstance(mine, Tensor):
                limit = 0.0
                if _is_real(other):
                    limit = self._rounding.relative * _max(other)
                    limit += self._rounding.noise * scales[path.rpartition(".")[2]]
                yield self._tensor(step, part, path, mine, other, limit)
            else:
                yield self._leaf(step, part, path, mine, other)

    def _values(
        self, step: int | None, part: str, actual: Values, expected: Values, *, least: float = 1.0
    ) -> Iterator[Finding]:
        """Compare values, in units of their size, or of ``least`` if they are smaller."""
        for path in dict.fromkeys([*expected, *actual]):
            if path in actual and path in expected:
                yield self._leaf(step, part, path, actual[path], expected[path], least)
            else:
                yield Finding(
                    step, part, path, math.inf, math.inf, 0.0, actual.get(path, _NOTHING), expected.get(path, _NOTHING)
                )

    def _leaf(self, step: int | None, part: str, path: str, mine: Any, other: Any, least: float = 1.0) -> Finding:
        if isinstance(mine, Tensor) and isinstance(other, Tensor):
            limit = 0.0
            if _is_real(other):  # a metric of torchmetrics stays in float32 in a run in float64
                relative = max(self._rounding.relative, _SPACINGS * torch.finfo(other.dtype).eps)
                limit = relative * max(_max(other), least)
            return self._tensor(step, part, path, mine, other, limit)
        if all(isinstance(each, float) or (isinstance(each, Tensor) and each.numel() == 1) for each in (mine, other)):
            return self._number(step, part, path, float(mine), float(other), max(abs(float(other)), least))
        same = _equal(mine, other)
        size = 0.0 if same else math.inf
        return Finding(step, part, path, size, size, 0.0, mine, other)

    def _number(
        self, step: int | None, part: str, name: str, mine: float | None, other: float | None, scale: float
    ) -> Finding:
        if mine is None or other is None:
            size = 0.0 if mine is other else math.inf
            return Finding(step, part, name, size, size, 0.0, mine, other)
        if math.isnan(mine) or math.isnan(other) or math.isinf(mine) or math.isinf(other):
            same = (math.isnan(mine) and math.isnan(other)) or mine == other
            size = 0.0 if same else math.inf
            return Finding(step, part, name, size, size, 0.0, mine, other)
        size = abs(mine - other)
        relative = size / max(abs(other), 1e-300) if size else 0.0
        limit = self._rounding.relative * scale + self._rounding.absolute
        return Finding(step, part, name, size, relative, limit, mine, other)

    def _tensor(self, step: int | None, part: str, name: str, mine: Any, other: Any, limit: float) -> Finding:
        if not (isinstance(mine, Tensor) and isinstance(other, Tensor)):
            size = 0.0 if mine is None and other is None else math.inf
            return Finding(step, part, name, size, size, 0.0, mine, other)
        if mine.shape != other.shape:
            return Finding(step, part, name, math.inf, math.inf, 0.0, mine, other)
        if not other.numel():
            return Finding(step, part, name, 0.0, 0.0, 0.0, mine, other)
        if not _is_real(other):
            size = 0.0 if torch.equal(mine, other) else float((mine.double() - other.double()).abs().max())
            return Finding(step, part, name, size, size, limit, mine, other)
        kind = torch.complex128 if other.is_complex() else torch.float64
        one, two = mine.to(kind), other.to(kind)
        apart = (one - two).abs()
        apart = torch.where((one == two) | (one.isnan() & two.isnan()), torch.zeros_like(apart), apart)
        parameter = name.partition(".")[2] if part == "checkpoint" else name
        if part in ("parameters", "checkpoint") and parameter in self._is_noise:
            moved = _max(two - self._expected.initial[parameter].to(kind))
            apart = (apart - 2 * moved * self._is_noise[parameter]).clamp_min(0)
        size = float(apart.max()) if not apart.isnan().any() else math.inf
        relative = size / max(_max(other), 1e-300) if size else 0.0
        return Finding(step, part, name, size, relative, limit + self._rounding.absolute, mine, other)


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


_NOTHING = _Nothing()
"""Stands for a value that a run lacks."""


def is_missing(value: Any) -> bool:
    """Return whether a run lacks a value."""
    return value is None or isinstance(value, _Nothing)


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _max(tensor: Tensor) -> float:
    if not tensor.numel():
        return 0.0
    largest = float(tensor.abs().max())
    return largest if math.isfinite(largest) else 0.0


def _largest(values: Mapping[str, Any]) -> float:
    found = (_max(value) for value in values.values() if isinstance(value, Tensor) and _is_real(value))
    return max(found, default=0.0)


def _least(values: Mapping[str, Any]) -> float:
    """Return the size below which tensors are compared in units of this size: 1, or the largest value if smaller."""
    return min(1.0, _largest(values)) or 1.0


def _equal(mine: Any, other: Any) -> bool:
    if type(mine) is not type(other):
        return False
    try:
        return bool(mine == other)
    except (ValueError, RuntimeError):  # objects that hold arrays or tensors
        return cloudpickle.dumps(mine) == cloudpickle.dumps(other)
