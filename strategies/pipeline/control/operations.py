"""Operations on the tensors of a stage, as the driver describes them to the worker.

aten.lerp_.Scalar(#7, #3, 0.1)     an Operation, whose arguments #7 and #3 are References
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Key = int | tuple[int, str]
"""A computed value by its number; a parameter or buffer by the number of the module of the stage and its name there."""


@dataclass(frozen=True)
class Strides:
    """Where the elements of a tensor are in its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Strides":
        """Return the layout of ``tensor``."""
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


@dataclass(frozen=True)
class WorkerTensor:
    """A tensor of the worker, as the arguments of an operation name it.

    Attributes:
        key: The value that the tensor is, or is a view of.
        base: Strides of the value as the driver knows it.
        view: Strides of the tensor, if it is a view of the value.
    """

    key: Key
    base: Strides
    view: Strides | None


@dataclass(frozen=True)
class Operation:
    """One operator of ATen with its arguments; references stand for tensors.

    Attributes:
        name: Namespace, name and overload, such as ``("aten", "lerp_", "Scalar")``.
        args: Positional arguments.
        kwargs: Keyword arguments.
        results: The numbers of the new values among the results, ``None`` for those that are not new.
    """

    name: tuple[str, str, str]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]
