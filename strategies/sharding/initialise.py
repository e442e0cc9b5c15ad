"""Initialise models built on the ``meta`` device unit by unit, so that no process holds the whole model."""

from collections.abc import Collection
from weakref import WeakSet

import torch
from torch import Tensor, nn

from strategies.common.initialisation import initialiser, own_tensors, seeded_by_name

_lost_values: WeakSet[nn.Module] = WeakSet()
"""Modules whose parameters are on the ``meta`` device because a run that had divided them has failed."""


def note_lost_values(model: nn.Module) -> None:
    """Note that parameters on the ``meta`` device have lost their values and get no new ones in the next run."""
    _lost_values.update(m for m in model.modules() if any(p.is_meta for p in m.parameters(recurse=False)))


def only_in_checkpoints(model: nn.Module) -> dict[str, str]:
    """Return why tensors on the ``meta`` device get values from a checkpoint only, by name in the state dict.

    Raises:
        ValueError: If such a tensor is not in the state dict.
    """
    state = {tensor: name for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    found = {}
    for path, module in model.named_modules():
        lacking = {name: tensor for name, tensor in own_tensors(module).items() if tensor.is_meta}
        if not lacking or (module not in _lost_values and initialiser(model, path) is not None):
            continue
        kind = type(module).__name__
        if module in _lost_values:
            why, mend = "has no values: an earlier run with stage=3 divided it and then failed", "Build a new model"
        else:
            why = f"is on the meta device, but {kind} has no method reset_parameters to initialise it"
            mend = "Add this method"
        for name, tensor in lacking.items():
            reason = f"{name} of {path or kind} {why}. {mend}, or load a checkpoint that has it."
            if tensor not in state:
                raise ValueError(reason)
            found[state[tensor]] = reason
    return found


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
