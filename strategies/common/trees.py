"""Find, name and replace the tensors in nested structures."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strategies.common.torch_compat import tree_flatten_with_path, tree_leaves, tree_map_only, tree_map_with_path


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in a nested structure, in the order of the leaves."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def special_layout(tensor: Tensor) -> str:
    """Return the layout of a sparse, quantized or nested tensor, in words; an empty string for all other tensors."""
    if tensor.is_quantized or tensor.is_nested:
        return "quantized" if tensor.is_quantized else "nested"
    return "" if tensor.layout is torch.strided else f"{tensor.layout}".removeprefix("torch.")


def element_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of the elements of a dense tensor on the CPU, in the order of the elements."""
    elements = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # ``contiguous`` leaves a tensor of one element as it is, whatever its stride, and ``view`` refuses most strides.
    return elements.as_strided((elements.numel(),), (1,)).view(torch.uint8)


def flat(tree: Any, prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors in a nested structure, keyed by flattened path, such as ``states.0.exp_avg``."""
    leaves, _ = tree_flatten_with_path(tree)
    return {name_of(path, prefix): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def with_tensors(tree: Any, tensors: Mapping[str, Any], prefix: str = "") -> Any:
    """Return the structure with some tensors replaced by ``tensors``, whose keys are those of :func:`flat`."""
    result = tree_map_with_path(lambda path, leaf: tensors.get(name_of(path, prefix), leaf), tree)
    if isinstance(tree, OrderedDict):
        result.__dict__.update(tree.__dict__)  # the metadata of a state dict, with the versions of modules
    return result


@torch.no_grad()
def take_over(tree: dict[Any, Any], now: Mapping[Any, Any]) -> None:
    """Copy the values of ``now`` into the nested dict ``tree``. Tensors of the same shape stay the same objects."""
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
    """Return the structure with its tensors detached and in host memory."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), tree)


def name_of(path: Sequence[Any], prefix: str = "") -> str:
    """Return the flattened path of a leaf, such as ``states.0.exp_avg``, given its path in a pytree."""
    return ".".join(
        [*([prefix] if prefix else []), *(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)]
    )


@dataclass(frozen=True)
class TensorLayout:
    """Shape, dtype and ``requires_grad`` of a tensor; takes the tensor's place in a description of a structure."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def layouts(tree: Any) -> Any:
    """Return the structure with a :class:`TensorLayout` in place of each tensor."""
    return tree_map_only(Tensor, lambda t: TensorLayout(tuple(t.shape), t.dtype, t.requires_grad), tree)


def with_meta_tensors(tree: Any) -> Any:
    """Return the structure with a tensor on the ``meta`` device in place of each :class:`TensorLayout`."""
    return tree_map_only(TensorLayout, lambda own: torch.empty(own.shape, dtype=own.dtype, device="meta"), tree)
