"""Random numbers: the seed of each layer and micro-batch of a pass, and the states of a process's generators.

A pass has a seed (:class:`Seeds`). :func:`layer_seed` derives the seed of each layer for each micro-batch, so dropout
masks are equal for any number of stages, and in a recomputation. Layers of which it is certain that they draw no random
numbers are not seeded (:func:`draws_nothing`).

``random.getstate`` makes an object of each of the 624 words of a state, and numpy's ``get_state`` takes 0.3 ms. Both
generators are Mersenne Twisters; this module copies their memory instead.
"""

import ctypes
import hashlib
import random
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from strategies.common.torch_compat import (
    backward_hooks,
    compiled_call,
    forward_hooks,
    gradient_hooks,
    has_global_hooks,
)

# Seeds


class Seeds:
    """Returns a seed for each pass, from two sequences that continue over several runs and over a checkpoint.

    Training passes have a separate sequence, so the number of validation passes does not change the training.

    Args:
        base: Determines both sequences.
    """

    def __init__(self, base: int) -> None:
        self._base, self._num_training, self._num_others = base, 0, 0
        self._num_before_batch = 0

    @classmethod
    def ahead_of_the_process(cls) -> "Seeds":
        """Use the next number of the process's generator as the base, without advancing the generator."""
        generator = torch.Generator()
        generator.set_state(torch.get_rng_state())
        return cls(int(torch.randint(2**62, (), generator=generator)))

    def next(self, training: bool, replica: int = 0) -> int:
        """Return the seed of the next pass, which differs between replicas."""
        if training:
            self._num_training += 1
            return _hashed(self._base, 1, self._num_training, replica)
        self._num_others += 1
        return _hashed(self._base, 0, self._num_others, replica)

    def begin_batch(self, *_: object) -> None:
        """Note the position at which the next training batch begins."""
        self._num_before_batch = self._num_training

    def state_dict(self, *, before_batch: bool = False) -> dict[str, int]:
        """Return the base of the sequences and the positions in them, as integers.

        Args:
            before_batch: Return the position in the sequence of training passes at which the last batch began.
        """
        num_training = self._num_before_batch if before_batch else self._num_training
        return {"base": self._base, "num_training": num_training, "num_others": self._num_others}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._base, self._num_training, self._num_others = (
            int(state[name]) for name in ("base", "num_training", "num_others")
        )
        self._num_before_batch = self._num_training


def layer_seed(seed: int, microbatch: int, layer: int) -> int:
    """The seed of one layer for one micro-batch, in a pass with ``seed``."""
    return _hashed(seed, microbatch, layer)


def _hashed(*numbers: int) -> int:
    """Return a 63-bit hash of ``numbers``, equal in every process and session."""
    digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}q", *numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


_KINDS_THAT_DRAW_NOTHING = frozenset(
    {
        *(nn.Sequential, nn.Identity, nn.Flatten, nn.Unflatten, nn.Upsample, nn.PixelShuffle, nn.ZeroPad2d),
        *(nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag),
        *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        *(nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
        *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
        *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
        *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.GLU),
        *(nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Softplus, nn.Softmax, nn.LogSoftmax),
        *(nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid),
    }
)


def _runs_code_of_others(tensor: Tensor | None) -> bool:
    return tensor is not None and (type(tensor) not in (Tensor, nn.Parameter) or any(gradient_hooks(tensor)))


def draws_nothing(layer: nn.Module) -> bool:
    """Return whether a layer certainly draws no random numbers, because it runs only torch code that draws none.

    A layer of any other class may draw random numbers.
    """
    return not has_global_hooks() and all(
        type(module) in _KINDS_THAT_DRAW_NOTHING
        and "forward" not in vars(module)
        and compiled_call(module) is None
        and not any((*forward_hooks(module), *backward_hooks(module)))
        and not any(map(_runs_code_of_others, (*module._parameters.values(), *module._buffers.values())))
        for module in layer.modules()
    )


# States of generators


def seed_device(seed: int, device: torch.device) -> None:
    """Seed torch on the CPU and on ``device``, and Python's ``random``; not numpy, which takes 0.1 ms to restore."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def random_state(device: torch.device, python: Any = random) -> list[Any]:
    """The state of the generators that :func:`seed_device` seeds.

    Args:
        device: The device.
        python: The object with ``getstate`` and ``setstate`` of Python's generator.
    """
    cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [python.getstate(), torch.get_rng_state(), *cuda]


def set_random_state(state: list[Any], device: torch.device, python: Any = random) -> None:
    """Restore the state that :func:`random_state` returned."""
    python.setstate(state[0])
    torch.set_rng_state(state[1])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[2], device)


@contextmanager
def preserved_random_state(device: torch.device) -> Iterator[None]:
    """Restore the process's random state after the body."""
    state = random_state(device)
    try:
        yield
    finally:
        set_random_state(state, device)


class ProcessRandomState:
    """The current state of the generators of a process, for optimizers that draw random numbers.

    Layers do not need it, because they are seeded for each pass.

    Args:
        device: The device whose generator is used, in addition to the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._state, self._numpy = device, random_state(device), np.random.get_state()

    def restore(self) -> None:
        """Set the generators to this state."""
        set_random_state(self._state, self._device)
        np.random.set_state(self._numpy)


class RandomStateKeeper:
    """Restores the random state of the process after a part of a pass, if layers have drawn random numbers in it.

    Args:
        devices: The devices whose generators layers use, in addition to the CPU.
    """

    def __init__(self, *devices: torch.device) -> None:
        self._devices, self._depth = devices, 0
        self._states: list[list[Any]] | None = None

    @contextmanager
    def preserving(self) -> Iterator[None]:
        """Restore the state after the body, if :meth:`keep` has been called in it. May be nested."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._states is not None and not self._depth:
                for state, device in zip(self._states, self._devices, strict=True):
                    set_random_state(state, device)
                self._states = None

    def keep(self) -> None:
        """Store the state, before it changes for the first time."""
        if self._depth and self._states is None:
            self._states = [random_state(device) for device in self._devices]


WORDS = struct.Struct("i624I")
"""Layout of a Mersenne Twister in memory: position and words in Python, words and position in numpy."""


def words_of_python() -> tuple[Any, Any]:
    """Return Python's global generator and its memory; ``None`` if the memory does not follow the object header."""
    generator: Any = getattr(random.getstate, "__self__", None)
    size, base = object.__basicsize__ + WORDS.size, random.Random.__base__
    if type(generator) is not random.Random or sys.implementation.name != "cpython" or base is None:
        return generator, None
    if not size <= base.__basicsize__ < size + 8:
        return generator, None
    memory = (ctypes.c_char * WORDS.size).from_address(id(generator) + object.__basicsize__)
    position, *words = WORDS.unpack(memory.raw)
    return generator, memory if generator.getstate()[1] == (*words, position) else None


class PythonGenerator:
    """A faster ``random.getstate`` and ``random.setstate``, for states that stay in this process."""

    def __init__(self) -> None:
        self._generator, self._words = words_of_python()

    def getstate(self) -> Any:
        """Return the state of the generator. Only :meth:`setstate` can use it."""
        return random.getstate() if self._words is None else (self._words.raw, self._generator.gauss_next)

    def setstate(self, state: Any) -> None:
        """Restore a state that :meth:`getstate` returned."""
        if self._words is None:
            random.setstate(state)
        else:
            self._words.raw, self._generator.gauss_next = state


_python = PythonGenerator()


def generator_states() -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's global generators, including every GPU if CUDA is in use.

    :func:`used_since` compares them. Takes about 15 µs.
    """
    bits = np.random.mtrand.get_bit_generator()
    is_twister = isinstance(bits, np.random.MT19937)
    gpus = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return {
        "Python's random": _python.getstate(),
        "numpy.random": ctypes.string_at(bits.ctypes.state_address, WORDS.size) if is_twister else repr(bits.state),
        "torch's generator on the CPU": torch.default_generator.get_state(),
        **{
            f"torch's generator on cuda:{index}": (generator.initial_seed(), generator.get_offset())
            for index, generator in enumerate(gpus)
        },
    }


def used_since(before: Mapping[str, Any]) -> list[str]:
    """Return the names of the generators whose states differ from ``before``, a result of :func:`generator_states`."""
    now = generator_states()
    return [name for name, state in before.items() if not _equal(state, now[name])]


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)
