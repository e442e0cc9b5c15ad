"""How ``Pipe`` splits its inputs into micro-batches and joins their outputs.

Unlike :mod:`~strategies.pipeline.stage.microbatch.split`, this module splits only positional arguments that are
tensors, not tensors inside of containers, and splits each tensor independently, as the ``Pipe`` that PyTorch removed in
2.4 did.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from strategies.pipeline.stage.microbatch.split import NoChunk, plain


def scatter(inputs: Sequence[Any], chunks: int) -> list[tuple[Any, ...]]:
    """Split positional arguments into those of each micro-batch.

    Args:
        inputs: Tensors ``[batch, ...]``, which ``Tensor.chunk`` splits, and other values, which are not split.
        chunks: Maximum number of micro-batches.

    Returns:
        The arguments of each micro-batch. Split tensors are views.

    Raises:
        TypeError: If no argument is a tensor.
        RuntimeError: If the tensors give different numbers of parts.
        ValueError: If a tensor has no dimensions.
    """
    if not has_tensor(inputs):
        kinds = ", ".join(type(value).__name__ for value in inputs) or "nothing"
        raise TypeError(
            f"Pipe got {kinds}, but needs a tensor among its inputs, to split its first dimension into micro-batches; "
            "pass tensors that are in tuples, lists or dicts as separate arguments"
        )
    split = {place: value for place, value in enumerate(inputs) if _is_split(value)}
    scalars = [place for place, value in split.items() if value.dim() == 0]
    if scalars and chunks > 1:
        raise ValueError(f"input {scalars[0]} of Pipe has no dimension to split; pass it as NoChunk(tensor)")
    pieces = {place: (value,) if value.dim() == 0 else value.chunk(chunks) for place, value in split.items()}
    counts = sorted({len(parts) for parts in pieces.values()} or {1})
    if len(counts) > 1:
        sizes = ", ".join(str(len(value)) for value in split.values())
        raise RuntimeError(
            f"Found different number of chunks for the inputs of Pipe: {sizes} rows give {counts} micro-batches with "
            f"chunks={chunks}; pass a tensor that is not a batch as NoChunk(tensor)"
        )
    whole = [plain(value) for value in inputs]
    return [tuple(pieces[k][m] if k in pieces else value for k, value in enumerate(whole)) for m in range(counts[0])]


def gather(outputs: Sequence[Any]) -> Any:
    """Join the outputs of the last layer: tensors along their first dimension, other values into a list.

    A tuple or a list is joined entry by entry.

    Raises:
        ValueError: If the micro-batches gave outputs of different kinds, or a tensor has no dimensions.
    """
    if not isinstance(outputs[0], tuple | list):
        return _join_column(outputs)
    lengths = sorted({len(output) if isinstance(output, tuple | list) else 1 for output in outputs})
    if len(lengths) > 1:
        raise ValueError(f"the last layer returned different numbers of values for the micro-batches: {lengths}")
    columns = [_join_column(column) for column in zip(*outputs, strict=True)]
    return columns if isinstance(outputs[0], list) else tuple(columns)


def _join_column(column: Sequence[Any]) -> Any:
    if not isinstance(column[0], Tensor):
        return list(column)
    if any(not isinstance(value, Tensor) for value in column):
        kinds = ", ".join(type(value).__name__ for value in column)
        raise ValueError(f"the last layer must return a tensor for every micro-batch or for none, but returned {kinds}")
    if len(column) == 1:
        return column[0]
    if column[0].dim() == 0:
        raise ValueError(
            "the last layer returned a tensor without rows, which cannot be joined over micro-batches; reduce it "
            "outside of Pipe"
        )
    return torch.cat(list(column))


def _is_split(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, NoChunk)


def has_tensor(values: Sequence[Any]) -> bool:
    """Whether one of the arguments is a tensor."""
    return any(isinstance(value, Tensor) for value in values)
