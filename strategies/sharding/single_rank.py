"""Measure what one of the ranks that divide layers or their parameters computes, without the other ranks.

whole model ──▶ part of the first rank ──▶ measured: bytes, and seconds of the rank and of its communication
                absent ranks count as zeros; a wait of the measured duration replaces each exchange
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from strategies.sharding import divided_layers
from strategies.sharding.divided_layers import DividedModel, PlannedModel, TensorGroup
from strategies.sharding.gathered_layers import AbsentReplicas, GatheredModel, ReplicaGroup

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
    """How long the ranks that divide layers or parameters take to communicate.

    Attributes:
        sum: The time of :meth:`TensorGroup.sum <strategies.sharding.divided_layers.TensorGroup.sum>`; of replicas that
            divide parameters,
            :meth:`ReplicaGroup.sum_of_part <strategies.sharding.gathered_layers.ReplicaGroup.sum_of_part>`.
        parts: The time of :meth:`TensorGroup.parts <strategies.sharding.divided_layers.TensorGroup.parts>`; of replicas
            that divide parameters,
            :meth:`ReplicaGroup.joined <strategies.sharding.gathered_layers.ReplicaGroup.joined>`.
    """

    sum: LinearSeconds = LinearSeconds()
    parts: LinearSeconds = LinearSeconds()

    @classmethod
    def measured(cls, group: TensorGroup) -> "GroupSeconds":
        """Measure the ranks of a group. All ranks call this, and get the same result."""
        calls: tuple[Callable[[Tensor], object], ...] = (group.sum, group.parts)
        of_all: Callable[[Tensor], list[Tensor]] = group.parts
        if isinstance(group, ReplicaGroup):
            calls, of_all = (group.sum_of_part, group.joined), group.told
        own = torch.tensor(
            [_shortest(call, _message(size, group.size)) for call in calls for size in (_SMALL, _LARGE)],
            dtype=torch.float64,
        )
        slowest = torch.stack(of_all(own)).amax(0).tolist()
        return cls(_line(*slowest[:2]), _line(*slowest[2:]))


def _message(num_bytes: int, num_parts: int) -> Tensor:
    """Return a tensor of about this size, which can be divided into equal parts."""
    return torch.zeros(num_bytes // 4 // num_parts * num_parts)


def _shortest(call: Callable[[Tensor], object], message: Tensor) -> float:
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


class SingleReplica(AbsentReplicas):
    """The first of the replicas that divide parameters. The others are absent, and their tensors count as zeros.

    Args:
        size: The number of replicas.
        seconds: How long a call of all replicas takes; each call waits for this time.
    """

    def __init__(self, size: int, seconds: GroupSeconds | None = None) -> None:
        super().__init__(0, size)
        self._seconds = seconds or GroupSeconds()

    def joined(self, tensor: Tensor) -> Tensor:
        """Return the tensor in its place, between zeros."""
        return super().joined(_after(self._seconds.parts, tensor))

    def sum_of_part(self, tensor: Tensor) -> Tensor:
        """Return a copy of this replica's part."""
        return super().sum_of_part(_after(self._seconds.sum, tensor))

    def told(self, message: Tensor) -> list[Tensor]:
        """Return the message."""
        return [_after(self._seconds.parts, message)]


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
    with _divided(model, SingleRank(size, seconds), lambda: PlannedModel(model, plan, 0, size)):
        yield


@contextmanager
def as_single_replica(
    model: nn.Module, layers: Iterable[nn.Module], size: int, seconds: GroupSeconds | None = None
) -> Iterator[None]:
    """Context in which a model has the parts of the first replica and computes without the other replicas.

    Args:
        model: The model, which is unchanged at the end.
        layers: The layers that are divided among the stages.
        size: The number of replicas.
        seconds: How long a call of all replicas takes. Default: no time.

    Raises:
        ValueError: If the model has parameters without values.
    """
    with _divided(model, SingleReplica(size, seconds), lambda: GatheredModel(model, layers, 0, size)):
        yield


@contextmanager
def _divided(model: nn.Module, group: TensorGroup, divide: Callable[[], DividedModel]) -> Iterator[None]:
    """Context in which a model is divided and connected to a group. It is unchanged at the end."""
    kept = [(parameter, parameter.data, parameter.grad) for parameter in model.parameters()]
    for parameter, *_ in kept:
        parameter.grad = None
    divided = None
    try:
        divided = divide()
        divided_layers.connect(group)
        yield
    finally:
        divided_layers.connect(None)
        if divided is not None:
            divided.remove_hooks()
        for parameter, data, grad in kept:
            parameter.data, parameter.grad = data, grad
