"""How ``Pipe`` splits its inputs into micro-batches and joins their outputs.

Unlike :mod:`~strategies.pipeline.microbatch.split` it looks at positional arguments only, not into what they contain,
and splits each tensor by itself, as the ``Pipe`` that PyTorch removed in 2.4 did.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from strategies.common.torch_compat import without_torch_function


class NoChunk(Tensor):
    """Marks a tensor among the inputs of a pipeline that every micro-batch gets whole, such as a mask for all rows.

    Gradients into it are summed over the micro-batches. It is a view of the tensor: where nothing is split (in one
    process, under DDP) layers use it like the tensor itself.

    Args:
        tensor: The input.

    Raises:
        TypeError: If it is no tensor; those are given whole anyway.
    """

    _tensor: Tensor

    @staticmethod
    def __new__(cls, tensor: Tensor) -> "NoChunk":
        if not isinstance(tensor, Tensor):
            raise TypeError(f"NoChunk is for tensors; {type(tensor).__name__} is given to every micro-batch anyway")
        marked = tensor.as_subclass(cls)
        marked._tensor = tensor
        return marked

    @property
    def tensor(self) -> Tensor:
        """The input."""
        return self._tensor

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with without_torch_function():
            result = func(*args, **(kwargs or {}))
        converted = getattr(func, "__name__", "") in _CONVERSIONS and isinstance(args[0], NoChunk)
        return NoChunk(result) if converted and type(result) is Tensor else result

    def __deepcopy__(self, memo: Any) -> "NoChunk":
        return NoChunk(copy.deepcopy(self.tensor, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return NoChunk, (self.tensor,)


_CONVERSIONS = ("to", "cuda", "cpu", "half", "bfloat16", "float", "double", "detach", "clone", "pin_memory")
"""Methods after which a :class:`NoChunk` is still one, such as those by which trainers prepare a batch."""


def plain(leaf: Any) -> Any:
    """The leaf of an input without its mark."""
    return leaf.tensor if isinstance(leaf, NoChunk) else leaf


def scatter(inputs: Sequence[Any], chunks: int) -> list[tuple[Any, ...]]:
    """Splits positional arguments into those of each micro-batch.

    Args:
        inputs: Tensors ``[batch, ...]``, which are split by ``Tensor.chunk``; and others, which are not.
        chunks: How many micro-batches there are at most.

    Returns:
        The arguments of each micro-batch; tensors are views.

    Raises:
        TypeError: If no argument is a tensor.
        RuntimeError: If the tensors differ in the number of parts that they give.
        ValueError: If one has no dimension.
    """
    if not has_tensor(inputs):
        kinds = ", ".join(type(value).__name__ for value in inputs) or "nothing"
        raise TypeError(
            f"Pipe got {kinds}, but needs a tensor among its inputs, to split its first dimension into micro-batches; "
            "give those in tuples, lists and dicts as arguments of their own"
        )
    split = {place: value for place, value in enumerate(inputs) if _is_split(value)}
    scalars = [place for place, value in split.items() if value.dim() == 0]
    if scalars and chunks > 1:
        raise ValueError(f"input {scalars[0]} of Pipe has no dimension to split; give it as NoChunk(tensor)")
    pieces = {place: (value,) if value.dim() == 0 else value.chunk(chunks) for place, value in split.items()}
    counts = sorted({len(parts) for parts in pieces.values()} or {1})
    if len(counts) > 1:
        sizes = ", ".join(str(len(value)) for value in split.values())
        raise RuntimeError(
            f"Found different number of chunks for the inputs of Pipe: {sizes} rows give {counts} micro-batches with "
            f"chunks={chunks}; give a tensor that is no batch as NoChunk(tensor)"
        )
    whole = [plain(value) for value in inputs]
    return [tuple(pieces[k][m] if k in pieces else value for k, value in enumerate(whole)) for m in range(counts[0])]


def gather(outputs: Sequence[Any]) -> Any:
    """Joins what the last layer returned for each micro-batch: tensors by their rows, others into a list.

    A tuple or a list is joined entry by entry.

    Raises:
        ValueError: If the micro-batches gave outputs of different kinds, or a tensor has no rows.
    """
    if not isinstance(outputs[0], tuple | list):
        return _joined(outputs)
    lengths = sorted({len(output) if isinstance(output, tuple | list) else 1 for output in outputs})
    if len(lengths) > 1:
        raise ValueError(f"the last layer returned different numbers of values for the micro-batches: {lengths}")
    columns = [_joined(column) for column in zip(*outputs, strict=True)]
    return columns if isinstance(outputs[0], list) else tuple(columns)


def _joined(column: Sequence[Any]) -> Any:
    if not isinstance(column[0], Tensor):
        return list(column)
    if any(not isinstance(value, Tensor) for value in column):
        raise ValueError(f"the last layer returned a tensor and other things: {[type(value) for value in column]}")
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
