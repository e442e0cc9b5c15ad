"""A dataset with ``state_dict`` that goes on from a checkpoint, and begins its later passes as it would have."""

import inspect
import pickle
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
from lightning_fabric.utilities.types import _Stateful
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, IterableDataset

from strategies.common.torch_compat import tree_flatten


class StatefulDataset:
    """The dataset of a loader, and what to do about the ones that begin every later pass where they were loaded.

    Those of Hugging Face do that, and a state from the end of an epoch has nothing left in it. Such a pass is noticed
    by its first batch; the dataset then gets the state back that it had before it was loaded, and the pass begins anew.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._unloaded: bytes | None = None
        self._after_first: Any = None

    def state(self) -> bytes:
        """As bytes, since a dataset may go on changing what it has given; much faster than a copy."""
        return pickle.dumps(self._dataset.state_dict())

    def load(self, state: Any) -> None:
        """Loads the state of a checkpoint."""
        self._unloaded, self._after_first = self.state(), None
        self._dataset.load_state_dict(state)

    def checked(self, begin: Callable[[], Iterator[Any]], *, may_be_empty: bool) -> Iterator[Any]:
        """A pass that ``begin`` begins, from the right place.

        Args:
            begin: Begins a pass.
            may_be_empty: Whether the checkpoint may have been written behind the last batch of this one.
        """
        iterator = begin()
        return iterator if self._unloaded is None else self._from_right_place(iterator, begin, may_be_empty)

    def _from_right_place(
        self, iterator: Iterator[Any], begin: Callable[[], Iterator[Any]], may_be_empty: bool
    ) -> Iterator[Any]:
        first = list(islice(iterator, 1))
        after = tree_flatten(self._dataset.state_dict())
        resumes = self._after_first is None
        if (not first and not (resumes and may_be_empty)) or (not resumes and _same(after, self._after_first)):
            assert self._unloaded is not None
            self._dataset.load_state_dict(pickle.loads(self._unloaded))
            self._unloaded = None
            iterator = begin()
            first = list(islice(iterator, 1))
            if not first:
                raise MisconfigurationException(
                    f"{type(self._dataset).__name__} has no batch in the epoch after the one that it was resumed from. "
                    "Its load_state_dict has to let later epochs begin at their start."
                )
        elif resumes:
            self._after_first = _copied(self._dataset)
        else:
            self._unloaded = None
        yield from chain(first, iterator)


def stateful_dataset(loader: Any) -> StatefulDataset | None:
    """The dataset of a DataLoader that reads it in this process, if it says where it is."""
    if not isinstance(loader, DataLoader) or isinstance(loader, _Stateful) or loader.num_workers:
        return None
    dataset: Any = loader.dataset
    if not (isinstance(dataset, IterableDataset) and isinstance(dataset, _Stateful)):
        return None
    try:
        inspect.signature(dataset.state_dict).bind()  # those of some libraries are for their own loaders only
    except (TypeError, ValueError):
        return None
    return StatefulDataset(dataset)


def _copied(dataset: Any) -> Any:
    return tree_flatten(pickle.loads(pickle.dumps(dataset.state_dict())))


def _same(one: Any, other: Any) -> bool:
    return one[1] == other[1] and all(map(np.array_equal, one[0], other[0]))
