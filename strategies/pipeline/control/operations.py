"""Operations on the tensors of a stage, in the form in which the driver sends them to the worker.

aten.lerp_.Scalar(#7, #3, 0.1)     a TensorOperation, whose arguments #7 and #3 are of class WorkerTensor
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Name = tuple[int, str]
"""A parameter or buffer, by its module's number in the stage and its name there."""

OperandKey = int | Name
"""A computed value by number, or a parameter or buffer."""


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
    """A reference to a tensor of the worker, in the arguments of an operation.

    Attributes:
        key: The value that the tensor is, or of which it is a view.
        base: Strides of the value as the driver knows it.
        view: Strides of the tensor, if it is a view of the value.
    """

    key: OperandKey
    base: Strides
    view: Strides | None


@dataclass(frozen=True)
class GradientOf:
    """A reference to the gradient of a parameter of the worker."""

    parameter: Name


@dataclass(frozen=True)
class TensorOperation:
    """One operator of ATen with its arguments; references stand for tensors.

    Attributes:
        name: Namespace, name and overload, such as ``("aten", "lerp_", "Scalar")``.
        args: Positional arguments.
        kwargs: Keyword arguments.
        results: The number of each result that is a new value; ``None`` for each result that is not new.
    """

    name: tuple[str, str, str]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]
