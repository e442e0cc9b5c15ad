"""How many layers each stage gets: the split of a Sequential whose most expensive stage is as cheap as possible.

    layers   0    1    2    3    4    5
    costs    1    2    3    4    5    6
             └─── 10 ───────┘    └ 11 ┘      balance [4, 2]: no split in two has a maximum below 11

A pipeline runs at the pace of its most expensive stage; the balance minimises the cost of that stage, exactly.

Legend: i first layer of a stage, j first layer of the next stage, k number of stages that layers i.. are split into.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from strategies.pipeline.partition.profiling import layer_seconds, layer_sizes
from strategies.pipeline.stage.calling import CallLayer, call_layer


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: torch.device | str | None = None,
    call: CallLayer = call_layer,
) -> list[int]:
    """Balances by the time of each layer's forward and backward pass.

    Args:
        partitions: the number of stages.
        module: the layers; its parameters, buffers, mode, device and the random state are left as they are.
        sample: what the first layer takes, ``[batch, ...]`` tensors in any nesting; best with as many rows as a
            micro-batch will have. Several inputs of a ``Pipe`` are a tuple, in which ``NoChunk`` may be.
        timeout: the seconds that the measurement of all layers may take together, beyond each layer's warm-up and
            first few passes.
        device: where to measure; each layer's own device by default.
        call: how a layer is called with what the one before it returned; as :class:`Pipe` does by default.

    Returns:
        The number of layers of each stage, all at least 1.

    Raises:
        TypeError: ``module`` is not an ``nn.Sequential``.
        ValueError: fewer layers than partitions, a parameter that holds a gradient, or an argument out of range.
    """
    _check(partitions, module)
    if timeout <= 0:
        raise ValueError(f"timeout must be positive, got {timeout}")
    seconds = layer_seconds(module, sample, timeout_seconds=timeout, device=device, call=call)
    return partition_costs(seconds, partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | str | None = None,
    call: CallLayer = call_layer,
) -> list[int]:
    """Balances by the memory of each layer's parameters and activations in training.

    Args:
        partitions: the number of stages.
        module: the layers; its parameters, buffers, mode, device and the random state are left as they are.
        sample: a mini-batch as the first layer takes it, ``[batch, ...]`` tensors in any nesting. Several inputs of a
            ``Pipe`` are a tuple, in which ``NoChunk`` may be.
        chunks: the number of micro-batches that a mini-batch is split into; activations are those of one of them.
        param_scale: how many times a trained parameter is held: itself, its gradient, and what the optimizer keeps (SGD
            2, with momentum 3, Adam 4). A frozen parameter is held once.
        device: where to measure; each layer's own device by default.
        call: how a layer is called with what the one before it returned; as :class:`Pipe` does by default.

    Returns:
        The number of layers of each stage, all at least 1; the same for the same arguments.

    Raises:
        TypeError: ``module`` is not an ``nn.Sequential``.
        ValueError: fewer layers than partitions, a parameter that holds a gradient, or an argument out of range.
    """
    _check(partitions, module)
    if chunks < 1:
        raise ValueError(f"chunks must be at least 1, got {chunks}")
    if param_scale < 0:
        raise ValueError(f"param_scale must not be negative, got {param_scale}")
    sizes = layer_sizes(module, sample, chunks=chunks, param_scale=param_scale, device=device, call=call)
    return partition_costs(sizes, partitions)


def partition_costs(costs: Sequence[float], partitions: int, *, last: float = 0.0) -> list[int]:
    """Splits costs into consecutive parts, none of them empty, so that the most expensive part is as cheap as possible.

    Of several such splits it takes the one with the smallest sum of squared part costs (the most even one), then the
    one with the most even number of layers, then the one whose first, second, ... part is longest: the last stage also
    computes the loss.

    Args:
        costs: one cost per layer, none negative.
        partitions: the number of parts.
        last: what the last part costs beside its layers: the process of the last stage also runs the rest of the model.

    Returns:
        The length of each part.

    Raises:
        ValueError: fewer costs than partitions, partitions < 1, or a cost that is negative or not finite.
    """
    num = len(costs)
    if partitions < 1:
        raise ValueError(f"partitions must be at least 1, got {partitions}")
    if num < partitions:
        raise ValueError(f"{num} layers cannot be split into {partitions} stages of at least one layer each")
    if any(not math.isfinite(cost) or cost < 0 for cost in costs):
        raise ValueError(f"costs must be finite and not negative, got {list(costs)}")
    if not math.isfinite(last) or last < 0:
        raise ValueError(f"the cost of the last part must be finite and not negative, got {last}")
    *others, final = _as_integers([*costs, last])
    others[-1] += final  # the last layer is always in the last part
    total = [0, *accumulate(others)]  # total[j] - total[i] is the cost of layers i..j-1
    bound = _smallest_maximum(total, partitions)

    # rank[i]: cost of the best split of layers i.. into k parts; ends[k][i]: where the first part of that split ends.
    rank: list[tuple[int, int] | None] = [None] * num + [(0, 0)]
    ends = [[0] * (num + 1) for _ in range(partitions + 1)]
    for k in range(1, partitions + 1):
        shorter, rank = rank, [None] * (num + 1)
        for i in range(num - k + 1):
            best = None
            for j in range(i + 1, num - k + 2):
                cost, rest = total[j] - total[i], shorter[j]
                if cost > bound:
                    break
                if rest is None:
                    continue
                candidate = (rest[0] + cost * cost, rest[1] + (j - i) ** 2)
                if best is None or candidate <= best:  # equal: the longer first part
                    best, ends[k][i] = candidate, j
            rank[i] = best
    balance, i = [], 0
    for k in range(partitions, 0, -1):
        balance.append(ends[k][i] - i)
        i = ends[k][i]
    return balance


def _smallest_maximum(total: list[int], partitions: int) -> int:
    """Return the cost of the most expensive part in the best split.

    ``maximum[i]`` is that cost for layers i.. in k parts. As the end j of the first part moves right, the first part
    becomes more expensive and the others cheaper, so the best j is where the two cross; bisection finds it.
    """
    num = len(total) - 1
    maximum = [total[num] - total[i] for i in range(num)]
    for k in range(2, partitions + 1):
        rest = maximum
        maximum = [_cheapest_split(total, rest, i, range(i + 1, num - k + 2)) for i in range(num - k + 1)]
    return maximum[0]


def _cheapest_split(total: list[int], rest: list[int], i: int, ends: range) -> int:
    def first_part_dominates(j: int) -> bool:
        return total[j] - total[i] >= rest[j]

    crossing = bisect_left(ends, True, key=first_part_dominates)
    candidates = ends[max(0, crossing - 1) : crossing + 1]
    return min(max(total[j] - total[i], rest[j]) for j in candidates)


def _as_integers(costs: Sequence[float]) -> list[int]:
    """Return the costs times a common factor; sums of integers are exact, so equal costs stay equal."""
    ratios = [Fraction(cost) for cost in costs]
    factor = math.lcm(*(ratio.denominator for ratio in ratios))
    return [int(ratio * factor) for ratio in ratios]


def _check(partitions: int, module: nn.Sequential) -> None:
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"module must be an nn.Sequential, got {type(module).__name__}")
    if partitions < 1:
        raise ValueError(f"partitions must be at least 1, got {partitions}")
    if len(module) < partitions:
        raise ValueError(f"{len(module)} layers cannot be split into {partitions} stages of at least one layer each")
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            raise ValueError(
                f"parameter {name} already has a gradient, and a copy of it would take the memory of another; balance "
                "before training, or call zero_grad() first"
            )
