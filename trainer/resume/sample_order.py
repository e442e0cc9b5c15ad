"""The order of samples over all processes, so that a run can continue an epoch with another number of processes.

``DistributedSampler`` gives process ``r`` of ``n`` every ``n``-th sample of one order, starting with the ``r``-th; one
process takes all samples of the order. Batches of the same total size therefore contain the same samples for any number
of processes. With 2 processes (a, b) and 2 rows each, or with one process and 4 rows:

    order     3 0 5 1 | 4 2 7 6          the first two batches
              a b a b | a b a b          the process that takes the sample
"""

from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from strategies.common.torch_compat import has_given_length
from trainer.resume.random_state import preserved_random_state


def describe_order(loader: DataLoader[Any], first: dict[str, Any] | None, owners: list[Any]) -> dict[str, Any] | None:
    """Return what the order of the current pass comes from, as plain types and tensors; ``None`` if that is not known.

    Args:
        loader: The loader whose samplers draw the order.
        first: The state of process and owners in which the first element was drawn.
        owners: The owners of that state; see :class:`~trainer.resume.replay.Replayable`.
    """
    sampler = loader.sampler
    if type(loader.batch_sampler) is not BatchSampler or first is None:
        return None
    if type(sampler) is SequentialSampler:
        return {"kind": "sequential"}
    if type(sampler) is DistributedSampler:
        return {"kind": "distributed", "shuffle": sampler.shuffle, "seed": sampler.seed, "epoch": sampler.epoch}
    if type(sampler) is not RandomSampler or sampler.replacement or has_given_length(sampler):
        return None
    own = next(state for owner, state in zip(owners, first["owners"], strict=True) if owner is sampler)
    return {"kind": "random", "torch": first["process"]["torch"], "generator": own["generators"].get("generator")}


def samples_of_process(order: dict[str, Any], loader: DataLoader[Any], rank: int, num_processes: int) -> list[int]:
    """Return the indices of the samples of one process.

    Args:
        order: What :func:`describe_order` returned.
        loader: The loader of this process.
        rank: The rank of this process.
        num_processes: Number of processes now.
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
    # Every process needs the same number; as in DistributedSampler, the first samples are used again.
    return [found[place % number] for place in range(rank, num_processes * own, num_processes)]
