"""The tensors in a nested structure, by names that are put together from the keys on the way to them."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strategies.common.torch_compat import tree_flatten_with_path, tree_map, tree_map_only, tree_map_with_path


def flat(tree: Any, prefix: str = "") -> dict[str, Tensor]:
    """The tensors in a nested structure by their names."""
    leaves, _ = tree_flatten_with_path(tree)
    return {_name(path, prefix): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def replaced(tree: Any, tensors: Mapping[str, Tensor], prefix: str = "") -> Any:
    """The structure with other tensors at the names that ``tensors`` has."""
    result = tree_map_with_path(lambda path, leaf: tensors.get(_name(path, prefix), leaf), tree)
    if isinstance(tree, OrderedDict):
        result.__dict__.update(tree.__dict__)  # a state dict's versions of modules
    return result


@torch.no_grad()
def take_over(tree: dict[Any, Any], now: Mapping[Any, Any]) -> None:
    """Gives a nested dict the values of another one; tensors of the same shape stay the same objects."""
    for key in [key for key in tree if key not in now]:
        del tree[key]
    for key, value in now.items():
        before = tree.get(key)
        if isinstance(before, Tensor) and isinstance(value, Tensor) and before.shape == value.shape:
            if not before.is_meta and before is not value:
                before.copy_(value)
        elif isinstance(before, dict) and isinstance(value, Mapping):
            take_over(before, value)
        else:
            tree[key] = value


def on_cpu(tree: Any) -> Any:
    """The structure with its tensors in the memory of the host."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), tree)


def _name(path: Sequence[Any], prefix: str) -> str:
    return ".".join(
        [*([prefix] if prefix else []), *(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)]
    )


@dataclass(frozen=True)
class TensorLayout:
    """Stands for a tensor in the layout of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def layouts(value: Any) -> Any:
    """The value with layouts in place of its tensors."""
    return tree_map(lambda leaf: _layout(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def _layout(tensor: torch.Tensor) -> TensorLayout:
    return TensorLayout(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def with_meta_tensors(value: Any) -> Any:
    """The value with tensors on the ``meta`` device in place of layouts."""
    return tree_map(
        lambda leaf: (
            torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, TensorLayout) else leaf
        ),
        value,
    )
