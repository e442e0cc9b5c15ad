"""A model with fewer blocks, for models that do not fit in one process."""

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, cast

from torch import nn

from strategies.common.stage_layers import kinds_of
from strategies.lightning.compat import LightningModule, MisconfigurationException

_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_blocks", "depth")
"""Attributes of a configuration, or of a module that contains blocks, that hold the number of blocks."""


def check_blocks(model: LightningModule, path: str, number: int) -> None:
    """Check that a list of blocks can be shortened.

    Raises:
        MisconfigurationException: If the list cannot be shortened.
    """
    blocks = dict(model.named_modules()).get(path)
    if not isinstance(blocks, nn.ModuleList | nn.Sequential):
        raise MisconfigurationException(
            f"blocks={number} shortens an nn.ModuleList or nn.Sequential, but {path!r} of {type(model).__name__} is "
            f"{'not there' if blocks is None else type(blocks).__name__}. Leave blocks out."
        )
    most = len(_alike(list(blocks)))
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= most:
        raise MisconfigurationException(
            f"blocks={number}, but {path!r} has {most} {'blocks that are alike' if most > 1 else 'block'} in a row; "
            f"give 1 to {most}."
        )


def shorten(model: LightningModule, path: str, number: int) -> None:
    """Keep the first ``number`` of the equal blocks and all layers before and after them, and adjust the counts."""
    check_blocks(model, path, number)
    blocks = cast(nn.ModuleList, attrgetter(path)(model))
    layers = dict(blocks._modules)
    run = _alike(list(blocks))
    for name in list(layers)[run.start + number : run.stop]:
        del layers[name]
    numbered = all(name.isdecimal() for name in layers)
    blocks._modules = {str(i) if numbered else name: layer for i, (name, layer) in enumerate(layers.items())}
    holders: list[Any] = [model]
    for name in path.split(".")[:-1]:
        holders.append(getattr(holders[-1], name))
    for holder in [*holders, *(getattr(holder, "config", None) for holder in holders)]:
        for name in _COUNTS:
            if holder is not None and getattr(holder, name, None) == len(run):
                setattr(holder, name, number)


def _alike(layers: Sequence[nn.Module]) -> range:
    """Return the indices of the longest sequence of layers of the same kind."""
    longest, start = range(0), 0
    for _, group in groupby(kinds_of(layers)):
        own = range(start, start := start + len(list(group)))
        longest = max(longest, own, key=len)
    return longest
