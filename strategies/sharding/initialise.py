"""Initialise models built on the ``meta`` device unit by unit, so that no process holds the whole model."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from strategies.common.initialisation import initialiser, own_tensors, seeded_by_name


def check_initial_values(model: nn.Module, *, has_checkpoint: bool) -> None:
    """Check that every module on the ``meta`` device can be given values.

    Args:
        model: The model.
        has_checkpoint: Whether parameters and persistent buffers are loaded afterwards.

    Raises:
        ValueError: If a module cannot be given values.
    """
    loaded = set(model.state_dict(keep_vars=True).values()) if has_checkpoint else set()
    for path, module in model.named_modules():
        lacking = [name for name, tensor in own_tensors(module).items() if tensor.is_meta and tensor not in loaded]
        if lacking and initialiser(model, path) is None:
            kind = type(module).__name__
            raise ValueError(
                f"{lacking[0]} of {path or kind} is on the meta device, but {kind} has no method reset_parameters to "
                "initialise it. Add this method, or build the module on a real device."
            )


def give_values(model: nn.Module, modules: Collection[nn.Module], device: torch.device) -> None:
    """Allocate and initialise those tensors of some modules that are on the ``meta`` device.

    ``_init_weights`` of the enclosing Hugging Face model initialises a module; in other models, the module's
    ``reset_parameters`` does. The seed depends on the process's seed and the module's name. Tensors with values keep
    them. Tensors without such a method become NaN until a checkpoint is loaded.
    """
    wanted, made = set(modules), dict[Tensor, Tensor]()
    for path, module in model.named_modules():
        if module not in wanted or not any(tensor.is_meta for tensor in own_tensors(module).values()):
            continue
        kept = [(tensor, tensor.detach().clone()) for tensor in own_tensors(module).values() if not tensor.is_meta]
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    if tensor in made:  # tied to a tensor that is already initialised
                        kept.append((made[tensor], made[tensor].detach().clone()))
                    else:
                        made[tensor] = _with_memory(tensor, device)
                    table[name] = made[tensor]
        function = initialiser(model, path)
        if function is not None:
            with torch.no_grad(), seeded_by_name(path):
                function()
            with torch.no_grad():
                for tensor, value in kept:
                    tensor.copy_(value)


def _with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    filling = float("nan") if tensor.is_floating_point() else 0
    value = torch.full_like(tensor, filling, device=device, requires_grad=False)
    if not isinstance(tensor, nn.Parameter):
        return value
    parameter = nn.Parameter(value, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter
