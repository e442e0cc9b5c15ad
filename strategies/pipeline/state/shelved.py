"""Tensors of a checkpoint whose values are on the shelf of a stage, as user code and the writer see them.

checkpoint["state_dict"]["0.weight"]           shape and dtype; reading values fetches them
checkpoint["state_dict"]["0.weight"].mul_(2)   an error, because the change would not reach the stage
checkpoint["state_dict"]["0.weight"] = mine    the file contains this tensor
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from strategies.common.torch_compat import tree_leaves, tree_map_only
from strategies.pipeline.control.parts import ShelvedLayout
from strategies.pipeline.control.shelf import Fetch, ShelvedPart, Wanted, among_commands, fetched_values, for_user
from strategies.pipeline.state.remote_tensor import RemoteBuffer, Source


@dataclass
class _FromShelf(Source):
    """The place of the values of a :class:`ShelvedTensor`. ``name`` is the path in the part."""

    part: ShelvedPart | None = None

    layout: ShelvedLayout | None = None

    @property
    def wanted(self) -> Wanted:
        assert self.part is not None and self.layout is not None
        return Wanted(self.part, self.name, self.layout)

    def value(self, described: str) -> Tensor:
        return next(fetched_values([self.wanted], for_user))


class ShelvedTensor(RemoteBuffer):
    """Represents a tensor on the shelf of a stage. Its device is the CPU, the device of fetched values."""

    @property
    def relay_wanted(self) -> Wanted:
        """The part of the stage's state that contains the values, and the path in this part."""
        return cast(_FromShelf, self.relay_source).wanted


def shelved_tensors(part: ShelvedPart) -> Any:
    """Return a part of the state with a :class:`ShelvedTensor` in place of each tensor on the shelf."""

    def tensor(path: str, layout: ShelvedLayout) -> ShelvedTensor:
        made = cast(ShelvedTensor, layout.empty("meta").as_subclass(ShelvedTensor))
        made.relay_name = f"{path} {list(layout.shape)} of a checkpoint"
        made.relay_source = _FromShelf(part.stage, path, torch.device("cpu"), part=part, layout=layout)
        return made

    return part.mapped(tensor)


def is_shelved(tensor: Tensor) -> bool:
    """Return whether a tensor is a :class:`ShelvedTensor`."""
    return isinstance(tensor, ShelvedTensor)


def values_of(tensors: Sequence[ShelvedTensor], fetch: Fetch = among_commands) -> Iterator[Tensor]:
    """Yield the values of tensors, in the order given. If the caller keeps none, one of them is in memory at a time."""
    return fetched_values([tensor.relay_wanted for tensor in tensors], fetch)


def put_values(tree: Any) -> list[Tensor]:
    """Replace the :class:`ShelvedTensor` objects in nested dicts and lists with their values. Returns the values."""
    shelved = list({id(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, ShelvedTensor)}.values())
    values = dict(zip(map(id, shelved), values_of(shelved), strict=True))
    _put(tree, values)
    return list(values.values())


def _put(tree: Any, values: dict[int, Tensor]) -> None:
    entries: Any = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, entry in list(entries):
        if isinstance(entry, ShelvedTensor):
            tree[key] = values[id(entry)]
        elif isinstance(entry, tuple):
            tree[key] = tree_map_only(ShelvedTensor, lambda tensor: values[id(tensor)], entry)
        else:
            _put(entry, values)
