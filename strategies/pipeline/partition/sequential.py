"""Split an ``nn.Sequential``, an ``nn.ModuleList`` or several lists into stages, each with some chunks of layers."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from strategies.common.joined_lists import JoinedLists
from strategies.common.stage_layers import StageLayers
from strategies.pipeline.partition.balance import partition_costs

Pipelined = nn.Sequential | nn.ModuleList
"""A module that can be divided into stages: layers that run in sequence, or blocks that the model calls itself."""


def check_balance(balance: Sequence[int], num_layers: int, num_stages: int, *, chunks: int = 1) -> list[int]:
    """Return the balance as a list with the number of layers of each chunk.

    Raises:
        ValueError: If the balance does not place every layer on one stage, if a chunk is empty, or if the number of
            chunks is not ``num_stages * chunks_per_stage``.
    """
    if not isinstance(balance, Sequence) or isinstance(balance, str):
        raise ValueError(f"The balance must be a list of numbers of layers, one for each device, got {balance!r}.")
    sizes = list(balance)
    if any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes):
        raise ValueError(
            f"The provided balance {sizes} must consist of whole numbers above 0: every stage needs a layer."
        )
    if sum(sizes) != num_layers:
        raise ValueError(
            f"The provided balance sum: {sum(sizes)} does not match your Sequential length: {num_layers}. "
            f"Give each layer to exactly one stage, or leave the balance out to choose it automatically."
        )
    if chunks > 1 and len(sizes) != num_stages * chunks:
        raise ValueError(
            f"The provided balance {sizes} is for {len(sizes)} chunks, but {num_stages} devices with "
            f"chunks={chunks} have {num_stages * chunks}. Give one number of layers for "
            "each chunk, in the order of the layers."
        )
    if len(sizes) != num_stages * chunks:
        raise ValueError(
            f"The provided balance {sizes} is for {len(sizes)} stages, but there are {num_stages} devices. "
            f"Give one number of layers for each device, or set devices={len(sizes)}."
        )
    return sizes


def check_lists(balance: Sequence[int], lengths: Sequence[int]) -> None:
    """Check that no chunk has layers of two lists.

    Args:
        balance: The number of layers of each chunk. All lists have equally many chunks.
        lengths: The number of layers of each list.

    Raises:
        ValueError: If the chunks of a list do not have its layers.
    """
    chunks = len(balance) // len(lengths)
    for number, length in enumerate(lengths):
        own = list(balance[number * chunks : (number + 1) * chunks])
        if sum(own) != length:
            raise ValueError(
                f"The provided balance {list(balance)} has {own} for list {number} of {len(lengths)}, which has "
                f"{length} layers. Give {chunks} numbers of layers for each list, one list after another."
            )


def even_balance(lengths: Sequence[int], chunks: int) -> list[int]:
    """Return the balance with equal numbers of layers.

    Args:
        lengths: The number of layers of each list.
        chunks: The number of chunks of each list.
    """
    return [size for length in lengths for size in partition_costs([1] * length, chunks)]


def cut(
    module: nn.Module, balance: Sequence[int], stage_of: Sequence[int] | None = None, *, is_reversed: bool = False
) -> list[StageLayers]:
    """Split ``module`` into stages, which share its layers and keep their names.

    Args:
        module: The layers.
        balance: Number of layers of each chunk.
        stage_of: The number of the stage of each chunk; by default each chunk is a stage.
        is_reversed: Whether the first chunk gets the last layers, because the model calls its blocks in reverse order.
    """
    if isinstance(module, JoinedLists):
        check_lists(balance, module.lengths)
    children: list[tuple[str, Any]] = list(module._modules.items())  # named_children() leaves out repetitions
    if is_reversed:
        children.reverse()
    stages = list(range(len(balance))) if stage_of is None else stage_of
    spans = [range(start, stop) for start, stop in pairwise([0, *accumulate(balance)])]
    cut = []
    for i in range(1 + max(stages)):
        own = [span for span, stage in zip(spans, stages, strict=True) if stage == i]
        layers = StageLayers(own)
        for span in own:
            for name, child in children[span.start : span.stop]:
                layers._modules[name] = child  # add_module refuses a layer that is called "chunks", and dots
        cut.append(layers)
    return cut
