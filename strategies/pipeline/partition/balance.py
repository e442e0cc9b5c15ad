"""Choose the number of layers of each stage, so that the most expensive stage of an ``nn.Sequential`` is cheapest.

    layers   0    1    2    3    4    5
    costs    1    2    3    4    5    6
             └─── 10 ───────┘    └ 11 ┘      balance [4, 2]: no split in two has a maximum below 11

A pipeline runs at the pace of its most expensive stage; the balance minimises the cost of that stage, exactly.

Index letters: ``i`` first layer of a stage, ``j`` first layer of the next stage, ``k`` number of stages for layers i...
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, chain
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
    """Balance by the time of each layer's forward and backward pass.

    Args:
        partitions: The number of stages.
        module: The layers. Parameters, buffers, mode, device and the random state do not change.
        sample: The input of the first layer, ``[batch, ...]`` tensors in any nesting, ideally with as many rows as a
            micro-batch. Several inputs of a ``Pipe`` are a tuple, which may contain ``NoChunk``.
        timeout: Time limit in seconds for measuring all layers, in addition to each layer's warm-up and first few
            passes.
        device: The device to measure on; by default the device of each layer.
        call: Calls a layer with the output of the previous layer; by default as :class:`Pipe` does.

    Returns:
        The number of layers of each stage, each at least 1.

    Raises:
        TypeError: If ``module`` is not an ``nn.Sequential``.
        ValueError: If there are fewer layers than partitions, if a parameter has a gradient, or if an argument is out
            of range.
    """
    _check(partitions, module)
    if timeout <= 0:
        raise ValueError(f"timeout must be positive, got {timeout}")
    seconds = layer_seconds(module, sample, timeout_seconds=timeout, device=device, call=call)
    return partition_costs([sum(passes) for passes in seconds], partitions)


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
    """Balance by the memory of each layer's parameters and activations in training.

    Args:
        partitions: The number of stages.
        module: The layers. Parameters, buffers, mode, device and the random state do not change.
        sample: A mini-batch as the first layer takes it, ``[batch, ...]`` tensors in any nesting. Several inputs of a
            ``Pipe`` are a tuple, which may contain ``NoChunk``.
        chunks: The number of micro-batches per mini-batch. Only the activations of one micro-batch count.
        param_scale: The number of copies of a trained parameter in memory: the parameter, its gradient, and the
            optimizer states (SGD 2, with momentum 3, Adam 4). A frozen parameter counts once.
        device: The device to measure on; by default the device of each layer.
        call: Calls a layer with the output of the previous layer; by default as :class:`Pipe` does.

    Returns:
        The number of layers of each stage, each at least 1. The same arguments give the same result.

    Raises:
        TypeError: If ``module`` is not an ``nn.Sequential``.
        ValueError: If there are fewer layers than partitions, if a parameter has a gradient, or if an argument is out
            of range.
    """
    _check(partitions, module)
    if chunks < 1:
        raise ValueError(f"chunks must be at least 1, got {chunks}")
    if param_scale < 0:
        raise ValueError(f"param_scale must not be negative, got {param_scale}")
    sizes = layer_sizes(module, sample, chunks=chunks, param_scale=param_scale, device=device, call=call)
    return partition_costs(sizes, partitions)


def partition_costs(costs: Sequence[float], partitions: int, *, last: float = 0.0) -> list[int]:
    """Split costs into consecutive, non-empty parts so that the most expensive part is as cheap as possible.

    Among equal splits, the smallest sum of squared part costs wins, then the most even number of layers, then the
    longest first, second, ... part, because the last stage also computes the loss.

    Args:
        costs: One cost per layer, none negative.
        partitions: The number of parts.
        last: The additional cost of the last part: the process of the last stage also runs the rest of the model.

    Returns:
        The length of each part.

    Raises:
        ValueError: If there are fewer costs than partitions, if ``partitions < 1``, or if a cost is negative or not
            finite.
    """
    if partitions < 1:
        raise ValueError(f"partitions must be at least 1, got {partitions}")
    return _split([costs] * partitions, last)


def _split(costs: Sequence[Sequence[float]], last: float) -> list[int]:
    """Return the lengths of the parts; see :func:`partition_costs`.

    Args:
        costs: The cost of each layer in each part.
        last: The additional cost of the last part.
    """
    num, partitions = len(costs[0]), len(costs)
    if num < partitions:
        raise ValueError(f"{num} layers cannot be split into {partitions} stages of at least one layer each")
    if any(not math.isfinite(cost) or cost < 0 for part in costs for cost in part):
        raise ValueError(f"costs must be finite and not negative, got {list(costs[0])}")
    if not math.isfinite(last) or last < 0:
        raise ValueError(f"the cost of the last part must be finite and not negative, got {last}")
    *in_parts, final = _as_integers([*chain(*costs), last])
    in_parts[-1] += final  # the last layer is always in the last part
    # totals[-k][j] - totals[-k][i] is the cost of layers i..j-1 in the k-th part from the end
    totals = [[0, *accumulate(in_parts[start : start + num])] for start in range(0, len(in_parts), num)]
    bound = _smallest_maximum(totals)

    # rank[i]: cost of the best split of layers i.. into k parts; ends[k][i]: end of the first part of this split.
    rank: list[tuple[int, int] | None] = [None] * num + [(0, 0)]
    ends = [[0] * (num + 1) for _ in range(partitions + 1)]
    for k in range(1, partitions + 1):
        shorter, rank, total = rank, [None] * (num + 1), totals[-k]
        for i in range(num - k + 1):
            best = None
            for j in range(i + 1, num - k + 2):
                cost, rest = total[j] - total[i], shorter[j]
                if cost > bound:
                    break
                if rest is None:
                    continue
                candidate = (rest[0] + cost * cost, rest[1] + (j - i) ** 2)
                if best is None or candidate <= best:  # for equal costs, choose the longer first part
                    best, ends[k][i] = candidate, j
            rank[i] = best
    balance, i = [], 0
    for k in range(partitions, 0, -1):
        balance.append(ends[k][i] - i)
        i = ends[k][i]
    return balance


def partition_lists(costs: Sequence[Sequence[float]], lengths: Sequence[int], *, driver: float) -> list[int]:
    """Return the number of layers of each chunk of all lists, one list after another.

    Each list has its share of the driver's cost, in proportion to its layers, so that all stages cost the same over
    all lists.

    Args:
        costs: The cost of each layer of all lists, in each chunk of all lists.
        lengths: The number of layers of each list.
        driver: The cost of what the driver runs outside the layers.
    """
    whole, chunks, ends = sum(costs[0]), len(costs) // len(lengths), [*accumulate(lengths)]
    balance: list[int] = []
    for number, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        own = [part[end - length : end] for part in costs[number * chunks : (number + 1) * chunks]]
        share = sum(own[0]) / whole if whole > 0 else 1 / len(lengths)
        balance += _split(own, driver * share)
    return balance


def _smallest_maximum(totals: Sequence[list[int]]) -> int:
    """Return the cost of the most expensive part in the best split.

    ``maximum[i]`` is this cost for layers i.. in k parts. As the end j of the first part moves right, the first part
    becomes more expensive and the remaining parts cheaper. Bisection finds the best j, where the two costs cross.
    """
    total, num = totals[-1], len(totals[-1]) - 1
    maximum = [total[num] - total[i] for i in range(num)]
    for k in range(2, len(totals) + 1):
        rest, total = maximum, totals[-k]
        maximum = [_cheapest_split(total, rest, i, range(i + 1, num - k + 2)) for i in range(num - k + 1)]
    return maximum[0]


def _cheapest_split(total: list[int], rest: list[int], i: int, ends: range) -> int:
    def first_part_dominates(j: int) -> bool:
        return total[j] - total[i] >= rest[j]

    crossing = bisect_left(ends, True, key=first_part_dominates)
    candidates = ends[max(0, crossing - 1) : crossing + 1]
    return min(max(total[j] - total[i], rest[j]) for j in candidates)


def _as_integers(costs: Sequence[float]) -> list[int]:
    """Return the costs times a common factor. Sums of integers are exact, so equal costs stay equal."""
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
                f"parameter {name} already has a gradient, and copying it would take additional memory; balance "
                "before training, or call zero_grad() first"
            )
