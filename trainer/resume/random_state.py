"""Random states of this process and of single generators, as plain types and tensors for checkpoints."""

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from strategies.common.random_seeds import WORDS, words_of_python

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
        self._generator, self._words_of_python = words_of_python()
        self._bit_generator, self._words_of_numpy = None, None

    def __reduce__(self) -> Any:
        return RandomStateReader, ()  # addresses are those of this process

    def read(self) -> dict[str, Any]:
        """Return the state of the process; entries that have not changed are the same objects as before."""
        return {"torch": torch.get_rng_state(), "python": self._of_python(), "numpy": self._of_numpy()}

    def _of_python(self) -> Any:
        if self._words_of_python is None:
            return random.getstate()
        words = self._words_of_python.raw, self._generator.gauss_next
        if words != self._python[0]:
            self._python = words, random.getstate()
        return self._python[1]

    def _of_numpy(self) -> Any:
        generator: Any = np.random.mtrand.get_bit_generator()
        if generator is not self._bit_generator:
            self._bit_generator, self._words_of_numpy = generator, _words_of_numpy(generator)
            self._numpy = (None, None)
        if self._words_of_numpy is None:
            return np.random.get_state()
        words = self._words_of_numpy.raw
        # The words do not include the second number that ``randn`` caches. Only a draw can cache a number.
        if words != self._numpy[0] or self._numpy[1][3]:
            self._numpy = words, np.random.get_state()
        return self._numpy[1]


def _words_of_numpy(generator: Any) -> Any:
    """Return the memory of a bit generator of numpy, or ``None`` if it is not a ``MT19937``."""
    if type(generator) is not np.random.MT19937:
        return None
    return (ctypes.c_char * WORDS.size).from_address(generator.ctypes.state_address)


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
    """Replace tuples and numpy arrays with lists at any depth, which ``torch.load(weights_only=True)`` can read."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


def _with_tuples(state: Any) -> tuple[Any, ...]:
    version, words, gauss = state
    return version, tuple(words), gauss
