"""Measure what one of the ranks that divide layers computes, without the other ranks.

whole model ──▶ part of the first rank ──▶ measured: bytes, and seconds of the rank and of its communication
                absent ranks count as zeros; a wait of the measured duration replaces each sum
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from strategies.sharding import divided_layers
from strategies.sharding.divided_layers import PlannedModel, TensorGroup

_SMALL, _LARGE = 2**10, 2**22
"""The bytes of the tensors with which the communication is measured."""

_CALLS = 7


@dataclass(frozen=True)
class LinearSeconds:
    """The time of a call of all ranks with a tensor in host memory.

    Attributes:
        latency: The seconds of a call.
        per_byte: The additional seconds for each byte of the tensor.
    """

    latency: float = 0.0
    per_byte: float = 0.0

    def of(self, tensor: Tensor) -> float:
        """Return the seconds for a tensor."""
        return self.latency + self.per_byte * tensor.nbytes


@dataclass(frozen=True)
class GroupSeconds:
    """How long the ranks that divide layers take to communicate.

    Attributes:
        sum: The time of :meth:`TensorGroup.sum <strategies.sharding.divided_layers.TensorGroup.sum>`.
        parts: The time of :meth:`TensorGroup.parts <strategies.sharding.divided_layers.TensorGroup.parts>`.
    """

    sum: LinearSeconds = LinearSeconds()
    parts: LinearSeconds = LinearSeconds()

    @classmethod
    def measured(cls, group: TensorGroup) -> "GroupSeconds":
        """Measure the ranks of a group. All ranks call this, and get the same result."""
        own = torch.tensor(
            [_shortest(call, size) for call in (group.sum, group.parts) for size in (_SMALL, _LARGE)],
            dtype=torch.float64,
        )
        slowest = torch.stack(group.parts(own)).amax(0).tolist()
        return cls(_line(*slowest[:2]), _line(*slowest[2:]))


def _shortest(call: Callable[[Tensor], object], num_bytes: int) -> float:
    message = torch.zeros(num_bytes, dtype=torch.uint8).view(torch.float32)
    call(message)
    seconds = []
    for _ in range(_CALLS):
        begin = time.perf_counter()
        call(message)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)  # not the median, because other load delays ranks that wait for each other


def _line(small: float, large: float) -> LinearSeconds:
    per_byte = max(0.0, large - small) / (_LARGE - _SMALL)
    return LinearSeconds(max(0.0, small - per_byte * _SMALL), per_byte)


class SingleRank(TensorGroup):
    """The first rank of a group whose other ranks are absent. Their tensors count as zeros.

    Args:
        size: The number of ranks.
        seconds: How long a call of all ranks takes; each call waits for this time.
    """

    def __init__(self, size: int, seconds: GroupSeconds | None = None) -> None:
        self.rank, self.size = 0, size
        self._seconds = seconds or GroupSeconds()

    def sum(self, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor."""
        return _after(self._seconds.sum, tensor)

    def of_first(self, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor."""
        return _after(self._seconds.sum, tensor)

    def parts(self, tensor: Tensor) -> list[Tensor]:
        """Return a copy of the tensor, followed by zeros."""
        own = _after(self._seconds.parts, tensor)
        return [own, *(torch.zeros_like(own) for _ in range(1, self.size))]


def _after(seconds: LinearSeconds, tensor: Tensor) -> Tensor:
    """Return a copy of a tensor that has gone through the memory of the host, after a time."""
    if tensor.is_meta:
        return torch.empty_like(tensor)
    message = tensor.detach().to("cpu", copy=True)
    end = time.perf_counter() + seconds.of(message)
    while time.perf_counter() < end:  # a sleep may last 0.1 ms longer than asked for
        pass
    return message.to(tensor.device)


@contextmanager
def as_single_rank(
    model: nn.Module, plan: Mapping[str, str], size: int, seconds: GroupSeconds | None = None
) -> Iterator[None]:
    """Context in which a model has the parts of the first rank and computes without the other ranks.

    Args:
        model: The model, which is unchanged at the end.
        plan: The style of layers, by dotted name. ``*`` stands for a number.
        size: The number of ranks.
        seconds: How long a call of all ranks takes. Default: no time.

    Raises:
        ValueError: If the plan does not fit the model.
    """
    kept = [(parameter, parameter.data, parameter.grad) for parameter in model.parameters()]
    for parameter, *_ in kept:
        parameter.grad = None
    divided = None
    try:
        divided = PlannedModel(model, plan, 0, size)
        divided_layers.connect(SingleRank(size, seconds))
        yield
    finally:
        divided_layers.connect(None)
        if divided is not None:
            divided.remove_hooks()
        for parameter, data, grad in kept:
            parameter.data, parameter.grad = data, grad
