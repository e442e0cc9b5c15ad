"""Random states of this process and of single generators, as plain types and tensors for checkpoints."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
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
    """Return the state of torch (on the CPU), Python and numpy in this process; takes less than 0.1 ms."""
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}


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
