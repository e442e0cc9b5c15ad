"""The objects that decide the order of a loader's batches."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import IterableDataset, Sampler

from strategies.common.patching import saved_attributes
from strategies.lightning.compat import (
    DatasetSamplerWrapper,
    shutdown_workers_and_reset_iterator,
    wrapped_sampler,
)


def owners_of_order(loader: Any) -> list[Any]:
    """Return the objects that decide the order: the loader, all its samplers, and its dataset if that is iterable."""
    found: list[Any] = []
    waiting = [loader, getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        waiting.append(loader.dataset)
    while waiting:
        owner = waiting.pop(0)
        if not hasattr(owner, "__dict__") or any(owner is other for other in found):
            continue
        found.append(owner)
        waiting += [value for value in vars(owner).values() if isinstance(value, Sampler | DatasetSamplerWrapper)]
        waiting += [wrapped_sampler(owner)] if isinstance(owner, DatasetSamplerWrapper) else []
    return found


@contextmanager
def kept_order(loaders: Iterable[Any]) -> Iterator[None]:
    """Context at whose end loaders have the order that they had before. Their workers end."""
    listed = list(loaders)
    restores = [
        restore for loader in listed for owner in owners_of_order(loader) for restore in saved_attributes(owner)
    ]
    try:
        yield
    finally:
        for restore in restores:
            restore()
        for loader in listed:
            shutdown_workers_and_reset_iterator(loader)
