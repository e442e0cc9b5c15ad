"""Who owns which parameter, and which parameters travel together. Pure functions of sizes."""

from collections.abc import Hashable, Sequence


def assign_owners(sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Gives each item to a rank, the largest first, each to the rank that has least so far (sorted-greedy).

    The fullest rank then holds at most 4/3 of what the best partition would give it (Graham, 1969), and nearly as much
    as the others where items are small against a share.

    Args:
        sizes: One for each item.
        loads: For each rank what it has already.

    Returns:
        The rank of each item.
    """
    filled, owners = list(loads), [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        owners[item] = min(range(len(filled)), key=lambda rank: filled[rank])
        filled[owners[item]] += sizes[item]
    return owners


def form_buckets(kinds: Sequence[Hashable], sizes: Sequence[int], cap: int) -> list[list[int]]:
    """Puts items of one kind into common buckets, and buckets into the order in which they are complete.

    Args:
        kinds: One for each item, in the order in which items become available.
        sizes: One for each item.
        cap: A bucket is closed once it holds so much.

    Returns:
        The numbers of the items of each bucket.

    >>> form_buckets("abab", [1, 2, 1, 2], 2)
    [[1], [0, 2], [3]]
    """
    closed: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    for item, kind in enumerate(kinds):
        bucket = filling.setdefault(kind, [])
        bucket.append(item)
        if sum(sizes[other] for other in bucket) >= cap:
            closed.append(filling.pop(kind))
    return sorted([*closed, *filling.values()], key=lambda bucket: bucket[-1])
