"""The user's optimizer, restricted to the parameters of one process, and the states of these parameters.

``configure_optimizers`` runs once, on the whole model. Parameters are numbered over all groups, as in
``Optimizer.state_dict()``.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from strategies.common.torch_compat import tree_map_only
from strategies.optim.calls import added_methods


def restricted(optimizer: Optimizer, owned: Collection[Tensor]) -> Optimizer:
    """Return a copy of an optimizer that holds only the parameters in ``owned``.

    The copy shares these parameters, their states, and its attributes with the original. Tensors among the
    hyperparameters are copied, and so are states that do not belong to a parameter: a step may change them in place.

    Every group is kept, even if it is empty, so that groups have the same index in every process. The copy has neither
    the hooks of the original nor the ``step`` that a learning-rate scheduler sets on the original object.

    Args:
        optimizer: Any optimizer that steps its parameters from their gradients.
        owned: The parameters to keep, compared by identity.

    Returns:
        A new optimizer of the same class.
    """
    kept = {id(tensor) for tensor in owned}
    copies = {id(p): p for p in parameters_of(optimizer)}  # references to parameters stay

    def copy(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().clone()
        return copies[id(tensor)]

    def copied(value: Any) -> Any:
        return value if type(value) in (bool, int, float, str, type(None)) else tree_map_only(Tensor, copy, value)

    cls, attributes = taken_apart(optimizer)
    attributes["param_groups"] = [
        {name: [p for p in value if id(p) in kept] if name == "params" else copied(value) for name, value in g.items()}
        for g in optimizer.param_groups
    ]
    states = {key: s if isinstance(key, Tensor) else copied(s) for key, s in optimizer.state.items()}
    attributes["state"] = defaultdict(
        dict, {key: s for key, s in states.items() if id(key) in kept or not isinstance(key, Tensor)}
    )
    return put_together(cls, attributes)


def taken_apart(optimizer: Optimizer) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return class and attributes of an optimizer, without hooks and without methods set on the object.

    Optimizers are pickled in this form, because ``Optimizer.__getstate__`` drops the attributes that a subclass adds.
    """
    patched = {"step", "zero_grad", "state_dict", "load_state_dict", *added_methods(optimizer)}
    return type(optimizer), {k: v for k, v in vars(optimizer).items() if k not in patched and not k.endswith("_hooks")}


def put_together(cls: type[Optimizer], attributes: dict[str, Any]) -> Optimizer:
    """Make an optimizer from the result of :func:`taken_apart`."""
    optimizer = object.__new__(cls)
    optimizer.__setstate__(attributes)
    return optimizer


def move_states(optimizer: Optimizer) -> None:
    """Move states to the devices of their parameters, as ``load_state_dict`` does, but keep their precision.

    A ``step`` stays on the CPU, unless the group is ``capturable`` or ``fused``.
    """
    for group in optimizer.param_groups:
        moves_steps = group.get("capturable") or group.get("fused")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name in [*state] if moves_steps else [name for name in state if name != "step"]:
                state[name] = tree_map_only(Tensor, partial(_on_device, parameter.device), state[name])


def _on_device(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to(device)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups, in the order in which ``state_dict`` numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def numbers_of(optimizer: Optimizer, owned: Collection[Tensor]) -> list[int]:
    """Return the numbers of the parameters of ``optimizer`` that are in ``owned``, in ascending order."""
    kept = {id(tensor) for tensor in owned}
    return [number for number, parameter in enumerate(parameters_of(optimizer)) if id(parameter) in kept]


def part_of(states: Mapping[Any, Any], numbers: Collection[int]) -> dict[Any, Any]:
    """Return the states of some parameters, by number, and all entries that do not belong to a parameter."""
    wanted = set(numbers)
    return {key: state for key, state in states.items() if key in wanted or not isinstance(key, int)}


def is_by_element(value: Tensor, shape: Sequence[int]) -> bool:
    """Return whether a state of an optimizer has one entry for each element of a parameter, in its shape or flattened.

    Args:
        value: The state, for a whole parameter or for some of its rows.
        shape: The shape of the whole parameter or of these rows.
    """
    return value.ndim > 0 and (tuple(value.shape) == tuple(shape) or tuple(value.shape) == (math.prod(shape),))


def in_order(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return states sorted by the number of the parameter; entries that do not belong to a parameter come last."""
    return dict(sorted(states.items(), key=lambda item: item[0] if isinstance(item[0], int) else math.inf))


def load_states(optimizer: Optimizer, states: Mapping[Any, Any]) -> None:
    """Load states of single parameters, converted to device and dtype of the parameter as in ``load_state_dict``.

    Args:
        optimizer: The optimizer, which may be restricted.
        states: States by the number of the parameter *in this optimizer*, and entries that do not belong to a
            parameter.
    """
    groups = _without_compiler(optimizer, "state_dict")()["param_groups"]
    _without_compiler(optimizer, "load_state_dict")({"state": dict(states), "param_groups": groups})


def _without_compiler(optimizer: Optimizer, name: str) -> Callable[..., Any]:
    """Return a method of an optimizer that does not import torch's compiler.

    torch's own methods import the compiler to exclude themselves from compilation. The import takes a second in a
    process that has not imported it, such as a worker that replaces a lost worker, and no code is compiled there.
    """
    own: Callable[..., Any] = getattr(optimizer, name)
    if "torch._dynamo" in sys.modules or getattr(own, "__func__", None) is not getattr(Optimizer, name):
        return own
    function = getattr(Optimizer, name)
    while hasattr(function, "__wrapped__") and function.__globals__["__name__"].startswith("torch."):
        function = function.__wrapped__  # keep wrappers that are not torch's own
    return partial(function, optimizer)


def check_optimizer_states(optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]) -> None:
    """Check that the states in a checkpoint fit the optimizers, before any of them is loaded.

    Raises:
        ValueError: If they do not fit.
    """
    if len(optimizers) != len(states):
        raise ValueError(
            f"the checkpoint has the states of {len(states)} optimizers, but configure_optimizers returned "
            f"{len(optimizers)}; none has been loaded"
        )
    for k, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
        check_optimizer_state(optimizer, state, f"optimizer {k}, a {type(optimizer).__name__}")


def check_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any], words: str) -> None:
    """Check a state dict for an optimizer, described by ``words`` in messages; see :func:`check_optimizer_states`."""
    saved = state.get("param_groups", [])  # a stand-in for an optimizer has no groups
    sizes = [[len(group["params"]) for group in groups] for groups in (optimizer.param_groups, saved)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{words}, has groups of {sizes[0]} parameters, but its state is for groups of {sizes[1]}; nothing of it "
            "has been loaded"
        )
    known = {number for group in saved for number in group["params"]}
    if foreign := [key for key in state.get("state", {}) if isinstance(key, int) and key not in known]:
        raise ValueError(
            f"{words}, has {len(parameters_of(optimizer))} parameters, but its state has unexpected entries "
            f"{foreign}; nothing of it has been loaded"
        )


@contextmanager
def narrowed(optimizer: Optimizer, owned: Iterable[Tensor]) -> Iterator[None]:
    """Context in which the groups of an optimizer contain only the parameters in ``owned``."""
    kept, whole = {id(p) for p in owned}, [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in kept]
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=False):  # groups may have been added
            group["params"] = parameters
