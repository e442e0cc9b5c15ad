"""Find the input of a module inside a model without running the module."""

from functools import partial
from typing import Any

import torch
from torch import nn

from strategies.common.patching import replaced
from strategies.common.torch_compat import tree_map


def positional_and_named(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an example input as positional and keyword arguments: a tuple is positional, a dict holds keywords."""
    if isinstance(example, dict):
        return (), example
    return example if isinstance(example, tuple) else (example,), {}


class _ReachedModule(Exception):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def is_called_first(module: nn.Module, before: nn.Module, model: nn.Module, example: Any) -> bool:
    """Return whether ``model`` calls ``module`` before it calls ``before``; see :func:`input_of` for what runs.

    Args:
        module: A module inside ``model``.
        before: Another module inside ``model``.
        model: The whole model.
        example: Input of the model; a tuple is passed as positional arguments, a dict as keyword arguments.
    """
    reached: list[nn.Module] = []

    def stop(called: nn.Module, *args: Any, **kwargs: Any) -> None:
        reached.append(called)
        raise _ReachedModule(None)

    undo = [replaced(one, "forward", partial(stop, one)) for one in (module, before)]
    modes = {m: m.training for m in model.modules()}
    args, kwargs = positional_and_named(example)
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng():
            model(*args, **kwargs)
    except (_ReachedModule, NotImplementedError):
        pass
    finally:
        for restore in undo:
            restore()
        for m, mode in modes.items():
            m.training = mode
    return reached[:1] == [module]


def input_of(module: nn.Module, model: nn.Module, example: Any) -> Any:
    """Return the input of ``module`` when ``model`` is called with ``example``; model and random state are left
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

    def stop(value: Any, *more: Any, **named: Any) -> None:
        raise _ReachedModule(value)

    modes = {m: m.training for m in model.modules()}
    args, kwargs = positional_and_named(example)
    had_forward = vars(module).get("forward")
    module.forward = stop
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng():
            model(*args, **kwargs)
    except _ReachedModule as reached:
        return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, reached.value)
    except NotImplementedError:
        pass  # the model does not define forward
    finally:
        if had_forward is None:
            del module.forward
        else:
            module.forward = had_forward
        for m, mode in modes.items():
            m.training = mode
    return example[0] if isinstance(example, tuple) and len(example) == 1 else example
