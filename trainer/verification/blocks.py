"""A model with fewer blocks, for models that do not fit in one process."""

from operator import attrgetter
from typing import Any, cast

from torch import nn

from strategies.lightning.compat import LightningModule, MisconfigurationException

_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_blocks", "depth")
"""Attributes of a configuration, or of a module around its blocks, that tell the number of blocks."""


def check_blocks(model: LightningModule, path: str, number: int) -> None:
    """Check that a list of blocks can be shortened.

    Raises:
        MisconfigurationException: If it cannot.
    """
    modules = dict(model.named_modules())
    blocks = modules.get(path)
    if not isinstance(blocks, nn.ModuleList | nn.Sequential):
        raise MisconfigurationException(
            f"blocks={number} shortens an nn.ModuleList or nn.Sequential, but {path!r} of {type(model).__name__} is "
            f"{'not there' if blocks is None else type(blocks).__name__}. Leave blocks out."
        )
    if not 1 <= number <= len(blocks):
        raise MisconfigurationException(f"blocks={number}, but {path!r} has {len(blocks)}; give 1 to {len(blocks)}.")


def shorten(model: LightningModule, path: str, number: int) -> None:
    """Keep the first blocks of a list, and set counts of blocks beside it accordingly."""
    check_blocks(model, path, number)
    blocks = cast(nn.ModuleList, attrgetter(path)(model))
    before = len(blocks)
    for name in list(blocks._modules)[number:]:
        del blocks._modules[name]
    holders: list[Any] = [model]
    for name in path.split(".")[:-1]:
        holders.append(getattr(holders[-1], name))
    for holder in [*holders, *(getattr(holder, "config", None) for holder in holders)]:
        for name in _COUNTS:
            if holder is not None and getattr(holder, name, None) == before:
                setattr(holder, name, number)
