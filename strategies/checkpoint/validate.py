"""A state dict is loaded whole or not at all: whether it fits is found out before anything is changed.

``load_state_dict`` of torch copies what fits and raises afterwards, so that a model is left half loaded.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from strategies.common.formatting import describe
from strategies.common.patching import replaced
from strategies.common.torch_compat import EXTRA_STATE_KEY_SUFFIX, non_persistent_buffers

_ANY = "any"
"""The shape of a parameter that has none yet."""

Place = Callable[[str], str]
"""Tells of a name in a state dict on which stage it is, in words; nothing if on none or if that is not known."""


def nowhere(name: str) -> str:
    """The place where there are no stages."""
    return ""


def places(stages: Sequence[nn.Sequential], prefix: str) -> Place:
    """The place of each name in the state dict of a module that has the stages' layers under ``prefix``."""
    firsts = [sum(map(len, stages[:i])) for i in range(len(stages))]
    words = {
        name: describe(i, layers, first)
        for i, (layers, first) in enumerate(zip(stages, firsts, strict=True))
        for name in layers._modules
    }
    return lambda name: words.get(name[len(prefix) :].partition(".")[0], "") if name.startswith(prefix) else ""


def check_fit(
    module: nn.Module,
    state: Mapping[str, Any],
    *,
    strict: bool = True,
    place: Place = nowhere,
    dry: Callable[[], AbstractContextManager[Any]] | None = None,
) -> None:
    """Checks that ``state`` can be loaded into ``module``.

    Names and shapes are compared; only where they differ, torch is asked by loading into tensors without values, since
    hooks of a module may know what to do about it.

    Args:
        module: Where to load; nothing of it is changed.
        state: What is to be loaded.
        strict: As in ``load_state_dict``.
        place: For the message.
        dry: Makes a context in which loading has no effect on other processes.

    Raises:
        RuntimeError: If it does not fit.
    """
    expected = _shapes(module)
    given = {name: _shape(value) for name, value in state.items()}
    if expected == {name: shape if expected.get(name) != _ANY else _ANY for name, shape in given.items()}:
        return
    complaints, missing, unexpected = [], expected.keys() - state.keys(), state.keys() - expected.keys()
    with _without_values(module), dry() if dry else warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is a no-op")
        try:
            missing, unexpected = map(set, nn.Module.load_state_dict(module, state, strict=False))
        except RuntimeError as error:  # of shapes, or of a layer of the user's
            complaints = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
    if strict:
        order = [*expected, *state]
        complaints += [f"missing {words}" for words in _listed(missing, order, place)]
        complaints += [f"unexpected {words}" for words in _listed(unexpected, order, place)]
    if complaints:
        told = "".join(f"\n  {complaint}" for complaint in complaints)
        raise RuntimeError(
            f"the state dict does not fit {type(module).__name__}, and nothing of it has been loaded:{told}"
        )


def load_whole(
    model: nn.Module, path: str, stages: Sequence[nn.Sequential], dry: Callable[[], AbstractContextManager[Any]]
) -> list[Callable[[], None]]:
    """Has ``load_state_dict`` check first, on the model, the pipelined module at ``path`` and what lies between.

    A module with a ``load_state_dict`` of its own keeps it.

    Returns:
        Functions that end this.
    """
    names, undo = path.split("."), []
    for k in range(len(names) + 1):
        module: Any = attrgetter(".".join(names[:k]))(model) if k else model
        if isinstance(module, nn.Module) and type(module).load_state_dict is nn.Module.load_state_dict:
            place = places(stages, "".join(f"{name}." for name in names[k:]))
            undo.append(replaced(module, "load_state_dict", partial(_load_whole, module, place, dry)))
    return undo


def _load_whole(
    module: nn.Module,
    place: Place,
    dry: Callable[[], AbstractContextManager[Any]],
    state_dict: Mapping[str, Any],
    strict: bool = True,
    assign: bool = False,
) -> Any:
    if isinstance(state_dict, Mapping):
        check_fit(module, state_dict, strict=strict, place=place, dry=dry)
    return nn.Module.load_state_dict(module, state_dict, strict=strict, assign=assign)


def _listed(names: Collection[str], order: Iterable[str], place: Place) -> Iterator[str]:
    """The names, in order, by their places."""
    by_place: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for name in order if name in names):
        by_place.setdefault(place(name), []).append(name)
    for words, own in by_place.items():
        yield f"{f'in {words}' if words else 'keys'}: {', '.join(own)}"


def _shapes(module: nn.Module) -> dict[str, Any]:
    """The shape of each entry that a state dict of ``module`` has without hooks; ``None`` for an extra state."""
    shapes: dict[str, Any] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        tensors = {
            **child._parameters,
            **{name: b for name, b in child._buffers.items() if name not in non_persistent_buffers(child)},
        }
        shapes.update({start + name: _shape(tensor) for name, tensor in tensors.items() if tensor is not None})
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            shapes[start + EXTRA_STATE_KEY_SUFFIX] = None
    return shapes


def _shape(value: Any) -> Any:
    if is_lazy(value):  # takes the shape of what is loaded
        return _ANY
    return tuple(value.shape) if isinstance(value, Tensor) else None


@contextmanager
def _without_values(module: nn.Module) -> Iterator[None]:
    """Puts tensors on the ``meta`` device into all places of ``module``; extra states are not taken in either."""
    children = list(module.modules())
    # Some layers keep what they load among their attributes.
    before = [(child, dict(child._parameters), dict(child._buffers), dict(vars(child))) for child in children]
    for child, parameters, buffers, _ in before:
        child._parameters.update({name: _like(p) for name, p in parameters.items() if p is not None})
        child._buffers.update({name: _like(b) for name, b in buffers.items() if b is not None})
        vars(child)["set_extra_state"] = lambda state: None
    try:
        yield
    finally:
        for child, parameters, buffers, attributes in before:
            child._parameters.clear()
            child._parameters.update(parameters)
            child._buffers.clear()
            child._buffers.update(buffers)
            vars(child).clear()
            vars(child).update(attributes)


def _like(tensor: Any) -> Any:
    if is_lazy(tensor):
        kind: Any = type(tensor)
        return kind(requires_grad=False, device="meta", dtype=tensor.dtype)
    bare = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(bare, requires_grad=False) if isinstance(tensor, nn.Parameter) else bare
