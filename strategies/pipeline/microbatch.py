"""Splitting a batch into micro-batches and merging what comes out of them.

A value is a tensor or any nesting of tuples, lists and dicts of tensors and other objects (a pytree).
"""

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten


def split(value: Any, microbatches: int) -> list[Any]:
    """Splits every tensor of ``value`` along its first dimension into at most ``microbatches`` parts, nested like it.

    Sizes differ by at most one row, the larger parts first. A batch of fewer rows than ``microbatches`` gives one part
    a row; an empty batch gives one empty part. Tensors without a dimension and objects that are not tensors are given
    to every part.

    Args:
        value: Tensors of shape ``[batch, ...]``, nested in any way.
        microbatches: How many parts to make at most; at least 1.

    Returns:
        The parts, in order; tensors in them are views of those of ``value``.

    Raises:
        ValueError: If no tensor has a batch dimension, or if two tensors differ in it.
    """
    leaves, spec = tree_flatten(value)
    rows = _num_rows(leaves)
    parts = max(1, min(microbatches, rows))
    columns = [leaf.tensor_split(parts) if _has_rows(leaf) else [leaf] * parts for leaf in leaves]
    return [tree_unflatten(list(column), spec) for column in zip(*columns, strict=True)]


def merge(parts: list[Any]) -> Any:
    """Joins the outputs of the micro-batches: tensors along their first dimension, other objects by being equal.

    The inverse of :func:`split`.

    Raises:
        ValueError: If the parts differ in nesting, if a tensor has no batch dimension, or if objects that are not
            tensors differ.
    """
    flat = [tree_flatten(part) for part in parts]
    spec = flat[0][1]
    if any(other_spec != spec for _, other_spec in flat[1:]):
        raise ValueError(f"the pipelined module returned differently nested outputs: {[s for _, s in flat]}")
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten([_join(list(column)) for column in columns], spec)


def _join(column: list[Any]) -> Any:
    first = column[0]
    if not isinstance(first, torch.Tensor):
        if any(other is not first and other != first for other in column[1:]):
            raise ValueError(f"the pipelined module returned a different {type(first).__name__} for each micro-batch")
        return first
    if first.dim() == 0:
        raise ValueError(
            "the pipelined module returned a tensor without a batch dimension, which cannot be joined over "
            "micro-batches; return one value per row and reduce it in training_step"
        )
    return torch.cat(column)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _num_rows(leaves: list[Any]) -> int:
    sizes = sorted({leaf.shape[0] for leaf in leaves if _has_rows(leaf)})
    if not sizes:
        raise ValueError("the pipelined module got no tensor with a batch dimension, so there is nothing to split")
    if len(sizes) > 1:
        raise ValueError(
            f"the tensors given to the pipelined module differ in their first dimension: {sizes}; every one of them "
            "is split into micro-batches along it, so it must be the batch size"
        )
    return sizes[0]
