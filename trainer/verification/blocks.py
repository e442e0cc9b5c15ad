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
from strategies.lightning.features.layers.construction import ModelConstruction
from strategies.lightning.finding_blocks import find_path

_COUNTS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_blocks", "depth"),
    *("num_decoder_layers", "encoder_layers", "decoder_layers"),
)
"""Attributes of a configuration, or of a module that contains blocks, that hold the number of blocks."""

Lists = Sequence[Sequence[str]]
"""The paths of the parts of each list of blocks; a list that is not divided has one part."""


def check_blocks(model: nn.Module, lists: Lists, number: int, num_stages: int = 1) -> None:
    """Check that lists of blocks can be shortened, and that enough layers of each list for all stages remain.

    Raises:
        MisconfigurationException: If the lists cannot be shortened.
    """
    modules, paths = dict(model.named_modules()), _paths_of(lists)
    named = " and ".join(map(repr, paths))
    for path in paths:
        blocks = modules.get(path)
        if not isinstance(blocks, nn.ModuleList | nn.Sequential):
            raise MisconfigurationException(
                f"blocks={number} shortens an nn.ModuleList or nn.Sequential, but {path!r} of {type(model).__name__} "
                f"is {'not there' if blocks is None else type(blocks).__name__}. Leave blocks out."
            )
    layers = {path: list(cast(nn.ModuleList, modules[path])) for path in paths}
    found = {path: _repeated(own) for path, own in layers.items()}
    most = max(found.values(), key=lambda each: each.number)
    if most.number < 2:
        raise MisconfigurationException(
            f"blocks={number} keeps some of the blocks that {named} repeats, but no two of its "
            f"{sum(map(len, layers.values()))} layers in a row are alike. Leave blocks out, and verify a smaller model "
            "of the same classes."
        )
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= most.number:
        kind = "blocks that are alike" if most.length == 1 else f"groups of {most.length} layers that are alike"
        have = "have at most" if len(paths) > 1 else "has"
        raise MisconfigurationException(
            f"blocks={number}, but {named} {have} {most.number} {kind} in a row; give 1 to {most.number}."
        )
    for parts in lists:
        if (left := sum(len(layers[path]) - found[path].removed(number) for path in parts)) < num_stages:
            least = next(
                more
                for more in range(number, most.number + 2)
                if sum(len(layers[path]) - found[path].removed(more) for path in parts) >= num_stages
                or more > most.number
            )
            way = f"give at least {least}" if least <= most.number else "leave blocks out, and give fewer stages"
            raise MisconfigurationException(
                f"blocks={number} leaves {left} {'layer' if left == 1 else 'layers'} in "
                f"{' and '.join(map(repr, parts))} for {num_stages} stages; {way}."
            )


def shorten(model: nn.Module, lists: Lists, number: int) -> None:
    """Keep the first ``number`` of the equal blocks of each part of each list, and adjust the counts.

    All layers before and after these blocks stay. A part with fewer equal blocks keeps all of them.
    """
    check_blocks(model, lists, number)
    for path in _paths_of(lists):
        _shorten(model, path, number)


def _shorten(model: nn.Module, path: str, number: int) -> None:
    blocks = cast(nn.ModuleList, attrgetter(path)(model))
    layers = dict(blocks._modules)
    found = _repeated(list(blocks))
    if not found.removed(number):
        return
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


def lists_of(model: LightningModule, given: str | Sequence[str] | None) -> Lists:
    """Return the paths of the lists of blocks that are pipelined.

    Args:
        model: The model.
        given: The path or paths that the user has given; ``None`` to find them.
    """
    found = find_path(model, given, 2, several=True)
    return ((found,),) if isinstance(found, str) else found


def kept_blocks(model: nn.Module, lists: Lists, number: int) -> str:
    """Return a note about the blocks that are kept."""
    found = {path: _repeated(list(attrgetter(path)(model))) for path in _paths_of(lists)}
    short = [path for path, own in found.items() if own.removed(number)]
    whole = [path for path, own in found.items() if not own.removed(number)]
    of_each = " of each" if len(short) > 1 else ""
    note = f"Of the blocks of {' and '.join(map(repr, short))}, only the first {number}{of_each} were run."
    if short and whole:
        note += f" All layers of {' and '.join(map(repr, whole))} were run."
    return note if short else "All blocks were run."


def _paths_of(lists: Lists) -> list[str]:
    return [path for parts in lists for path in parts]


def is_built_later(model: LightningModule, given: str | Sequence[str] | None) -> bool:
    """Return whether ``configure_model`` makes a list of blocks, because it does not exist yet."""
    if not is_overridden("configure_model", model):
        return False
    try:
        return not set(_paths_of(lists_of(model, given))) <= set(dict(model.named_modules()))
    except MisconfigurationException:
        return True


def shorten_when_built(
    model: LightningModule, given: str | Sequence[str] | None, number: int, *, is_pipeline: bool
) -> None:
    """Shorten the lists of blocks at the end of ``configure_model``; blocks that are left out get no memory.

    Args:
        model: The model.
        given: The path or paths of the lists; ``None`` to find them.
        number: The number of blocks to keep.
        is_pipeline: Whether the strategy is a pipeline, whose stages build their layers.
    """
    original = model.configure_model

    def configure_model(self: LightningModule) -> None:
        if not is_built_later(self, given):  # in an earlier call
            return original()
        construction = ModelConstruction(None)
        with nullcontext() if is_pipeline else construction.without_memory():
            original()
        shorten(self, lists_of(self, given), number)
        if not is_pipeline:
            construction.builder(self)(list(self.modules()))
        return None

    replaced(model, "configure_model", MethodType(configure_model, model))


class _RepeatedGroups(NamedTuple):
    """Consecutive groups of layers that perform the same computation.

    Attributes:
        start: The index of the first layer.
        number: The number of groups.
        length: The number of layers of a group.
    """

    start: int
    number: int
    length: int

    def removed(self, number: int) -> int:
        """Return the number of layers that are left out if ``number`` groups are kept."""
        return max(0, self.number - number) * self.length


def _repeated(layers: Sequence[nn.Module]) -> _RepeatedGroups:
    """Return the groups that cover most layers; of several, the smallest groups: ``a bc bc bc d``, 3 groups of 2."""
    kinds, longest = kinds_of(layers), _RepeatedGroups(0, min(1, len(layers)), 1)
    for length in range(1, len(kinds) // 2 + 1):
        start = 0
        for is_same, group in groupby(kinds[i] == kinds[i + length] for i in range(len(kinds) - length)):
            same = len(list(group))
            found = _RepeatedGroups(start, same // length + 1, length)
            if is_same and found.number > 1 and found.number * length > longest.number * longest.length:
                longest = found
            start += same
    return longest
