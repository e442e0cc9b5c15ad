"""Schedules as data: for each stage a row of actions, in the order in which the stage runs them.

A schedule sets the order of a stage's actions and no times: a stage runs the next action of its row as soon as the
input of that action has arrived. Four micro-batches on three stages, with forward and backward passes of equal cost
(printed by :func:`~strategies.pipeline.schedule.simulator.render`; ``F3`` is the forward pass of micro-batch 3, ``B3``
its backward pass, ``.`` is idle time)::

    gpipe: all forward passes, then all backward      1f1b: each stage runs a backward pass as soon as it can

    stage 0  F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0      stage 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    stage 1  .  F0 F1 F2 F3 .  .  B3 B2 B1 B0 .       stage 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    stage 2  .  .  F0 F1 F2 F3 B3 B2 B1 B0 .  .       stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

    live activations: 4, 4, 4                         live activations: 3, 2, 1

Both schedules take the same time; the bubble, which is the idle share of the grid, is (p - 1) / (m + p - 1). They
differ in memory: ``gpipe`` keeps the activations of every micro-batch on every stage, ``1f1b`` those of at most p - i
micro-batches on stage i.

Legend: m micro-batch (in formulas, the number of micro-batches), i stage, p number of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["F", "B"]
KINDS: tuple[Kind, ...] = ("F", "B")


class Action(NamedTuple):
    """One pass of one micro-batch through one stage.

    The action names its stage, although a row implies it, so that a later schedule can put actions of several stages
    into one row. ``kind`` can later name the two parts of a split backward pass: input gradients, weight gradients.
    """

    kind: Kind
    microbatch: int
    stage: int

    def __repr__(self) -> str:
        return f"{self.kind}{self.microbatch}"


Schedule: TypeAlias = list[list[Action]]
"""One row of actions per process, in the order in which the process runs them."""


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forward passes, then all backward passes in reverse order (Huang et al., 2019, https://arxiv.org/abs/1811.06965).

    The backward passes begin with the last micro-batch: its activations were computed last, and
    ``checkpoint="except_last"`` keeps them, so the last stage starts its backward passes without recomputation.

    Raises:
        ValueError: If there is fewer than one stage or micro-batch.
    """
    _check_counts(stages, microbatches)
    return [
        [Action("F", m, i) for m in range(microbatches)] + [Action("B", m, i) for m in reversed(range(microbatches))]
        for i in range(stages)
    ]


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Alternate forward and backward passes (Narayanan et al., 2019, "PipeDream-Flush", https://arxiv.org/abs/2006.09503).

    Stage i starts with p - i forward passes, as many as there are stages from stage i to the last one: the first
    gradient arrives after these. From then on each backward pass frees the memory that the next forward pass needs.

    Raises:
        ValueError: If there is fewer than one stage or micro-batch.
    """
    _check_counts(stages, microbatches)
    return [_one_f_one_b_row(i, num_warm_up=min(stages - i, microbatches), num=microbatches) for i in range(stages)]


def _one_f_one_b_row(i: int, *, num_warm_up: int, num: int) -> list[Action]:
    row = [Action("F", m, i) for m in range(num_warm_up)]
    for m in range(num):
        row.append(Action("B", m, i))
        if num_warm_up + m < num:
            row.append(Action("F", num_warm_up + m, i))
    return row


SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}
"""The schedules by the name that a user gives."""


def _check_counts(stages: int, microbatches: int) -> None:
    if stages < 1:
        raise ValueError(f"stages must be at least 1, got {stages}")
    if microbatches < 1:
        raise ValueError(f"microbatches must be at least 1, got {microbatches}")
