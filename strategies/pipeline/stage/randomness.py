"""Random numbers of layers: seeded by (pass, micro-batch, layer), so the same for any number of stages.

A micro-batch that is computed twice draws the same numbers twice, and the process's own random state is left alone.
"""

import hashlib
import random
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


class Seeds:
    """Gives each pass its seed, in two sequences that go on over several runs and over a checkpoint.

    Passes that train count by themselves: how often a run validates does not change what it trains.

    Args:
        base: Decides all of them.
    """

    def __init__(self, base: int) -> None:
        self._base, self._num_training, self._num_others = base, 0, 0

    @classmethod
    def ahead_of_the_process(cls) -> "Seeds":
        """Seeded by what the process's generator would draw next, without drawing it."""
        generator = torch.Generator()
        generator.set_state(torch.get_rng_state())
        return cls(int(torch.randint(2**62, (), generator=generator)))

    def next(self, training: bool, replica: int = 0) -> int:
        """The seed of the next pass, which is another one in each replica."""
        if training:
            self._num_training += 1
            return _hashed(self._base, 1, self._num_training, replica)
        self._num_others += 1
        return _hashed(self._base, 0, self._num_others, replica)

    def state_dict(self) -> dict[str, int]:
        """Where both sequences stand, as plain numbers."""
        return {"base": self._base, "num_training": self._num_training, "num_others": self._num_others}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` gave."""
        self._base, self._num_training, self._num_others = (
            int(state[name]) for name in ("base", "num_training", "num_others")
        )


def layer_seed(seed: int, microbatch: int, layer: int) -> int:
    """The seed of one layer for one micro-batch of a pass that has ``seed``."""
    return _hashed(seed, microbatch, layer)


def seed_device(seed: int, device: torch.device) -> None:
    """Seeds torch on the CPU and on ``device``, and Python's ``random``; not numpy, which takes 0.1 ms to restore."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def random_state(device: torch.device) -> list[Any]:
    """The state of what :func:`seed_device` seeds."""
    cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [random.getstate(), torch.get_rng_state(), *cuda]


def set_random_state(state: list[Any], device: torch.device) -> None:
    """Goes back to what :func:`random_state` gave."""
    random.setstate(state[0])
    torch.set_rng_state(state[1])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[2], device)


@contextmanager
def preserved_random_state(device: torch.device) -> Iterator[None]:
    """Leaves the process's random state as it was."""
    state = random_state(device)
    try:
        yield
    finally:
        set_random_state(state, device)


def _hashed(*numbers: int) -> int:
    """63 bits that depend on every one of ``numbers``, the same on every process and in every session."""
    digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}q", *numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
