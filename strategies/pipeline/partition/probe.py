"""Find the input of a module inside a model without running the module."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from strategies.common.patching import replaced, unchanged
from strategies.common.torch_compat import tree_map
from strategies.pipeline.partition.profiling import as_in_training


def positional_and_named(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an example input as positional and keyword arguments: a tuple is positional, a dict holds keywords."""
    if isinstance(example, dict):
        return (), example
    return example if isinstance(example, tuple) else (example,), {}


class _ReachedModule(Exception):
    def __init__(self, module: nn.Module, arguments: list[Any]) -> None:
        super().__init__()
        self.module, self.arguments = module, arguments


def calls_last_first(blocks: nn.ModuleList, model: nn.Module, example: Any) -> bool:
    """Return whether ``model`` calls the last of ``blocks`` first; see :func:`input_of` for what runs.

    Args:
        blocks: Blocks inside ``model``.
        model: The whole model.
        example: Input of the model; a tuple is passed as positional arguments, a dict as keyword arguments.
    """
    reached = _first_call([*blocks], blocks, model, example)
    return reached is not None and reached[0] is blocks[-1]


def input_of(module: nn.Module, model: nn.Module, example: Any) -> Any:
    """Return the input of ``module`` when ``model`` is called with ``example``; model and random states are left
    unchanged.

    Only the part of ``model.forward`` before the call of the module runs, without gradients and in evaluation mode.

    Args:
        module: A module inside ``model``.
        model: The whole model.
        example: Input of the model; a tuple is passed as positional arguments, a dict as keyword arguments.

    Returns:
        The argument of the module. If ``model`` never calls the module, or has no ``forward``: ``example`` itself, or
        its entry if it is a tuple of one entry.
    """
    reached = _first_call([module], module, model, example)
    if reached is not None:
        _, (value, *_) = reached
        return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, value)
    return example[0] if isinstance(example, tuple) and len(example) == 1 else example


def _first_call(
    stops: Sequence[nn.Module], pipelined: nn.Module, model: nn.Module, example: Any
) -> tuple[nn.Module, list[Any]] | None:
    """Call ``model`` until it calls one of ``stops``. Parameters inside ``pipelined`` are not protected from changes.

    Returns:
        The module that was reached, and the arguments of its call; ``None`` if no module was reached.
    """
    devices = (tensor.device for tensor in (*model.parameters(), *model.buffers()))
    inside = set(pipelined.modules())
    outside = (p for child in model.modules() if child not in inside for p in child.parameters(recurse=False))
    args, kwargs = positional_and_named(example)
    with as_in_training(devices), unchanged(model.modules(), outside), torch.no_grad():
        model.eval()
        for module in stops:
            replaced(module, "forward", partial(_stop, module))
        try:
            model(*args, **kwargs)
        except _ReachedModule as reached:
            return reached.module, reached.arguments
        except NotImplementedError:
            pass  # the model does not define forward
    return None


def _stop(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    raise _ReachedModule(module, [*args, *kwargs.values()])
