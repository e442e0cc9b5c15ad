"""Initial values of single modules: of which tensors, what sets them, and from which seed."""

from binascii import crc32
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from strategies.common.transformers_compat import initialiser_of


def initialiser(model: nn.Module, name: str) -> Callable[[], Any] | None:
    """Return what initialises a module of a model; ``None`` if there is no such method.

    It is ``_init_weights`` of the model of Hugging Face that the module is a part of, else its own
    ``reset_parameters``.

    Args:
        model: The whole model.
        name: Dotted name of the module in it.
    """
    if (function := initialiser_of(model, name)) is not None:
        return function
    module = model.get_submodule(name)
    for method in ("reset_parameters", "_reset_parameters"):  # that of nn.MultiheadAttention has an underscore
        if callable(own := getattr(module, method, None)):
            return own
    return None


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module itself, by name, without those of its submodules."""
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


@contextmanager
def seeded_by_name(name: str) -> Iterator[None]:
    """Within this, random numbers come from a seed made of the process's seed and a module's name.

    The values of a module then do not depend on other modules, nor on the process that initialises it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(crc32(name.encode()) ^ (torch.initial_seed() & 0xFFFFFFFF))
        yield
