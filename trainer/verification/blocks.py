"""A model with fewer blocks, for models that do not fit in one process."""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import groupby
from operator import attrgetter
from types import MethodType
from typing import Any, NamedTuple, cast

from torch import nn

from strategies.common.patching import replaced
from strategies.common.stage_layers import kinds_of
from strategies.lightning.compat import LightningModule, MisconfigurationException, is_overridden
from strategies.lightning.features.construction import ModelConstruction
from strategies.lightning.partitioning import find_path

_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_blocks", "depth")
"""Attributes of a configuration, or of a module that contains blocks, that hold the number of blocks."""


def check_blocks(model: nn.Module, path: str, number: int, num_stages: int = 1) -> None:
    """Check that a list of blocks can be shortened, and that enough layers for all stages remain.

    Raises:
        MisconfigurationException: If the list cannot be shortened.
    """
    blocks = dict(model.named_modules()).get(path)
    if not isinstance(blocks, nn.ModuleList | nn.Sequential):
        raise MisconfigurationException(
            f"blocks={number} shortens an nn.ModuleList or nn.Sequential, but {path!r} of {type(model).__name__} is "
            f"{'not there' if blocks is None else type(blocks).__name__}. Leave blocks out."
        )
    found = _repeated(list(blocks))
    if found.number < 2:
        raise MisconfigurationException(
            f"blocks={number} keeps some of the blocks that {path!r} repeats, but no two of its {len(blocks)} layers "
            "in a row are alike. Leave blocks out, and verify a smaller model of the same classes."
        )
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= found.number:
        kind = "blocks that are alike" if found.length == 1 else f"groups of {found.length} layers that are alike"
        raise MisconfigurationException(
            f"blocks={number}, but {path!r} has {found.number} {kind} in a row; give 1 to {found.number}."
        )
    if (left := len(blocks) - (found.number - number) * found.length) < num_stages:
        raise MisconfigurationException(
            f"blocks={number} leaves {left} {'layer' if left == 1 else 'layers'} in {path!r} for {num_stages} stages; "
            f"give at least {number + -(-(num_stages - left) // found.length)}."
        )


def shorten(model: nn.Module, path: str, number: int) -> None:
    """Keep the first ``number`` of the equal blocks and all layers before and after them, and adjust the counts."""
    check_blocks(model, path, number)
    blocks = cast(nn.ModuleList, attrgetter(path)(model))
    layers = dict(blocks._modules)
    found = _repeated(list(blocks))
    for name in list(layers)[found.start + number * found.length : found.start + found.number * found.length]:
        del layers[name]
    numbered = all(name.isdecimal() for name in layers)
    blocks._modules = {str(i) if numbered else name: layer for i, (name, layer) in enumerate(layers.items())}
    holders: list[Any] = [model]
    for name in path.split(".")[:-1]:
        holders.append(getattr(holders[-1], name))
    for holder in [*holders, *(getattr(holder, "config", None) for holder in holders)]:
        for name in _COUNTS:
            if holder is not None and getattr(holder, name, None) == found.number:
                setattr(holder, name, number)


def path_of_list(model: LightningModule, path: str | None, number: int) -> str:
    """Return the path of the one list of blocks.

    Args:
        model: The model.
        path: The path of the list; ``None`` to find it.
        number: The number of blocks to keep, for the message.

    Raises:
        MisconfigurationException: If there is no list, or if several lists are pipelined.
    """
    found = path or find_path(model, None, 2)
    if not isinstance(found, str):
        raise MisconfigurationException(
            f"blocks={number} keeps the first blocks of one list, but several lists are pipelined, {found}. Leave "
            "blocks out, or name one of them by module=..."
        )
    return found


def is_built_later(model: LightningModule, path: str | None) -> bool:
    """Return whether ``configure_model`` makes the list of blocks, because it does not exist yet."""
    if not is_overridden("configure_model", model):
        return False
    try:
        return find_path(model, path, 2) not in dict(model.named_modules())
    except MisconfigurationException:
        return True


def shorten_when_built(model: LightningModule, path: str | None, number: int, *, is_pipeline: bool) -> None:
    """Shorten the list of blocks at the end of ``configure_model``; blocks that are left out get no memory.

    Args:
        model: The model.
        path: The path of the list; ``None`` to find it.
        number: The number of blocks to keep.
        is_pipeline: Whether the strategy is a pipeline, whose stages build their layers.
    """
    original = model.configure_model

    def configure_model(self: LightningModule) -> None:
        if not is_built_later(self, path):  # in an earlier call
            return original()
        construction = ModelConstruction(None)
        with nullcontext() if is_pipeline else construction.recording():
            original()
        shorten(self, path_of_list(self, path, number), number)
        if not is_pipeline:
            construction.builder(self)(list(self.modules()))
        return None

    replaced(model, "configure_model", MethodType(configure_model, model))


class _Repeated(NamedTuple):
    """Consecutive groups of layers that perform the same computation.

    Attributes:
        start: The index of the first layer.
        number: The number of groups.
        length: The number of layers of a group.
    """

    start: int
    number: int
    length: int


def _repeated(layers: Sequence[nn.Module]) -> _Repeated:
    """Return the groups that cover most layers; of several, the smallest groups: ``a bc bc bc d``, 3 groups of 2."""
    kinds, longest = kinds_of(layers), _Repeated(0, min(1, len(layers)), 1)
    for length in range(1, len(kinds) // 2 + 1):
        start = 0
        for is_same, group in groupby(kinds[i] == kinds[i + length] for i in range(len(kinds) - length)):
            same = len(list(group))
            found = _Repeated(start, same // length + 1, length)
            if is_same and found.number > 1 and found.number * length > longest.number * longest.length:
                longest = found
            start += same
    return longest
