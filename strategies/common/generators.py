"""The global random number generators of a process: read their states in microseconds, and detect their use.

``random.getstate`` makes an object of each of the 624 words of a state, and numpy's ``get_state`` takes 0.3 ms. Both
generators are Mersenne Twisters; this module copies their memory instead.
"""

import ctypes
import random
import struct
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
