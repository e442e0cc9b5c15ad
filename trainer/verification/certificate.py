"""The verdict about a strategy, from what was observed of its run and of a run in one process.

the strategy = one process                               equal to rounding
the strategy = one process with the same micro-batches   different as documented, with the cause
the strategy = itself with one stage                     the same, where layers draw random numbers
else                                                     wrong, with the place where the difference starts
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainer.verification.compare import PARTS, Finding, Rounding, findings, is_missing
from trainer.verification.observed_run import ObservedRun, Values

EQUAL, DOCUMENTED, WRONG = "equal to rounding", "different as documented", "wrong"


@dataclass(frozen=True)
class FirstDifference:
    """Where a run starts to differ from its reference.

    Attributes:
        step: The optimizer step; ``None`` for what follows the last step.
        part: The part that differs, one of ``PARTS``.
        layer: The layer, or the name of the value.
        stage: The stage of the layer, if the model is divided.
        size: The largest absolute difference.
        relative: The largest absolute difference, relative to the largest value of one process.
        what: A description of the difference.
        advice: What to check.
    """

    step: int | None
    part: str
    layer: str
    stage: str
    size: float
    relative: float
    what: str
    advice: str


@dataclass
class Certificate:
    """The verdict about a strategy.

    Attributes:
        verdict: ``"equal to rounding"``, ``"different as documented"`` or ``"wrong"``.
        strategy: The strategy, for messages.
        reference: The run with which the strategy was compared.
        rounding: The allowed differences.
        steps: Number of steps that were compared.
        largest: For each part that was compared, the number of values, the largest relative difference and its limit.
        explained: The largest relative difference that micro-batches alone cause in one process, if measured.
        reasons: Why results differ, and the option that changes this.
        origin: Where the strategy starts to be wrong.
        notes: What was not compared, or was not compared as requested.
        facts: The balance and other facts about the run.
    """

    verdict: str
    strategy: str
    reference: str
    rounding: Rounding
    steps: int = 0
    largest: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    explained: float | None = None
    reasons: list[str] = field(default_factory=list)
    origin: FirstDifference | None = None
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """Whether the verdict is not ``"wrong"``."""
        return self.verdict != WRONG


@dataclass(frozen=True)
class ReferenceRuns:
    """The runs with which a strategy is compared.

    Attributes:
        one: The run in one process. If it was stopped after the forward pass of the first batch, it only describes the
            model.
        micro: The run in one process with the same micro-batches, in plain PyTorch; ``None`` if this is impossible.
        stage: The run of the strategy with one stage; ``None`` if it was not run.
        divided: Two runs in one process that differ by micro-batches only, to measure rounding; by default ``micro``
            and ``one``.
        ignores_buffers: Whether buffers that depend on BatchNorm over micro-batches are not compared, because another
            comparison does this.
    """

    one: ObservedRun
    micro: ObservedRun | None = None
    stage: ObservedRun | None = None
    divided: tuple[ObservedRun, ObservedRun] | None = None
    ignores_buffers: bool = False

    def measured(self, rounding: Rounding) -> tuple[Rounding, float | None]:
        """Return the limits, and the relative difference of gradients that micro-batches alone cause, if measured."""
        pair = self.divided or (None if self.micro is None else (self.micro, self.one))
        if pair is None:
            return rounding, None
        found = [each for each in findings(*pair, rounding) if each.part in _OF_TRAINING]
        if not found or wrong_ones(found):
            return rounding, None
        explained = max((each.in_limits for each in found if each.part == "gradients"), default=0.0)
        number = min((each.stopped_after for each in pair if each.stopped_after is not None), default=None)
        return rounding.measured(max(each.in_limits for each in found), number), explained * rounding.relative


_OF_BUFFERS = {"buffers", "checkpoint", "validation", "predict"}
"""Buffers, and results after training that depend on them."""

_OF_TRAINING = ("losses", "gradients", "global norm", "parameters", "optimizer states")
"""The parts that show how much rounding changes a training."""


def certify(
    actual: ObservedRun,
    references: ReferenceRuns,
    rounding: Rounding,
    *,
    is_whole_loss: bool = True,
    strategy: str = "",
) -> Certificate:
    """Return the verdict.

    Args:
        actual: The results of the strategy.
        references: The runs with which the strategy is compared.
        rounding: The allowed differences.
        is_whole_loss: Whether the strategy computes the loss of whole batches.
        strategy: The strategy, for messages.
    """
    one, micro, stage = references.one, references.micro, references.stage
    rounding, explained = references.measured(rounding)

    def certificate(
        reference: ObservedRun, verdict: str, compared: Sequence[Finding], reasons: Iterable[str] = ()
    ) -> Certificate:
        return Certificate(
            verdict,
            strategy or actual.name,
            reference.name,
            rounding,
            steps=min(len(actual.steps), len(reference.steps)),
            largest=_largest_of(compared),
            explained=explained,
            reasons=list(reasons),
            notes=list(dict.fromkeys([*one.notes, *actual.notes])),
            facts=dict(actual.facts),
        )

    of_ranks = [_FIRST_BUFFERS] if one.keeps_first_buffers or (micro and micro.keeps_first_buffers) else []
    has_one = one.stopped_after != 0
    with_one = findings(actual, one, rounding) if has_one else []
    if has_one and not wrong_ones(with_one):
        return certificate(one, DOCUMENTED if of_ranks else EQUAL, with_one, of_ranks)
    with_stage = None if stage is None else findings(actual, stage, rounding)
    if one.is_random and stage is not None and with_stage is not None and not wrong_ones(with_stage):
        return certificate(stage, DOCUMENTED, with_stage, [_of_random_layers(one), *of_ranks])
    if micro is not None:
        with_micro = [  # it has only values that are logged as means
            each
            for each in findings(actual, micro, rounding)
            if each.part != "logged values" or not is_missing(each.expected)
        ]
        logged = list(dict.fromkeys(each.name for each in wrong_ones(with_one) if each.part == "logged values"))
        are_logged = has_one and not _wrong_but_logged(with_one)
        if not (
            wrong_ones(with_micro) or _starts_later(actual, one, micro, rounding) or (are_logged and is_whole_loss)
        ):
            if are_logged:
                reasons = [_of_logged(logged)]
            elif has_one and _are_of_buffers(with_one) and not one.norm_layers:
                reasons = [_PER_PASS]
            else:
                reasons = reasons_of(one, is_whole_loss=is_whole_loss)
            return certificate(micro, DOCUMENTED, with_micro, reasons + of_ranks)
        if one.norm_layers and references.ignores_buffers and _are_of_buffers(with_micro):
            with_micro = [each for each in with_micro if each.part not in _OF_BUFFERS]
            return certificate(
                micro, DOCUMENTED, with_micro, [*reasons_of(one, is_whole_loss=is_whole_loss), *of_ranks]
            )
    if one.norm_layers and stage is not None and with_stage is not None and not wrong_ones(with_stage):
        return certificate(stage, DOCUMENTED, with_stage, reasons_of(one, is_whole_loss=is_whole_loss))
    reference = one
    if one.is_random and stage is not None:
        reference = stage
    elif micro is not None and (one.norm_layers or not is_whole_loss or not has_one):
        reference = micro
    elif stage is not None and not has_one:
        reference = stage
    compared = findings(actual, reference, rounding)
    if has_one and not wrong_ones(compared):  # it was stopped before the step in which the strategy starts to differ
        reference, compared = one, with_one
    result = certificate(reference, WRONG, compared)
    if wrong_ones(compared):  # there are none if the reference was stopped before its first step
        result.origin = origin_of(compared, actual, reference, one)
    return result


def wrong_ones(compared: Iterable[Finding]) -> list[Finding]:
    """Return the differences that rounding does not explain."""
    return [each for each in compared if each.is_wrong]


def _wrong_but_logged(compared: Iterable[Finding]) -> list[Finding]:
    """Return the wrong values without logged values."""
    return [each for each in wrong_ones(compared) if each.part != "logged values"]


def _starts_later(actual: ObservedRun, one: ObservedRun, micro: ObservedRun, rounding: Rounding) -> bool:
    """Return whether ``actual`` is equal to one process for as many steps as ``micro`` has made.

    What differs only later is not explained by micro-batches.
    """
    number = micro.stopped_after
    if number is None or number == actual.stopped_after or one.stopped_after == 0:
        return False
    return not wrong_ones(findings(actual.first(number), one.first(number), rounding))


def _largest_of(compared: Sequence[Finding]) -> dict[str, tuple[int, float, float]]:
    found: dict[str, tuple[int, float, float]] = {}
    for part in PARTS:
        own = [each for each in compared if each.part == part]
        if own:
            worst = max(own, key=lambda each: (each.in_limits, each.relative))
            found[part] = (len(own), worst.relative, worst.in_limits)
    return found


# Why results differ as documented

_FIRST_BUFFERS = (
    "buffers, such as running statistics, that are those of the first rank after each step and ignore the rows of the "
    "other ranks, as under DDP (sync_batchnorm=True of the Trainer uses all rows under DDP)"
)


_PER_PASS = (
    "buffers that a layer changes in its forward pass: they change once per micro-batch (microbatches=1 runs each "
    "layer once)"
)


def _are_of_buffers(compared: Iterable[Finding]) -> bool:
    """Return whether all differences are in buffers, or in results after training that depend on buffers."""
    return {each.part for each in wrong_ones(compared)} <= _OF_BUFFERS


def _of_random_layers(one: ObservedRun) -> str:
    names = list(dict.fromkeys(name for names in one.draws.values() for name in names))
    return (
        f"random numbers that {_some(names)} {'draws' if len(names) == 1 else 'draw'} in training: a pipeline seeds "
        "them by (step, micro-batch, layer), so masks are not those of one process. The reference is the same strategy "
        "with one stage, whose masks are the same (with a dropout of 0, the reference is one process)"
    )


def _of_logged(names: Sequence[str]) -> str:
    return (
        f"logged values that are no mean over the rows of a batch ({_some(names)}): training_step runs once per "
        "micro-batch, so a maximum, a minimum or a metric of torchmetrics is that of micro-batches (schedule='gpipe' "
        "or microbatches=1 logs values of whole batches)"
    )


def reasons_of(one: ObservedRun, *, is_whole_loss: bool) -> list[str]:
    """Return why results depend on the micro-batches."""
    if one.norm_layers:
        return [
            f"BatchNorm over micro-batches: in training mode, {_some(one.norm_layers)} normalises the rows of a "
            "micro-batch (microbatches=1 normalises whole batches; deferred_batch_norm=True updates the running "
            "statistics once per batch)"
        ]
    if one.facts.get("router"):
        return [
            f"the auxiliary loss of the routers ({one.facts['router']}), which is computed from the tokens of each "
            "micro-batch and then averaged (schedule='gpipe' or microbatches=1 computes it from whole batches)"
        ]
    if one.facts.get("counts tokens"):
        return [
            "batches of a step that count by their tokens (loss_weight='tokens'), while one process gives each batch "
            "the same weight (so does loss_weight='rows', and a step of one batch)"
        ]
    if is_whole_loss:
        return [
            "a layer that uses several rows of a batch, of which it has those of a micro-batch (microbatches=1 gives "
            "it whole batches)"
        ]
    return [
        "a loss that is no mean over the rows of a batch, or a layer that uses several rows: training_step runs once "
        "per micro-batch, and losses are averaged by rows (loss_weight='tokens' or the model's microbatch_weight for "
        "means over tokens; schedule='gpipe' computes the loss of whole batches)"
    ]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


# Where it starts


def origin_of(
    compared: Sequence[Finding], actual: ObservedRun, reference: ObservedRun, one: ObservedRun
) -> FirstDifference:
    """Return where a run starts to differ: in the first part that differs, the first layer of the backward pass."""
    first = wrong_ones(compared)[0]
    same = [each for each in compared if (each.step, each.part) == (first.step, first.part)]
    if first.part == "losses":  # a wrong forward pass; the gradients of the step show the layer
        gradients = [each for each in compared if (each.step, each.part) == (first.step, "gradients")]
        what, advice = _of_loss(first, wrong_ones(gradients), gradients, one)
        return _origin(first, first.name, "", what, advice)
    explain = _EXPLAIN.get(first.part, _of_other)
    layer, what, advice = explain(first, same, actual, reference, one)
    stage = actual.stage_of.get(first.name) or actual.stage_of.get(_parameter_of(first, actual), "")
    return _origin(first, layer, stage, what, advice)


def _origin(first: Finding, layer: str, stage: str, what: str, advice: str) -> FirstDifference:
    return FirstDifference(first.step, first.part, layer, stage, first.size, first.relative, what, advice)


def layer_of(name: str) -> str:
    """Return the layer that has a parameter or a buffer."""
    return name.rpartition(".")[0] or name


def _parameter_of(finding: Finding, actual: ObservedRun) -> str:
    """Return the name of the parameter within the path of an optimizer state."""
    known = [name for name in actual.initial if f".{name}." in f".{finding.name}."]
    return max(known, key=len, default="")


def factor_between(actual: Any, expected: Any) -> float | None:
    """Return the constant factor between two tensors; ``None`` if the factor is not constant."""
    if not (isinstance(actual, Tensor) and isinstance(expected, Tensor)) or actual.shape != expected.shape:
        return None
    a, b = actual.double().flatten(), expected.double().flatten()
    square = float(b @ b)
    if not square or not torch.isfinite(a).all():
        return None
    factor = float(a @ b) / square
    apart = float((a - factor * b).norm())
    return factor if apart <= 1e-5 * max(abs(factor), 1e-3) * math.sqrt(square) else None


def _of_loss(
    first: Finding, wrong: Sequence[Finding], gradients: Sequence[Finding], one: ObservedRun
) -> tuple[str, str]:
    what = f"the loss of {first.name} is {first.actual!r} instead of {first.expected!r}"
    if one.draws.get("numpy"):
        names = one.draws["numpy"]
        return what, (
            f"{_some(names)} draws from numpy.random, which is not seeded on workers: draw from torch instead"
        )
    if isinstance(first.actual, float) and isinstance(first.expected, float) and first.expected:
        ratio = first.actual / first.expected
        factors = [factor_between(each.actual, each.expected) for each in gradients[:1]]
        if factors and factors[0] is not None and abs(factors[0] - ratio) < 1e-6 * abs(ratio):
            return f"{what}, {ratio:.6g} times as much, as all gradients are", "what scales the loss"
    return what, (
        "the forward pass: rows of the batch that are left out or used twice, layers in another order or mode, and "
        "values that layers keep from call to call"
    )


def _of_gradients(
    first: Finding, same: Sequence[Finding], actual: ObservedRun, reference: ObservedRun, one: ObservedRun
) -> tuple[str, str, str]:
    layer, wrong = layer_of(first.name), wrong_ones(same)
    own = [each for each in wrong if layer_of(each.name) == layer]
    names = ", ".join(each.name.rpartition(".")[2] for each in own)
    if is_missing(first.actual):
        return layer, f"{names} has no gradient", "whether the parameter is used, and whether its gradient is cleared"
    if one.draws.get("numpy"):
        drawing = one.draws["numpy"]
        return (
            layer,
            f"the gradient of {names} differs",
            f"{_some(drawing)} draws from numpy.random, which is not seeded on workers: draw from torch instead",
        )
    tied = next((group for group in reference.ties if first.name in group), None)
    if isinstance(first.actual, Tensor) and not first.actual.any():
        return layer, f"the gradient of {names} is zero", "whether the gradient is cleared before the step"
    if isinstance(first.actual, Tensor) and first.actual.isnan().any():
        return layer, f"the gradient of {names} is not a number", "operations that are computed in another precision"
    factor = factor_between(first.actual, first.expected)
    if factor is not None and abs(factor - 1) > 1e-6:
        if len(wrong) == len([each for each in same if not is_missing(each.expected)]):
            where = "the gradients of all layers are"
        else:
            where = f"the gradient of {names} is"
        return (
            layer,
            f"{where} {factor:.6g} times that of one process",
            "what scales gradients: accumulation, averages over replicas, weights of micro-batches, hooks",
        )
    if tied is not None:
        return layer, f"the gradient of the tied parameter {' = '.join(tied)} differs", "whether all its uses add to it"
    return (
        layer,
        f"the gradient of {names} differs in direction",
        "the layer, and what follows it in the forward pass: a micro-batch that is left out, values of another "
        "micro-batch or step in the backward pass, buffers that change between the passes",
    )


def _of_norm(
    first: Finding, same: Sequence[Finding], actual: ObservedRun, reference: ObservedRun, one: ObservedRun
) -> tuple[str, str, str]:
    what = f"the norm is {first.actual:.6g} instead of {first.expected:.6g}"
    gradients = actual.steps[first.step or 0].gradients
    groups: dict[str, list[Tensor]] = {}
    for name, gradient in gradients.items():
        if gradient is not None:
            groups.setdefault(actual.stage_of.get(name, ""), []).append(gradient)
    for stage, own in groups.items():
        norm = float(torch.stack([each.double().norm() for each in own]).norm())
        if len(groups) > 1 and math.isclose(norm, first.actual, rel_tol=1e-6):
            return "global norm", f"{what}: it is the norm of {stage} alone", "clipping, which must add up all stages"
    for name, gradient in gradients.items():
        if gradient is not None and math.isclose(float(gradient.double().norm()), first.actual, rel_tol=1e-6):
            return "global norm", f"{what}: it is the norm of {name} alone", "clipping, which must add up all layers"
    return "global norm", what, "clipping: which gradients it adds up, and whether it scales them"


def _before(observed: ObservedRun, step: int) -> Values:
    """Return the values at the start of a step."""
    return observed.initial if step == 0 else observed.steps[step - 1].values


def _of_parameters(
    first: Finding, same: Sequence[Finding], actual: ObservedRun, reference: ObservedRun, one: ObservedRun
) -> tuple[str, str, str]:
    layer, step = layer_of(first.name), first.step or 0
    if is_missing(first.actual):
        return layer, f"there is no {first.name}", "whether the parameter is carried to its stage and back"
    wrong = wrong_ones(same)
    before = _before(actual, step)
    theirs = _before(reference, step)
    for group in reference.ties:
        values = [actual.steps[step].values.get(name) for name in group]
        if any(each.name in group for each in wrong) and any(
            isinstance(value, Tensor) and isinstance(values[0], Tensor) and not torch.equal(value, values[0])
            for value in values
        ):
            stale = next(each.name for each in wrong if each.name in group)
            return layer_of(stale), f"{' and '.join(group)} are tied, but differ", "a copy of the weight that is stale"
    if torch.equal(first.actual, before[first.name]):
        untouched = [each.name for each in wrong if torch.equal(each.actual, before[each.name])]
        return (
            layer,
            f"{_some(untouched)} did not change in the step",
            "whether the optimizer has the parameter, and whether it steps on this stage",
        )
    update, wanted = first.actual - before[first.name], first.expected - theirs[first.name]
    factor = factor_between(update, wanted)
    rate = _late_rate(reference, step)
    if factor is not None and rate is not None and math.isclose(factor, rate, rel_tol=1e-4):
        return (
            layer,
            "the step used the learning rate of the step before",
            "hyperparameters that reach the stage one step late",
        )
    if factor is not None and abs(factor - 1) > 1e-6:
        return (
            layer,
            f"the step of {first.name} is {factor:.6g} times that of one process",
            "clipping, the learning rate and other hyperparameters of this stage",
        )
    return (
        layer,
        f"{first.name} differs after the step, although its gradient does not",
        "clipping, hyperparameters and the state of the optimizer on this stage, and code that changes weights",
    )


def _late_rate(reference: ObservedRun, step: int) -> float | None:
    """Return the ratio of the previous step's learning rate to this step's, if the rate has changed."""
    if step == 0:
        return None
    now, before = (reference.steps[i].hyperparameters for i in (step, step - 1))
    for path, value in now.items():
        old = before.get(path)
        if path.endswith(".lr") and old is not None and float(value) and float(old) != float(value):
            return float(old) / float(value)
    return None


def _of_buffers(
    first: Finding, same: Sequence[Finding], actual: ObservedRun, reference: ObservedRun, one: ObservedRun
) -> tuple[str, str, str]:
    layer, step = layer_of(first.name), first.step or 0
    if is_missing(first.actual):
        return layer, f"there is no buffer {first.name}", "whether the buffer is carried to its stage and back"
    before = _before(actual, step)
    if first.name in before and torch.equal(first.actual, before[first.name]):
        return layer, f"the buffer {first.name} did not change", "whether the buffer is carried back from its stage"
    return (
        layer,
        f"the buffer {first.name} differs",
        "how often the forward pass changes it: once per micro-batch",
    )


def _of_states(
    first: Finding, same: Sequence[Finding], actual: ObservedRun, reference: ObservedRun, one: ObservedRun
) -> tuple[str, str, str]:
    name = _parameter_of(first, actual)
    key = first.name.rpartition(".")[2]
    what = f"the optimizer state {key!r} of {name or first.name} "
    what += "is missing" if is_missing(first.actual) else "differs, although the parameter does not"
    return (
        layer_of(name) if name else first.name,
        what,
        "the state of the optimizer on this stage, or how it is gathered",
    )


def _of_other(
    first: Finding, same: Sequence[Finding], actual: ObservedRun, reference: ObservedRun, one: ObservedRun
) -> tuple[str, str, str]:
    if is_missing(first.actual):
        what = f"{first.name} is missing"
    elif is_missing(first.expected):
        what = f"{first.name} is there, but not in one process"
    elif isinstance(first.actual, Tensor) and first.actual.numel() > 1:
        what = f"{first.name} differs"
    else:
        what = f"{first.name} is {_shown(first.actual)} instead of {_shown(first.expected)}"
    return first.name, what, _ADVICE[first.part]


def _shown(value: Any) -> str:
    return f"{float(value):.6g}" if isinstance(value, Tensor | float) else repr(value)


_ADVICE = {
    "initial values": "whether every process has the values of the model, and code that changes them at the start",
    "hyperparameters": "schedulers and code that sets hyperparameters",
    "logged values": "self.log: values that are logged per micro-batch or rank, and how they are reduced (sync_dist)",
    "validation": "validation_step, the mode of layers, and values that layers keep from training",
    "checkpoint": "hooks that change checkpoints, and values that only a checkpoint has",
    "predict": "predict_step, the mode of layers, and weights that are not those at the end of training",
}

_EXPLAIN = {
    "gradients": _of_gradients,
    "global norm": _of_norm,
    "parameters": _of_parameters,
    "buffers": _of_buffers,
    "optimizer states": _of_states,
}
