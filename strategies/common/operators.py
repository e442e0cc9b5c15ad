"""ATen operators, as a ``TorchDispatchMode`` or a tensor subclass sees them."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from strategies.common.torch_compat import declared_arguments, operator_name
from strategies.common.trees import tensors_in

_UNDECLARED, _STATISTICS = ("native_batch_norm", "batch_norm"), ("running_mean", "running_var")
"""Operators that change arguments in place without declaring it in their schema, and these arguments."""


def changed_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments that an operator changes in place."""
    declared = declared_arguments(operator)
    given = [*zip(declared, args, strict=False), *((d, kwargs[d.name]) for d in declared if d.name in kwargs)]
    hidden = _STATISTICS if operator_name(operator)[1] in _UNDECLARED else ()
    return tensors_in(
        [value for d, value in given if d.name in hidden or (d.alias_info is not None and d.alias_info.is_write)]
    )
