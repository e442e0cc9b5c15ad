"""Datasets with ``state_dict``: continue from a checkpoint, and begin later passes at their start."""

import inspect
import pickle
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from strategies.common.torch_compat import tree_flatten
from strategies.lightning.compat import MisconfigurationException, Stateful


class StatefulDataset:
    """The dataset of a loader, with a work-around for datasets that begin every later pass at the loaded position.

    Datasets of Hugging Face do so, and after a state from the end of an epoch they have no samples left. Such a pass is
    recognised by its first batch. The dataset then gets back the state from before the load, and the pass begins again.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._unloaded: bytes | None = None
        self._after_first: Any = None

    def state(self) -> bytes:
        """Return the state as bytes, because a dataset may change what it returned; much faster than a deep copy."""
        return pickle.dumps(self._dataset.state_dict())

    def load(self, state: Any, unloaded: bytes) -> None:
        """Load the state of a checkpoint.

        Args:
            state: The state.
            unloaded: What :meth:`state` returned before anything of the checkpoint was written to the dataset.
        """
        self._unloaded, self._after_first = unloaded, None
        self._dataset.load_state_dict(state)

    def checked(
        self, begin: Callable[[], Iterator[Any]], rewind: Callable[[], None], *, may_be_empty: bool
    ) -> Iterator[Any]:
        """Return an iterator over a pass, from the right position.

        Args:
            begin: Begins a pass and returns its iterator.
            rewind: Restores the random state and the attributes of the dataset with which the pass has begun. The state
                is loaded afterwards, because ``load_state_dict`` may set the same attributes.
            may_be_empty: Whether the checkpoint may have been written after the last batch of the pass.
        """
        iterator = begin()
        return iterator if self._unloaded is None else self._from_right_place(iterator, begin, rewind, may_be_empty)

    def _from_right_place(
        self,
        iterator: Iterator[Any],
        begin: Callable[[], Iterator[Any]],
        rewind: Callable[[], None],
        may_be_empty: bool,
    ) -> Iterator[Any]:
        first = list(islice(iterator, 1))
        after = tree_flatten(self._dataset.state_dict())
        resumes = self._after_first is None
        if (not first and not (resumes and may_be_empty)) or (not resumes and _same(after, self._after_first)):
            assert self._unloaded is not None
            rewind()
            self._dataset.load_state_dict(pickle.loads(self._unloaded))
            self._unloaded = None
            iterator = begin()
            first = list(islice(iterator, 1))
            if not first:
                raise MisconfigurationException(
                    f"{type(self._dataset).__name__} has no batch in the epoch after the one that it was resumed from. "
                    "Its load_state_dict must let later epochs begin at their start."
                )
        elif resumes:
            self._after_first = _copied(self._dataset)
        else:
            self._unloaded = None
        yield from chain(first, iterator)


def stateful_dataset(loader: Any) -> StatefulDataset | None:
    """Return the dataset of a ``DataLoader`` that reads it in this process, if the dataset has a state."""
    if not isinstance(loader, DataLoader) or isinstance(loader, Stateful) or loader.num_workers:
        return None
    dataset: Any = loader.dataset
    if not (isinstance(dataset, IterableDataset) and isinstance(dataset, Stateful)):
        return None
    try:
        inspect.signature(dataset.state_dict).bind()  # some libraries need arguments that only their own loaders know
    except (TypeError, ValueError):
        return None
    return StatefulDataset(dataset)


def _copied(dataset: Any) -> Any:
    return tree_flatten(pickle.loads(pickle.dumps(dataset.state_dict())))


def _same(one: Any, other: Any) -> bool:
    return one[1] == other[1] and all(map(np.array_equal, one[0], other[0]))
