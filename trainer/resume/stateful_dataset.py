"""Datasets with ``state_dict``: continue from a checkpoint, and begin later passes where they would have begun."""

import inspect
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from strategies.common.torch_compat import tree_flatten
from strategies.lightning.compat import MisconfigurationException, Stateful, rank_zero_warn


class StatefulDataset:
    """The dataset of a loader, with what is known of how its passes begin.

    A new pass begins at the start of the data, or goes on where the pass before it has ended::

        state after the first batch    at the end    after the first batch of the next pass
        place 4                        place 12      place 4     began at the start
        place 4                        place 12      place 16    goes on

    Datasets of Hugging Face begin every later pass at the loaded position, and after a state from the end of an epoch
    they have no samples left. Such a pass is recognised by its first batch. The dataset then gets back the state from
    before the load, and the pass begins again.

    Attributes:
        goes_on: Whether a pass goes on where the pass before it has ended, or ``None`` if this is not known.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._unloaded: bytes | None = None
        self._after_first: Any = None  # the state after the first batch of the pass before
        self.goes_on: bool | None = None

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

    def load_after_pass(self, state: Any, unloaded: bytes, *, is_whole: bool) -> None:
        """Prepare the pass after one that has ended, in a dataset whose attributes are restored already.

        Args:
            state: The state at the end of the pass. It is loaded if the next pass goes on there, and after a whole
                pass, because a dataset that then has no samples left is recognised.
            unloaded: As for :meth:`load`.
            is_whole: Whether the pass has read all samples.
        """
        if _same(state, self._copy()):  # the restored attributes are the whole state
            return
        if self.goes_on or is_whole:
            self.load(state, unloaded)
        elif self.goes_on is None:
            name = type(self._dataset).__name__
            rank_zero_warn(
                f"The checkpoint was written after an epoch that did not read all samples of {name}, and it is not "
                f"known whether the next epoch goes on from there. It begins like the first epoch of a new {name}; "
                "only its numbers and generators are restored. To go on, resume from the middle of an epoch, or from "
                "the end of a later one, if epochs have more than one batch: by then the run has seen how an epoch "
                "begins."
            )

    def checked(
        self, begin: Callable[[], Iterator[Any]], rewind: Callable[[], None], *, may_be_empty: bool
    ) -> Iterator[Any]:
        """Return an iterator over a pass, from the right position.

        Args:
            begin: Begins a pass and returns its iterator.
            rewind: Restores the random state and the attributes of the dataset with which the pass has begun.
            may_be_empty: Whether the checkpoint may have been written after the last batch of the pass.
        """
        end = None if self._after_first is None else self._copy()
        return self._from_right_place(begin(), end, begin, rewind, may_be_empty)

    def _from_right_place(
        self,
        iterator: Iterator[Any],
        end: Any,
        begin: Callable[[], Iterator[Any]],
        rewind: Callable[[], None],
        may_be_empty: bool,
    ) -> Iterator[Any]:
        first = list(islice(iterator, 1))
        before, after = self._after_first, self._copy()
        resumes = self._unloaded is not None and before is None
        if self._unloaded is None:
            if first and before is not None and (goes_on := _goes_on(before, end, after)) is not None:
                self.goes_on = goes_on
        elif (not first and not (resumes and may_be_empty)) or not (
            resumes or self.goes_on or not _same(after, before)
        ):
            unload = partial(self._dataset.load_state_dict, pickle.loads(self._unloaded))
            self._unloaded = None
            # The attributes may hold the place that is to be taken back, or what the first state lacks, as an epoch.
            for restore in ((unload, rewind), (rewind, unload)):
                for part in restore:
                    part()
                iterator = begin()
                first = list(islice(iterator, 1))
                after = self._copy()
                if first and not _same(after, before):
                    break
            if not first:
                raise MisconfigurationException(
                    f"{type(self._dataset).__name__} has no batch in the epoch after the one that it was resumed from. "
                    "Its load_state_dict must let later epochs begin at their start."
                )
        elif not resumes:
            self._unloaded = None
        self._after_first = after
        yield from chain(first, iterator)

    def _copy(self) -> Any:
        return pickle.loads(self.state())


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


def _goes_on(first: Any, end: Any, then: Any) -> bool | None:
    """Return whether a pass goes on where the pass before it has ended, or ``None`` if the states do not tell.

    A pass that begins at the start takes back every entry that the pass before it has changed. Other entries, such as
    the number of an epoch, may change between passes in either case.

    Args:
        first: The state after the first batch of the pass before.
        end: The state at the end of the pass before.
        then: The state after the first batch of the pass.
    """
    if _same(first, then):
        return False
    one, two, three = _entries(first), _entries(end), _entries(then)
    changed = [path for path in one if path in two and path in three and not _same(one[path], two[path])]
    is_back = {_same(one[path], three[path]) for path in changed}
    return not is_back.pop() if len(is_back) == 1 else None


def _entries(state: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Return the entries of a nested dict, by path. A list is one entry, because its length may change."""
    if not isinstance(state, dict):
        return {path: state}
    return {at: entry for key, value in state.items() for at, entry in _entries(value, (*path, key)).items()}


def _same(one: Any, other: Any) -> bool:
    (leaves, structure), (others, other_structure) = tree_flatten(one), tree_flatten(other)
    return structure == other_structure and all(map(np.array_equal, leaves, others))
