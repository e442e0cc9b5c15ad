"""Splitting a batch into micro-batches and merging what comes out of them.

A value is a tensor or any nesting of tuples, lists and dicts of tensors and other objects (a pytree).
"""

from collections import Counter
from typing import Any

import torch

from strategies.common.torch_compat import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten
from strategies.pipeline.microbatch.chunks import NoChunk, plain
from strategies.pipeline.microbatch.packing import Packed


def split(value: Any, microbatches: int) -> list[Any]:
    """Splits every tensor of ``value`` along its first dimension into at most ``microbatches`` parts, nested like it.

    Sizes differ by at most one row, the larger parts first. A batch of fewer rows than ``microbatches`` gives one part
    a row; an empty batch gives one empty part. Every part gets the whole of a
    :class:`~strategies.pipeline.microbatch.chunks.NoChunk`, of a tensor without a dimension and of what is no tensor.

    Args:
        value: Tensors of shape ``[batch, ...]``, nested in any way.
        microbatches: How many parts to make at most; at least 1.

    Returns:
        The parts, in order; tensors in them are views of those of ``value``.

    Raises:
        ValueError: If no tensor has a batch dimension, or if two tensors differ in it.
    """
    leaves, spec = tree_flatten(value)
    rows = _num_rows(value, leaves)
    parts = max(1, min(microbatches, rows))
    columns = [leaf.tensor_split(parts) if has_rows(leaf) else [plain(leaf)] * parts for leaf in leaves]
    return [tree_unflatten(list(column), spec) for column in zip(*columns, strict=True)]


def merge(parts: list[Any]) -> Any:
    """Joins the outputs of the micro-batches: tensors along their first dimension, other objects by being equal.

    The inverse of :func:`split`.

    Raises:
        ValueError: If the parts differ in nesting, if a tensor has no batch dimension, or if objects that are not
            tensors differ.
    """
    flat = [tree_flatten(part, is_leaf=lambda node: isinstance(node, Packed)) for part in parts]
    spec = flat[0][1]
    if any(other_spec != spec for _, other_spec in flat[1:]):
        raise ValueError(f"the pipelined module returned differently nested outputs: {[s for _, s in flat]}")
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten([_join(list(column)) for column in columns], spec)


def _join(column: list[Any]) -> Any:
    first = column[0]
    if isinstance(first, Packed):
        objects = [packed.rebuild() for packed in column]
        if any(packed.tensors for packed in column) or any(other != objects[0] for other in objects[1:]):
            raise _not_joined(objects[0])
        return first
    if not isinstance(first, torch.Tensor):
        if any(other is not first and other != first for other in column[1:]):
            raise _not_joined(first)
        return first
    if first.dim() == 0:
        raise ValueError(
            "the pipelined module returned a tensor without a batch dimension, which cannot be joined over "
            "micro-batches; return one value per row and reduce it in training_step"
        )
    return torch.cat(column)


def _not_joined(output: Any) -> ValueError:
    return ValueError(
        f"the pipelined module returned a different {type(output).__name__} for each micro-batch, which cannot be "
        "joined: have its last layer return tensors, in tuples, lists or dicts (and call a model of Hugging Face with "
        "use_cache=False)"
    )


def has_rows(leaf: Any) -> bool:
    """Whether :func:`split` divides a leaf; it gives others to every part."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and not isinstance(leaf, NoChunk)


def _num_rows(value: Any, leaves: list[Any]) -> int:
    sizes = Counter(leaf.shape[0] for leaf in leaves if has_rows(leaf))
    if not sizes:
        raise ValueError("the pipelined module got no tensor with a batch dimension, so there is nothing to split")
    rows = max(sizes, key=lambda size: (size != 1, sizes[size]))
    if len(sizes) > 1:
        names = _names(value, leaves)
        odd = [
            f"{name} of shape {list(leaf.shape)} has {leaf.shape[0]}"
            for name, leaf in zip(names, leaves, strict=True)
            if has_rows(leaf) and leaf.shape[0] != rows
        ]
        usual = next(name for name, leaf in zip(names, leaves, strict=True) if has_rows(leaf) and len(leaf) == rows)
        raise ValueError(
            "every tensor given to the pipelined module is split into micro-batches along its first dimension, which "
            f"must be the batch: {usual} has {rows} rows, but {', '.join(odd)}. Wrap a tensor that all rows share in "
            "NoChunk (from strategies.pipeline import NoChunk), and every micro-batch gets it whole"
        )
    return rows


def _names(value: Any, leaves: list[Any]) -> list[str]:
    """What the input of the module is made of, as Python would name it."""
    try:
        return [f"input{keystr(path)}" for path, _ in tree_flatten_with_path(value)[0]]
    except ValueError:  # a container of somebody else's, which does not tell the names of what is in it
        return [f"tensor or object {number} in the input" for number in range(len(leaves))]
