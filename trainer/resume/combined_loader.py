"""All training loaders together, with their position at the batch that training has reached."""

from collections import deque
from collections.abc import Callable
from typing import Any

from strategies.lightning.compat import (
    CombinedLoader,
    MisconfigurationException,
    combined_iterator,
    combined_position,
    set_combined_position,
    sized_len,
)
from trainer.resume.loader import Resumption, TrackedLoader
from trainer.resume.random_state import RandomStateReader, plain, set_random_state

_MOST_AHEAD = 2  # Lightning reads one batch ahead of a loader without a length, and one may be in training


class ResumableLoader(CombinedLoader):
    """A ``CombinedLoader`` that can continue where a checkpoint was written.

    Its attributes hold the user's own loaders; it wraps only what it iterates over.

    Args:
        iterables: The user's loaders, or a nested structure of them.
        mode: As in ``CombinedLoader``.
        num_processed: Returns how many batches have been trained on, in all epochs.
    """

    def __init__(self, iterables: Any, mode: Any, num_processed: Callable[[], int]) -> None:
        super().__init__(iterables, mode)
        self._num_processed, self.num_taken = num_processed, 0
        self._tracked: list[TrackedLoader] = []
        self._history: deque[dict[str, Any]] = deque(maxlen=_MOST_AHEAD)
        self._saved: dict[str, Any] | None = None
        self.waits = self._reads_ahead = False
        self._random = RandomStateReader()
        self.random_at_last_batch: dict[str, Any] = {}

    def resume(self, saved: dict[str, Any], how: Resumption) -> None:
        """Make the next pass continue from a saved state.

        At the start of an epoch the loader yields nothing while its attribute ``waits`` is true.

        Args:
            saved: What :meth:`state` returned.
            how: How the run is resumed.

        Raises:
            MisconfigurationException: If the state was saved with another number of loaders.
        """
        self._track()
        if len(saved["loaders"]) != len(self._tracked):
            raise MisconfigurationException(
                f"The checkpoint was written with {len(saved['loaders'])} loaders for training, now there are "
                f"{len(self._tracked)}. Resume with the loaders of that run."
            )
        for tracked, state in zip(self._tracked, saved["loaders"], strict=True):
            tracked.resume(state, how)
        self._saved, self.waits = (saved, False) if how.in_mid_epoch else (None, True)

    def state(self, num_ahead: int) -> dict[str, Any]:
        """Return the position of the loaders, as plain types and tensors.

        Args:
            num_ahead: Number of batches that have been taken from the loaders and will be taken again.
        """
        position = self._history[-num_ahead] if num_ahead else self._position()
        loaders = zip(self._tracked, position["loaders"], strict=True)
        return {
            "loaders": [tracked.to_save(place) for tracked, place in loaders],
            "index": position["index"],
            "consumed": position["consumed"],
            "random": plain(position["random"]),
        }

    def states_of_stateful(self, num_ahead: int) -> list[dict[str, Any]]:
        """Return the states of loaders with ``state_dict``, as they were before the last ``num_ahead`` batches."""
        states = self._history[-num_ahead]["stateful"] if num_ahead else None
        return self._state_dicts() if states is None else states

    def __iter__(self) -> "ResumableLoader":
        self._track()
        self._history.clear()
        self.num_taken = self._num_processed()  # batches read ahead are dropped
        self._iterator = iterator = combined_iterator(self._mode, list(self._tracked), self._limits)
        if self.waits:
            return self
        iter(iterator)
        self._reads_ahead = sized_len(self) is None
        saved, self._saved = self._saved, None
        if saved is not None:
            set_combined_position(iterator, saved["index"], saved["consumed"])
            if saved["random"] is not None:
                set_random_state(saved["random"])
        return self

    def __next__(self) -> Any:
        if self.waits:
            raise StopIteration
        self.random_at_last_batch = self._random.read()
        position = self._position() | {"random": self.random_at_last_batch}
        position["stateful"] = self._state_dicts() if self._reads_ahead else None
        batch = super().__next__()
        self._history.append(position)
        self.num_taken += 1
        return batch

    def reset(self) -> None:
        super().reset()
        for tracked in self._tracked:
            tracked.release()

    def _track(self) -> None:
        if len(self._tracked) != len(self.flattened) or any(
            tracked.loader is not loader for tracked, loader in zip(self._tracked, self.flattened, strict=True)
        ):
            self._tracked = [TrackedLoader(loader) for loader in self.flattened]

    def _position(self) -> dict[str, Any]:
        index, consumed = combined_position(self._iterator)
        return {
            "loaders": [tracked.position() for tracked in self._tracked],
            "index": index,
            "consumed": consumed,
            "random": None,
        }
