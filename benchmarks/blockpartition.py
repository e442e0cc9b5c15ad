"""The balancing algorithm that torchgpipe publishes. For comparison only: Relay does not use it.

The algorithm is from Bárány and Grinberg, "Block partitions of sequences" (2013, https://arxiv.org/abs/1308.2452). They
show that every sequence of numbers of at most 1 has a partition into k blocks whose sums differ by at most 1. In each
step of the algorithm, the smallest block gets an element of its neighbour on the side of the largest block. The steps
end when the largest block exceeds the smallest block by at most 1. torchgpipe first scales the costs to 0..1 and starts
from blocks of equal length.
"""

from collections.abc import Sequence
from itertools import pairwise


def block_partition(costs: Sequence[float], blocks: int) -> list[int]:
    """Return the length of each block; some blocks may be empty.

    Args:
        costs: The cost of each layer.
        blocks: Number of blocks.
    """
    low, high = min(costs), max(costs)
    scaled = [(cost - low) / (high - low) if high > low else 0.0 for cost in costs]
    bounds = [len(costs) // blocks * k for k in range(blocks)] + [len(costs)]

    def size(block: int) -> float:
        # Not a difference of running sums: with its rounding errors, the loop might not end.
        return sum(scaled[bounds[block] : bounds[block + 1]])

    largest = max(range(blocks), key=lambda block: (size(block), block))
    limit = size(largest)
    while True:
        smallest = min(range(blocks), key=lambda block: (size(block), block))
        if limit <= size(smallest) + 1:
            return [after - before for before, after in pairwise(bounds)]
        if largest < smallest:
            bounds[smallest] -= 1
            giver = smallest - 1
        else:
            bounds[smallest + 1] += 1
            giver = smallest + 1
        if giver == largest:
            largest = max(range(blocks), key=lambda block: (size(block), block))
            limit = size(largest)
