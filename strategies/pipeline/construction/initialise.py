"""Initial values for models that were built on the ``meta`` device, where initialisation has no effect."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from strategies.common.initialisation import initialiser, own_tensors, seeded_by_name
from strategies.pipeline.construction.without_memory import Construction


def initialise(model: nn.Module, construction: Construction) -> list[str]:
    """Add to recipes the initialisation of modules whose direct parameters or buffers lack values.

    ``_init_weights`` of the enclosing Hugging Face model initialises a module; in other models, the module's
    ``reset_parameters`` does. The seed of each module depends on the process's seed and the module's name only, so its
    values do not depend on other modules. Tensors that have values keep them.

    Args:
        model: The model.
        construction: Makes recipes for the tensors that lack values.

    Returns:
        The names of these modules. Tensors of modules without such a method still lack values.
    """
    names: list[str] = []
    for name, module in model.named_modules():
        lacking = [own for own in own_tensors(module).values() if construction.lacks_values(own)]
        function = initialiser(model, name) if lacking else None
        if function is None:
            continue
        names.append(name)
        with torch.no_grad(), seeded_by_name(name), _values_kept(module, construction), construction.without_memory():
            function()
    return names


@contextmanager
def _values_kept(module: nn.Module, construction: Construction) -> Iterator[None]:
    """Context in which new tensors replace the tensors of a module that have values."""
    holders: list[dict[str, Any]] = [module._parameters, module._buffers]
    kept = [dict(tensors) for tensors in holders]
    for tensors in holders:
        for name, own in tensors.items():
            if own is not None and not construction.lacks_values(own):
                other = torch.empty(own.shape, dtype=own.dtype)
                tensors[name] = nn.Parameter(other) if isinstance(own, nn.Parameter) else other
    try:
        yield
    finally:
        for tensors, before in zip(holders, kept, strict=True):
            tensors.update({n: own for n, own in before.items() if own is None or not construction.lacks_values(own)})
