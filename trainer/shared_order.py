"""The order of an epoch over all processes, so that another number of processes can go on in the middle of it.

``DistributedSampler`` gives process ``r`` of ``n`` every ``n``-th sample of one order, beginning with the ``r``-th, and
one process goes through an order alone. Batches of the same total size are then made of the same samples, whatever the
number of processes: with 2 processes (a, b) of 2 rows, and with one of 4 rows,

    order     3 0 5 1 | 4 2 7 6          the first two batches
              a b a b | a b a b          who has which sample
"""

from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from trainer.random_state import preserved_random_state


def describe_order(loader: DataLoader[Any], first: dict[str, Any] | None, owners: list[Any]) -> dict[str, Any] | None:
    """What the order of the present pass comes from, as plain types and tensors; ``None`` if that is not known.

    Args:
        loader: Whose samplers it comes from.
        first: The state of process and owners in which the first element was drawn.
        owners: Whose state that is.
    """
    sampler = loader.sampler
    if type(loader.batch_sampler) is not BatchSampler or first is None:
        return None
    if type(sampler) is SequentialSampler:
        return {"kind": "sequential"}
    if type(sampler) is DistributedSampler:
        return {"kind": "distributed", "shuffle": sampler.shuffle, "seed": sampler.seed, "epoch": sampler.epoch}
    if type(sampler) is not RandomSampler or sampler.replacement or sampler._num_samples is not None:
        return None
    own = next(state for owner, state in zip(owners, first["owners"], strict=True) if owner is sampler)
    return {"kind": "random", "torch": first["process"]["torch"], "generator": own["generators"].get("generator")}


def samples_of_process(order: dict[str, Any], loader: DataLoader[Any], rank: int, num_processes: int) -> list[int]:
    """The samples of one process, in the order that :func:`describe_order` saw.

    Args:
        order: That order.
        loader: The loader of this process.
        rank: Which process it is.
        num_processes: How many there are now.
    """
    number, own = len(cast(Any, loader.dataset)), len(cast(Any, loader.sampler))
    samples = range(number)
    if order["kind"] == "distributed":
        sampler: Any = DistributedSampler(cast(Any, samples), 1, 0, shuffle=order["shuffle"], seed=order["seed"])
        sampler.set_epoch(order["epoch"])
        found = list(sampler)
    elif order["kind"] == "random":
        generator = None
        if order["generator"] is not None:
            generator = torch.Generator()
            generator.set_state(order["generator"])
        with preserved_random_state():
            torch.set_rng_state(order["torch"])
            found = list(RandomSampler(samples, generator=generator))
    else:
        found = list(samples)
    # Every process needs as many; as in DistributedSampler, the first ones are used once more.
    return [found[place % number] for place in range(rank, num_processes * own, num_processes)]
