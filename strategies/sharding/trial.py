"""Whether an optimizer can be divided: tried on small copies of its parameters, all at once and one by one."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from strategies.optimizer import parameters_of, put_together, taken_apart

_PER_GROUP, _ELEMENTS, _STEPS = 3, 3, 3


def check_divisible(optimizer: Optimizer) -> None:
    """Checks that an optimizer updates each parameter from that parameter's gradient and state alone.

    Raises:
        ValueError: If not, or if there is nothing to update.
    """
    name = type(optimizer).__name__
    if not parameters_of(optimizer):
        raise ValueError(f"{name} has no parameters, so there is no state to divide; give it those to train.")
    inner = [type(value).__name__ for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    if inner:
        raise ValueError(
            f"{name} steps another optimizer ({inner[0]}) within its own step, which cannot be divided; return the "
            "inner optimizer."
        )
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            f"{name} needs all parameters at once and evaluates the loss several times within a step, so it cannot be "
            "divided; use an optimizer that updates each parameter from its own gradient, such as AdamW."
        )
    try:
        together, apart = _tried(optimizer, one_by_one=False), _tried(optimizer, one_by_one=True)
    except Exception as error:
        raise ValueError(
            f"{name} cannot be divided: it does not step a part of its parameters without a closure "
            f"({type(error).__name__}: {error})"
        ) from error
    for one, other in zip(together, apart, strict=True):
        if not torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True):
            raise ValueError(
                f"{name} cannot be divided: what it does to one parameter depends on the others (or on random "
                "numbers), so it needs all of them at once. Use an optimizer that updates each parameter from its own "
                "gradient, such as AdamW, or strategy='ddp'."
            )


def _tried(optimizer: Optimizer, *, one_by_one: bool) -> list[Tensor]:
    """Small copies of the first parameters of each group, after some steps."""
    groups = [[_small(p, p) for p in group["params"][:_PER_GROUP]] for group in optimizer.param_groups]
    tried = [p for group in groups for p in group]
    shares = [[p] for p in tried] if one_by_one else [tried]
    copies = [_copied(optimizer, groups, share) for share in shares]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        generator = torch.Generator().manual_seed(0)
        for _ in range(_STEPS):
            for p in tried:
                p.grad = torch.randn(p.shape, generator=generator).to(p)
            for own in copies:
                torch.random.default_generator.manual_seed(0)
                own.step()
    return [p.detach() for p in tried]


def _copied(optimizer: Optimizer, groups: Sequence[Sequence[Tensor]], share: Sequence[Tensor]) -> Optimizer:
    """The same optimizer over some of the small copies, which changes nothing of the original."""
    cls, attributes = taken_apart(optimizer)
    kept = {id(p) for p in share}
    new: dict[str, Any] = {key: _own(value) for key, value in attributes.items()}
    new["param_groups"], new["state"] = [], copy.copy(optimizer.state)
    new["state"].clear()
    for group, small in zip(optimizer.param_groups, groups, strict=True):
        hyperparameters = {key: _own(value) for key, value in group.items() if key != "params"}
        new["param_groups"].append({**hyperparameters, "params": [p for p in small if id(p) in kept]})
        for original, p in zip(group["params"], small, strict=False):
            if id(p) in kept and original in optimizer.state:
                state = optimizer.state[original]
                new["state"][p] = {key: _small(value, original) for key, value in state.items()}
    return put_together(cls, new)


def _own(value: Any) -> Any:
    """A copy of what a step may change in place; what is of another kind is shared."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, list | dict | set) else value


def _small(value: Any, like: Tensor) -> Any:
    """The first elements along each dimension of what has the dimensions of a parameter; a copy of anything else."""
    if not isinstance(value, Tensor):
        return _own(value)
    corner = tuple(slice(_ELEMENTS) for _ in value.shape) if value.ndim == like.ndim else ...
    small = value.detach()[corner].clone()
    return small.requires_grad_() if value is like else small
