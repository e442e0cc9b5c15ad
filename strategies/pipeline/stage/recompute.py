"""Which micro-batches are recomputed in the backward pass, and what a second forward pass must leave alone.

Recomputing (activation checkpointing: Chen et al., 2016, https://arxiv.org/abs/1604.06174; in pipelines: GPipe, Huang
et al., 2019, https://arxiv.org/abs/1811.06965) keeps only a stage's input, and runs its layers again before the
backward pass.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from strategies.common.torch_compat import NormBase

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

RECOMPUTE_MODES = ("always", "except_last", "never")


def num_recomputed(mode: str, microbatches: int) -> int:
    """How many of the first micro-batches of a pass are recomputed; the last one follows its forward pass at once."""
    return {"always": microbatches, "except_last": microbatches - 1, "never": 0}[mode]


class _Phase(threading.local):
    """What the layers that run on a thread are run for."""

    checkpointing = False
    recomputing = False


_here = _Phase()


def is_checkpointing() -> bool:
    """Whether the layer that runs on this thread will run again for the same micro-batch, in the backward pass."""
    return _here.checkpointing


def is_recomputing() -> bool:
    """Whether the layer that runs on this thread has run before for the same micro-batch, in the forward pass."""
    return _here.recomputing


@contextmanager
def phase(*, checkpointing: bool, recomputing: bool) -> Iterator[None]:
    """Within this, :func:`is_checkpointing` and :func:`is_recomputing` return these."""
    before = _here.checkpointing, _here.recomputing
    _here.checkpointing, _here.recomputing = checkpointing, recomputing
    try:
        yield
    finally:
        _here.checkpointing, _here.recomputing = before


@dataclass(frozen=True)
class Flags:
    """Modes and ``requires_grad`` of some layers, which another pass may change before one is recomputed."""

    modes: list[bool]
    trained: list[bool]

    @classmethod
    def of(cls, layers: nn.Module) -> "Flags":
        """Those that ``layers`` have now."""
        return cls([m.training for m in layers.modules()], [p.requires_grad for p in layers.parameters()])

    @contextmanager
    def entered(self, layers: nn.Module) -> Iterator[None]:
        """Within this, ``layers`` have these."""
        now = Flags.of(layers)
        if now == self:
            yield
            return
        self._set(layers)
        try:
            yield
        finally:
            now._set(layers)

    def _set(self, layers: nn.Module) -> None:
        for module, mode in zip(layers.modules(), self.modes, strict=True):
            module.training = mode
        for parameter, trained in zip(layers.parameters(), self.trained, strict=True):
            parameter.requires_grad_(trained)


@contextmanager
def frozen_statistics(layers: nn.Module, kind: type[NormBase] | None) -> Iterator[None]:
    """Runs the normalising layers of a kind in training mode without an update of their running statistics.

    They work on copies, so that autograd saves the same tensors as without this: a layer that checkpoints itself runs
    once more in the backward pass, and compares.
    """
    norms = [m for m in layers.modules() if isinstance(m, kind) and m.training] if kind else []
    statistics = [{name: m._buffers[name] for name in _STATISTICS if name in m._buffers} for m in norms]
    for norm, buffers in zip(norms, statistics, strict=True):
        norm._buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in zip(norms, statistics, strict=True):
            norm._buffers.update(buffers)
