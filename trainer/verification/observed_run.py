"""The results of a short run, by name: losses, gradients, norms, values and states of each step, and later results.

Each rank of a run observes its part. :func:`merged` combines the parts into what one process would observe::

    rank 0    batch 0   batch 2 │ batch 4   batch 6
    rank 1    batch 1   batch 3 │ batch 5   batch 7      2 ranks, 2 accumulated batches, 2 steps
    one       batch 0 1 2 3     │ batch 4 5 6 7
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import Parameter

from trainer.verification.logged import LoggedCall, logged_of_ranks

Values = dict[str, Any]
"""Tensors, numbers and other leaves, by path."""


@dataclass
class ObservedStep:
    """What is observed of one optimizer step.

    Attributes:
        batches: Number of batches of the run up to the end of the step.
        gradients: The gradient of each parameter before clipping, averaged over the ranks; ``None`` if it has none.
        norm: The global norm that the strategy computes, if it was requested.
        values: Parameters and buffers after the step.
        states: The state of the optimizers after the step, by optimizer, number of the parameter and key.
        hyperparameters: The settings of each parameter group during the step.
    """

    batches: int
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    norm: float | None = None
    values: dict[str, Tensor] = field(default_factory=dict)
    states: Values = field(default_factory=dict)
    hyperparameters: Values = field(default_factory=dict)


@dataclass
class ObservedRun:
    """What is observed of a run.

    Attributes:
        name: The name of the run, for messages.
        losses: The loss of each batch.
        initial: Parameters and buffers before the first step.
        steps: The optimizer steps.
        logged: The logged values after each batch.
        logged_of_epoch: The logged values after the epoch, of each rank.
        calls: The calls of ``self.log`` in ``training_step`` during each batch, if one process runs the batches of all
            ranks; then only the values that these calls log are compared.
        validation: The outputs and the metrics of one validation batch of each loader.
        predictions: What ``predict`` returned for one batch of each loader.
        checkpoint: Every leaf of the checkpoint that is written at the end.
        left_out: Names of logged values that are not compared.
        has_gradients: Whether gradients could be read between the backward pass and the step.
        stopped_after: The number of steps after which the run was stopped, as requested; 0 after the forward pass of
            the first batch; ``None`` if it made all steps.
        order: Names of parameters in the order in which the backward pass completes their gradients.
        buffers: The names in ``initial`` that are buffers.
        stage_of: The stage of each parameter and buffer, if the model is divided.
        ties: The names of each parameter that has several names.
        numbered: The name of each parameter, by optimizer and number, where the name is known.
        draws: For each random generator, the modules that draw from it in ``training_step``.
        norm_layers: Names of BatchNorm layers that are in training mode.
        narrowest: The least precise floating-point type in which ``training_step`` computes.
        keeps_first_buffers: Whether buffers differ between the ranks, so that only buffers of the first rank count.
        facts: Further facts for messages, such as the balance.
        notes: What was left out.
    """

    name: str
    losses: list[float | None] = field(default_factory=list)
    initial: dict[str, Tensor] = field(default_factory=dict)
    steps: list[ObservedStep] = field(default_factory=list)
    logged: list[Values] = field(default_factory=list)
    logged_of_epoch: list[Values] = field(default_factory=list)
    calls: list[list[LoggedCall]] | None = None
    validation: Values = field(default_factory=dict)
    predictions: Values = field(default_factory=dict)
    checkpoint: Values = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    has_gradients: bool = True
    stopped_after: int | None = None
    order: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    stage_of: dict[str, str] = field(default_factory=dict)
    ties: list[list[str]] = field(default_factory=list)
    numbered: dict[str, str] = field(default_factory=dict)
    draws: dict[str, list[str]] = field(default_factory=dict)
    norm_layers: list[str] = field(default_factory=list)
    narrowest: str = "float64"
    keeps_first_buffers: bool = False
    facts: Values = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def is_random(self) -> bool:
        """Whether layers draw random numbers in training."""
        return any(self.draws.values())

    def first(self, number: int) -> "ObservedRun":
        """Return the run up to some step, without the results that follow the last step."""
        steps = self.steps[:number]
        batches = steps[-1].batches if steps else 0
        return replace(
            self,
            losses=self.losses[:batches],
            steps=steps,
            logged=self.logged[:batches],
            logged_of_epoch=[],
            validation={},
            predictions={},
            checkpoint={},
            stopped_after=number,
        )


def merged(of_ranks: Sequence[ObservedRun], accumulated: int = 1) -> ObservedRun:
    """Return the whole run, given what each of its ranks has observed.

    Args:
        of_ranks: The part of each rank; a gradient that is missing on a rank comes from another rank.
        accumulated: Number of batches that each rank accumulates for a step.
    """
    first, *others = of_ranks
    if not others:
        return first
    losses = [loss for batch in zip(*(own.losses for own in of_ranks), strict=True) for loss in batch]
    logged = [values for batch in zip(*(own.logged for own in of_ranks), strict=True) for values in batch]
    of_epoch = [values for own in of_ranks for values in own.logged_of_epoch]
    steps = []
    for i, step in enumerate(first.steps):
        gradients = dict(step.gradients)
        for name in gradients:
            found = (own.steps[i].gradients.get(name) for own in of_ranks)
            gradients[name] = next((gradient for gradient in found if gradient is not None), None)
        steps.append(replace(step, batches=step.batches * len(of_ranks), gradients=gradients))
    return replace(first, losses=losses, steps=steps, logged=logged, logged_of_epoch=of_epoch)


def with_logs_of_ranks(run: ObservedRun, ranks: int) -> ObservedRun:
    """Return the run of one process that ran the batches of all ranks, with the logged values of the ranks."""
    if run.calls is None or run.stopped_after == 0:
        return run
    epoch = run.logged_of_epoch[0] if run.logged_of_epoch else {}
    found = logged_of_ranks(run.calls, ranks, run.logged, epoch)
    return replace(run, logged=found.of_batches, logged_of_epoch=found.of_epoch)


def leaves(value: Any, path: str = "") -> Values:
    """Return the leaves of nested mappings, sequences and objects by path.

    Tensors are detached copies on the CPU, and arrays of numbers become tensors. Objects that define their own
    equality are leaves.
    """
    return dict(_leaves(value, path, ()))


def _leaves(value: Any, path: str, around: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        yield path, on_host(value)
        return
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        yield path, torch.from_numpy(value.copy())
        return
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif hasattr(value, "to_tuple") or _is_plain_object(value):
        items = vars(value).items()
    else:
        yield path, value
        return
    if id(value) in around:  # an object that refers to itself
        return
    for key, item in items:
        yield from _leaves(item, f"{path}.{key}" if path else str(key), (*around, id(value)))


def _is_plain_object(value: Any) -> bool:
    is_compared_by_identity = type(value).__eq__ is object.__eq__ or hasattr(value, "__dataclass_fields__")
    return bool(getattr(value, "__dict__", None)) and is_compared_by_identity and not callable(value)


def on_host(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor on the CPU. To gather a divided tensor, every rank must call this."""
    if type(tensor) in (Tensor, Parameter) and tensor.is_meta:
        return tensor  # on a rank that does not gather
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return (tensor.to_dense() if tensor.is_sparse else tensor).clone().cpu()
