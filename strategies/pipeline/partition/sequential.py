"""Splitting an ``nn.Sequential`` or an ``nn.ModuleList`` into stages of consecutive layers."""

from collections.abc import Sequence
from itertools import accumulate

from torch import nn

Pipelined = nn.Sequential | nn.ModuleList
"""What can be divided into stages: layers that call each other's output, or blocks that the model calls itself."""


def check_balance(balance: Sequence[int], num_layers: int, num_stages: int) -> list[int]:
    """Return the balance as a list of numbers of layers, one for each stage.

    Raises:
        ValueError: If it does not place every layer on one stage, if a stage is empty, or if the number of stages
            differs.
    """
    if not isinstance(balance, Sequence) or isinstance(balance, str):
        raise ValueError(f"The balance must be a list of numbers of layers, one for each device, got {balance!r}.")
    sizes = list(balance)
    if any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes):
        raise ValueError(
            f"The provided balance {sizes} must consist of whole numbers above 0: no stage without a layer."
        )
    if sum(sizes) != num_layers:
        raise ValueError(
            f"The provided balance sum: {sum(sizes)} does not match your Sequential length: {num_layers}. "
            f"Give each layer to exactly one stage, or leave the balance out to have it found."
        )
    if len(sizes) != num_stages:
        raise ValueError(
            f"The provided balance {sizes} is for {len(sizes)} stages, but there are {num_stages} devices. "
            f"Give one number of layers for each device, or set devices={len(sizes)}."
        )
    return sizes


def cut(module: nn.Module, balance: Sequence[int], *, is_reversed: bool = False) -> list[nn.Sequential]:
    """Split ``module`` into stages of consecutive layers, which share its layers and keep their names.

    Args:
        module: The layers.
        balance: Number of layers of each stage.
        is_reversed: Whether the first stage gets the last layers, because the model calls its blocks in that order.
    """
    children = list(module._modules.items())  # named_children() leaves out a layer that is there twice
    if is_reversed:
        children.reverse()
    ends = list(accumulate(balance))
    stages = []
    for start, stop in zip([0, *ends], ends, strict=False):
        stage = nn.Sequential()
        for name, child in children[start:stop]:
            stage.add_module(name, child)
        stages.append(stage)
    return stages
