"""The cost of an optimizer: the size of its states, and the time and memory of its step, measured on copies."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from strategies.common.live_bytes import LiveBytes
from strategies.common.trees import tensors_in
from strategies.optim.small_copies import CopyingWay, mode_switch, small_copy, small_parameters, undisturbed

_TIMED_STEPS = 7

_ELEMENTS_FOR_SIZES = 2**16
"""Number of elements of a copy whose states are measured. For fewer, optimizers with 8-bit states may use 32 bits."""


def state_bytes(optimizer: Optimizer) -> dict[Tensor, int]:
    """Return the size in bytes of the states of each trained parameter.

    Only states with an element for each element of the parameter count. So the result is a lower bound: an optimizer
    that keeps a matrix in factors, such as Adafactor, has larger states.

    Returns:
        The bytes by parameter; 0 for all parameters if a small copy of the optimizer cannot be stepped.
    """
    alike: dict[Any, list[Tensor]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if p.requires_grad:
                alike.setdefault((number, p.ndim, p.dtype, p.device), []).append(p)
    largest = [max(parameters, key=Tensor.numel) for parameters in alike.values()]
    sizes = dict.fromkeys(chain.from_iterable(alike.values()), 0)
    with undisturbed(largest):
        for way in (CopyingWay(False, False), CopyingWay(False, True)):
            try:
                per_element = _state_bytes_per_element(optimizer, largest, way)
            except Exception:  # optimizers raise errors of any type, and one that fails here may still work
                continue
            for parameters, number_bytes in zip(alike.values(), per_element, strict=True):
                sizes.update({p: number_bytes * p.numel() for p in parameters})
            break
    return sizes


def _state_bytes_per_element(optimizer: Optimizer, sample: Sequence[Tensor], way: "CopyingWay") -> list[int]:
    """Step a copy of the optimizer over copies of ``sample``; return the bytes of state per element of each copy."""
    small = small_parameters(sample, _shape_for_sizes)
    own = small_copy(optimizer, dict(zip(map(id, sample), small, strict=True)), sample, ..., way)
    for p in small:
        grad = torch.ones_like(p)
        p.grad = grad.to_sparse(1) if way.sparse and p.ndim else grad
    if (switch := mode_switch(own, "train")) is not None:
        switch()
    own.step()
    return [
        sum(value.element_size() for value in tensors_in(dict(own.state.get(p, {}))) if value.numel() == p.numel())
        for p in small
    ]


@dataclass(frozen=True)
class StepCost:
    """The cost of a step of an optimizer over some parameters.

    Attributes:
        seconds: The median time of a step.
        extra_bytes: The peak memory of the step, beyond parameters, gradients and states.
        together: Whether the step uses this memory for all parameters at the same time (``foreach``), or for one
            parameter after another.
    """

    seconds: float = 0.0
    extra_bytes: int = 0
    together: bool = False

    @classmethod
    def of_all(cls, parts: Sequence["StepCost"]) -> "StepCost":
        """Return the cost of a step over several groups of parameters."""
        together = [part.extra_bytes for part in parts if part.together]
        after = [part.extra_bytes for part in parts if not part.together]
        extra = max(sum(together), *after, 0)
        return cls(sum(part.seconds for part in parts), extra, together=bool(together))


class StepCosts:
    """Measures steps of an optimizer on copies of some of its parameters, in their full size.

    Parameters with the same shapes, dtypes and groups are measured once.

    Attributes:
        refused: The error of a copy that could not be stepped.

    Args:
        optimizer: The optimizer, which is not changed.
        between: Called before each step that is measured.
        clock: Returns the time, after all work on the devices is done.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        between: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._optimizer, self._between, self._clock = optimizer, between, clock
        self._group_of = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._known: dict[Any, StepCost] = {}
        self.refused: Exception | None = None

    def of(self, parameters: Iterable[Tensor]) -> StepCost:
        """Return the cost of a step over the given parameters, as far as the optimizer steps them.

        The cost is zero if a copy of the optimizer cannot be stepped, and for parameters on the ``meta`` device.
        """
        stepped = [p for p in parameters if p in self._group_of and p.requires_grad and not p.is_meta]
        key = tuple((self._group_of[p], p.shape, p.dtype, p.device) for p in stepped)
        if key not in self._known:
            self._known[key] = self._measured(stepped) if stepped else StepCost()
        return self._known[key]

    def _measured(self, stepped: Sequence[Tensor]) -> StepCost:
        threads = torch.get_num_threads()
        for sparse in (False, True):
            with undisturbed(stepped):
                torch.set_num_threads(threads)
                try:
                    return self._steps(stepped, CopyingWay(False, sparse))
                except Exception as error:  # optimizers raise errors of any type
                    refused = error
        self.refused = refused
        return StepCost()

    def _steps(self, stepped: Sequence[Tensor], way: "CopyingWay") -> StepCost:
        copies = small_parameters(stepped, list)
        own = small_copy(self._optimizer, dict(zip(map(id, stepped), copies, strict=True)), stepped, ..., way)
        for p in copies:
            grad = torch.full_like(p, 1e-3)
            p.grad = grad.to_sparse(1) if way.sparse and p.ndim else grad
        if (switch := mode_switch(own, "train")) is not None:
            switch()
        own.step()  # creates the states
        with LiveBytes() as live:
            own.step()
        seconds = []
        for _ in range(_TIMED_STEPS):
            self._between()
            begin = self._clock()
            own.step()
            seconds.append(self._clock() - begin)
        return StepCost(statistics.median(seconds), live.peak, self._is_together(stepped))

    def _is_together(self, stepped: Sequence[Tensor]) -> bool:
        """Return whether a step works on lists of tensors: if ``foreach`` is set, and on CUDA by default."""
        for p in stepped:
            group = self._optimizer.param_groups[self._group_of[p]]
            by_default = "foreach" in group and p.is_cuda and not group.get("fused")
            if group.get("foreach") or (group.get("foreach") is None and by_default):
                return True
        return False


def _shape_for_sizes(shape: Sequence[int]) -> list[int]:
    """Return a shape of few elements with a different size for each dimension, so that no two parts look alike."""
    side = int(_ELEMENTS_FOR_SIZES ** (1 / max(1, len(shape))))
    return [min(size, max(1, side - place)) for place, size in enumerate(shape)]
