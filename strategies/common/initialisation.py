"""Initial values of single modules: which tensors they concern, which method sets them, and from which seed."""

from binascii import crc32
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from strategies.common.transformers_compat import initialiser_of


def initialiser(model: nn.Module, name: str) -> Callable[[], Any] | None:
    """Return the method that initialises a module of a model; ``None`` if there is none.

    For a module within a Hugging Face model, this is ``_init_weights`` of that model; otherwise it is
    ``reset_parameters`` of the module.

    Args:
        model: The whole model.
        name: Dotted name of the module in it.
    """
    if (function := initialiser_of(model, name)) is not None:
        return function
    module = model.get_submodule(name)
    for method in ("reset_parameters", "_reset_parameters"):  # nn.MultiheadAttention uses an underscore
        if callable(own := getattr(module, method, None)):
            return own
    return None


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module, by name, without its submodules."""
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


@contextmanager
def seeded_by_name(name: str) -> Iterator[None]:
    """Context in which the random seed depends on the process's seed and a module's name only.

    The values of a module then depend neither on other modules nor on the process that initialises it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(crc32(name.encode()) ^ (torch.initial_seed() & 0xFFFFFFFF))
        yield
