"""The output of a block before the block has run, as the model's code sees it."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from strategies.common.torch_compat import tree_leaves, tree_map_only, without_torch_function, wrapper_of

_READS = frozenset(
    getattr(attribute, "__get__", attribute)
    for attribute in (
        *(Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.layout),
        *(Tensor.is_cuda, Tensor.is_cpu, Tensor.is_meta, Tensor.is_mps, Tensor.is_sparse, Tensor.is_quantized),
        *(Tensor.is_nested, Tensor.itemsize),
    )
) | {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.get_device, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.__repr__),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
"""The attributes that can be read from an output before the block has run."""


class DeferredOutput(Tensor):
    """Represents a tensor that a block will return. Until the blocks have run, only shape, dtype and device exist.

    After the call of the last block, every operation uses the value.

    Args:
        shape: The shape of the value.
        dtype: The dtype of the value.
        device: The device of the value.
        slot: The index of the value in the table of the deferred calls.
        description: A description of the tensor for messages.
    """

    slot: int
    description: str
    value: Tensor | None
    ended: str
    """Why there will be no value; empty while a value may still follow."""

    @staticmethod
    def __new__(
        cls, shape: torch.Size, dtype: torch.dtype, device: torch.device, slot: int, description: str
    ) -> "DeferredOutput":
        made = wrapper_of(cls, shape, dtype, device)
        made.slot, made.description, made.value, made.ended = slot, description, None, ""
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS and _waiting(args, kwargs) is not None:
            with without_torch_function():
                return func(*args, **kwargs)
        return _run_on_values(func, args, kwargs)

    __torch_dispatch__ = cast(Any, staticmethod(lambda func, types, args, kwargs: _run_on_values(func, args, kwargs)))

    def refusal(self, func: Any) -> RuntimeError:
        """Return the error for an operation on a value that does not exist yet."""
        operation = getattr(func, "__name__", str(func))
        if operation == "__get__":  # the operation reads a property of a tensor
            operation = getattr(getattr(func, "__self__", None), "__name__", operation)
        return RuntimeError(
            f"the model uses {self.description} in {operation}, but "
            + (self.ended or "the blocks run on several processes once the last of them has been called")
            + ". Between two blocks only the shape, dtype and device of an output can be read. Move the operation into "
            "a block, or name another list of blocks by module=..."
        )


def _waiting(args: Sequence[Any], kwargs: Mapping[str, Any]) -> DeferredOutput | None:
    """Return the first deferred output without a value among the arguments of an operation."""
    leaves = tree_leaves((tuple(args), dict(kwargs)))
    return next((leaf for leaf in leaves if isinstance(leaf, DeferredOutput) and leaf.value is None), None)


def _run_on_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """Run an operation on the values of its arguments, or refuse it."""
    if (waiting := _waiting(args, kwargs or {})) is not None:
        raise waiting.refusal(func)
    given, named = tree_map_only(DeferredOutput, lambda leaf: leaf.value, (tuple(args), dict(kwargs or {})))
    return func(*given, **named)
