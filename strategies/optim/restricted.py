"""One optimizer over several processes: each runs the user's optimizer, restricted to the parameters that it owns.

``configure_optimizers`` runs once, on the whole model. What changes from step to step (learning rates, betas, ...) is
in ``param_groups`` and travels with each step, so schedulers stay where the user made them. Parameters are numbered
over all groups, as in ``Optimizer.state_dict()``.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from strategies.common.torch_compat import tree_map_only
from strategies.optim.calls import added_methods


def restricted(optimizer: Optimizer, owned: Collection[Tensor]) -> Optimizer:
    """The same optimizer over those of its parameters that are in ``owned``.

    Every group is kept, an empty one too, so that groups have the same place everywhere. Hooks and the ``step`` that a
    learning-rate scheduler patches into the instance stay behind; they belong to the original.

    Args:
        optimizer: Any optimizer that steps its parameters from their gradients.
        owned: The parameters to keep; compared by identity.

    Returns:
        A new optimizer of the same class that shares the parameters and their state with the original.
    """
    kept = {id(tensor) for tensor in owned}
    cls, attributes = taken_apart(optimizer)
    attributes["param_groups"] = [
        {**group, "params": [p for p in group["params"] if id(p) in kept]} for group in optimizer.param_groups
    ]
    attributes["state"] = defaultdict(
        dict, {key: s for key, s in optimizer.state.items() if id(key) in kept or not isinstance(key, Tensor)}
    )
    return put_together(cls, attributes)


def taken_apart(optimizer: Optimizer) -> tuple[type[Optimizer], dict[str, Any]]:
    """Class and attributes, without hooks and without methods patched into the instance.

    For pickling: ``Optimizer.__getstate__`` loses the attributes that a subclass adds.
    """
    patched = {"step", "zero_grad", "state_dict", "load_state_dict", *added_methods(optimizer)}
    return type(optimizer), {k: v for k, v in vars(optimizer).items() if k not in patched and not k.endswith("_hooks")}


def put_together(cls: type[Optimizer], attributes: dict[str, Any]) -> Optimizer:
    """The inverse of :func:`taken_apart`."""
    optimizer = object.__new__(cls)
    optimizer.__setstate__(attributes)
    return optimizer


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Everything in the groups of ``optimizer`` but the parameters: learning rates, betas, weight decays, ...

    Tensors are copied: schedulers change them in place, perhaps before they have been sent.
    """
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), groups)


def set_hyperparameters(optimizer: Optimizer, values: Iterable[Mapping[str, Any]]) -> None:
    """The counterpart of :func:`hyperparameters`, on an optimizer with the same groups."""
    for group, new in zip(optimizer.param_groups, values, strict=True):
        group.update(new)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of all groups, in the order in which ``state_dict`` numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def numbers_of(optimizer: Optimizer, owned: Collection[Tensor]) -> list[int]:
    """The numbers of those parameters of ``optimizer`` that are in ``owned``, in order."""
    kept = {id(tensor) for tensor in owned}
    return [number for number, parameter in enumerate(parameters_of(optimizer)) if id(parameter) in kept]


def part_of(states: Mapping[Any, Any], numbers: Collection[int]) -> dict[Any, Any]:
    """Out of the states of a whole optimizer those of some parameters, and what it keeps under other keys."""
    wanted = set(numbers)
    return {key: state for key, state in states.items() if key in wanted or not isinstance(key, int)}


def in_order(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """States by the numbers of parameters; what an optimizer keeps under other keys comes last."""
    return dict(sorted(states.items(), key=lambda item: item[0] if isinstance(item[0], int) else math.inf))


def load_states(optimizer: Optimizer, states: Mapping[Any, Any]) -> None:
    """Loads the state of single parameters, converted to their device and type as ``load_state_dict`` does it.

    Args:
        optimizer: The optimizer, which may be restricted.
        states: Number of the parameter *in this optimizer* to its state, and what it keeps under other keys.
    """
    current = optimizer.state_dict()
    optimizer.load_state_dict({"state": dict(states), "param_groups": current["param_groups"]})


def check_optimizer_states(optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]) -> None:
    """Checks that the states in a checkpoint belong to the optimizers, before any of them is loaded.

    Raises:
        ValueError: If they do not.
    """
    if len(optimizers) != len(states):
        raise ValueError(
            f"the checkpoint has the states of {len(states)} optimizers, but configure_optimizers returned "
            f"{len(optimizers)}; none has been loaded"
        )
    for k, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
        check_optimizer_state(optimizer, state, f"optimizer {k}, a {type(optimizer).__name__}")


def check_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any], words: str) -> None:
    """Checks a state dict for one optimizer; see :func:`check_optimizer_states`."""
    saved = state.get("param_groups", [])  # a stand-in for an optimizer has none
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
    """Within this, the groups of an optimizer have those of their parameters that are in ``owned``."""
    kept, whole = {id(p) for p in owned}, [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in kept]
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=False):  # groups may have been added
            group["params"] = parameters
