"""Which micro-batches are recomputed in the backward pass, and how a second forward pass repeats the first.

Recomputing (activation checkpointing: Chen et al., 2016, https://arxiv.org/abs/1604.06174; in pipelines: GPipe, Huang
et al., 2019, https://arxiv.org/abs/1811.06965) keeps only a stage's input, and runs its layers again before the
backward pass.
"""

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

RECOMPUTE_MODES = ("always", "except_last", "never")


def num_recomputed(mode: str, microbatches: int) -> int:
    """How many of the first micro-batches of a pass are recomputed; the last one follows its forward pass at once."""
    return {"always": microbatches, "except_last": microbatches - 1, "never": 0}[mode]


def layer_seed(seed: int, pass_number: int, microbatch: int, layer: int) -> int:
    """A seed of 63 bits that depends on each of its arguments, the same on every process and in every session."""
    digest = hashlib.blake2b(struct.pack("<4q", seed, pass_number, microbatch, layer), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_device(seed: int, device: torch.device) -> None:
    """Seeds the CPU's generator and the one of ``device``, as ``torch.manual_seed`` does for every device there is."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


@contextmanager
def preserved_random_state(device: torch.device) -> Iterator[None]:
    """Leaves the process's random state as it was: the layers draw from generators seeded per layer."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


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
