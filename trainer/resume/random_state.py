"""Random states of this process and of single generators, as plain types and tensors for checkpoints."""

import ctypes
import random
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch

Generator = torch.Generator | random.Random | np.random.RandomState | np.random.Generator


def generator_state(generator: Generator) -> Any:
    """Return the state of one generator."""
    if isinstance(generator, torch.Generator | np.random.RandomState):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate()


def set_generator_state(generator: Generator, state: Any) -> None:
    """Set what :func:`generator_state` returned, or what :func:`plain` made of it."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(tuple(state))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(_with_tuples(state))


def random_state() -> dict[str, Any]:
    """Return the state of torch (on the CPU), Python and numpy in this process; takes about 0.1 ms."""
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}


class RandomStateReader:
    """Reads what :func:`random_state` returns before every batch, at little cost while Python and numpy draw nothing.

    ``random.getstate`` and ``np.random.get_state`` make an object of each of the 624 words of a state, which takes 20
    and 100 times as long as reading torch's. The reader compares the words as bytes with those that it read last, and
    returns the state of that time if they are the same.
    """

    def __init__(self) -> None:
        self._python: tuple[Any, Any] = (None, None)  # what is compared, and the state
        self._numpy: tuple[Any, Any] = (None, None)

    def read(self) -> dict[str, Any]:
        """Return the state of the process; entries that have not changed are the same objects as before."""
        if (words := _words_of_python()) is None or words != self._python[0]:
            self._python = words, random.getstate()
        # A number that ``randn`` has left behind is not among the words; without one, only a draw can leave one behind.
        if (words := _words_of_numpy()) is None or words != self._numpy[0] or self._numpy[1][3]:
            self._numpy = words, np.random.get_state()
        return {"torch": torch.get_rng_state(), "python": self._python[1], "numpy": self._numpy[1]}


_WORDS = struct.Struct("i624I")
"""Memory of Python's generator behind the object's header: position and words."""


def _words_of_python() -> Any:
    """Return position and words of Python's generator as bytes, and its second Gaussian number, or ``None``."""
    generator: Any = getattr(random.getstate, "__self__", None)
    if type(generator) is not random.Random or not _words_follow_header():
        return None
    words = ctypes.string_at(id(generator) + object.__basicsize__, _WORDS.size)
    return words, vars(generator)["gauss_next"]


@cache
def _words_follow_header() -> bool:
    """Return whether position and words of Python's generators follow the header of their objects, as in CPython."""
    size, base = object.__basicsize__ + _WORDS.size, random.Random.__base__
    if sys.implementation.name != "cpython" or base is None or not size <= base.__basicsize__ < size + 8:
        return False
    generator = random.Random(0)
    position, *words = _WORDS.unpack(ctypes.string_at(id(generator) + object.__basicsize__, _WORDS.size))
    return generator.getstate()[1] == (*words, position)


def _words_of_numpy() -> Any:
    """Return words and position of numpy's global generator as bytes, or ``None`` if it is not a ``MT19937``."""
    generator: Any = np.random.mtrand.get_bit_generator()
    if type(generator) is not np.random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, _WORDS.size)


def set_random_state(state: dict[str, Any]) -> None:
    """Set what :func:`random_state` returned, or what :func:`plain` made of it."""
    torch.set_rng_state(state["torch"])
    random.setstate(_with_tuples(state["python"]))
    np.random.set_state(tuple(state["numpy"]))


def cuda_random_state() -> list[torch.Tensor]:
    """Return the state of every CUDA device."""
    return torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


def set_cuda_random_state(states: list[torch.Tensor]) -> None:
    """Set what :func:`cuda_random_state` returned, on as many devices as there are now."""
    for device, state in zip(range(torch.cuda.device_count()), states, strict=False):
        torch.cuda.set_rng_state(state, device)


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the random state of torch (on the CPU), Python and numpy at the end."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def plain(value: Any) -> Any:
    """Replace tuples and numpy arrays by lists at any depth, which ``torch.load(weights_only=True)`` can read."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


def _with_tuples(state: Any) -> tuple[Any, ...]:
    version, words, gauss = state
    return version, tuple(words), gauss
