"""Which micro-batches are recomputed in the backward pass, and what a second forward pass must leave alone.

Recomputing (activation checkpointing: Chen et al., 2016, https://arxiv.org/abs/1604.06174; in pipelines: GPipe, Huang
et al., 2019, https://arxiv.org/abs/1811.06965) keeps only a stage's input, and runs its layers again before the
backward pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

RECOMPUTE_MODES = ("always", "except_last", "never")


def num_recomputed(mode: str, microbatches: int) -> int:
    """How many of the first micro-batches of a pass are recomputed; the last one follows its forward pass at once."""
    return {"always": microbatches, "except_last": microbatches - 1, "never": 0}[mode]


@contextmanager
def frozen_statistics(layers: nn.Module, frozen: bool = True) -> Iterator[None]:
    """Runs BatchNorm layers in training mode without an update of their running statistics."""
    norms = [m for m in layers.modules() if isinstance(m, _NormBase)] if frozen else []
    tracking = [m for m in norms if m.training and m.track_running_stats]
    for norm in tracking:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in tracking:
            norm.track_running_stats = True
