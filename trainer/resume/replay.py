"""Repeat a pass over a sampler or a loader from the random state that determined its order."""

from collections.abc import Iterable, Iterator, Sized
from copy import deepcopy
from itertools import islice
from typing import Any, cast

from torch.utils.data import DataLoader, IterableDataset

from trainer.resume.random_state import Generator, generator_state, random_state, set_generator_state, set_random_state


class Replayable(Iterator[Any]):
    """A sampler or a loader whose passes can be repeated.

    The order of a pass may be drawn at two moments: when the pass begins (``iter``, which a ``DataLoader`` with workers
    calls twice), and when the first element is requested, as in generator functions. :attr:`random_states` holds the
    random state at each of these moments: that of the process and that of the owners.

    Args:
        source: The sampler or loader.
        owners: Objects whose attributes decide the order: generators, a ``seed``, numbers that change, such as an
            epoch, and lists of numbers, such as an order that is shuffled in place.
    """

    def __init__(self, source: Iterable[Any], owners: Iterable[Any]) -> None:
        self._source, self.owners = source, list(owners)
        self._at_first = [deepcopy(_numbers(owner)) for owner in self.owners]
        self.random_states: dict[str, Any] = {"begun": [], "first": None}
        self._iterator: Iterator[Any] = iter(())

    def prepare(
        self,
        begun: list[Any] | None = None,
        first: Any = None,
        num_skipped: int = 0,
        instead: Iterable[Any] | None = None,
    ) -> None:
        """Set up the next pass.

        Args:
            begun: The random states in which the pass begins; by default the current ones.
            first: The random state in which the first element is drawn.
            num_skipped: Number of first elements to skip.
            instead: An iterable to use in place of the source.
        """
        self.random_states = {"begun": [], "first": None}
        self._begun, self._first, self._num_skipped = begun, first, num_skipped
        self._instead = instead

    def __iter__(self) -> "Replayable":
        if self._begun:
            self.set_state(self._begun[min(len(self.random_states["begun"]), len(self._begun) - 1)])
        self.random_states["begun"].append(self.state())
        self._iterator = iter(self._source if self._instead is None else self._instead)
        return self

    def __next__(self) -> Any:
        self.start()
        return next(self._iterator)

    def __len__(self) -> int:
        return len(cast(Sized, self._source))

    def __getattr__(self, name: str) -> Any:
        if "_source" not in vars(self):  # while it is unpickled or copied
            raise AttributeError(name)
        return getattr(self._source, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_iterator": iter(())}  # generators can be neither pickled nor copied

    def release(self) -> None:
        """Drop the iterator of the current pass, which may hold worker processes."""
        self._iterator = iter(())

    def start(self) -> None:
        """Draw the order and leave out the first elements as set by :meth:`prepare`, once per pass."""
        if self.random_states["first"] is None:
            if self._first is not None:
                self.set_state(self._first)
            self.random_states["first"] = self.state()
            next(islice(self._iterator, self._num_skipped, self._num_skipped), None)

    def state(self) -> dict[str, Any]:
        """Return the random state of the process and of the owners."""
        return {"process": random_state(), "owners": self.state_of_owners()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Set what :meth:`state` returned."""
        set_random_state(state["process"])
        self.set_state_of_owners(state["owners"])

    def state_of_owners(self) -> list[dict[str, Any]]:
        """Return the generators' states and the changed numbers of each owner."""
        return [
            {
                "generators": {name: generator_state(generator) for name, generator in _generators(owner).items()},
                "numbers": {
                    name: deepcopy(number)
                    for name, number in _numbers(owner).items()
                    if at_first.get(name) != number or name == "seed"
                },
            }
            for owner, at_first in zip(self.owners, self._at_first, strict=True)
        ]

    def set_state_of_owners(self, states: list[dict[str, Any]]) -> None:
        """Set what :meth:`state_of_owners` returned, where an owner has such an attribute."""
        for owner, state in zip(self.owners, states, strict=False):
            for name, generator in _generators(owner).items():
                if name in state["generators"]:
                    set_generator_state(generator, state["generators"][name])
            vars(owner).update(deepcopy(state["numbers"]))


def _generators(owner: Any) -> dict[str, Generator]:
    return {name: value for name, value in vars(owner).items() if isinstance(value, Generator)}


def _numbers(owner: Any) -> dict[str, Any]:
    if isinstance(owner, DataLoader):
        return {}
    numbers = {name: value for name, value in vars(owner).items() if isinstance(value, int | float)}
    # As these exact types, because a checkpoint cannot hold numpy.float64, which is a subclass of float.
    plain = {n: next(kind for kind in (bool, int, float) if isinstance(v, kind))(v) for n, v in numbers.items()}
    if isinstance(owner, IterableDataset):
        return plain  # its lists hold data
    return plain | {name: value for name, value in vars(owner).items() if type(value) is list and _of_numbers(value)}


def _of_numbers(values: Any) -> bool:
    return all(type(v) in (int, float) or (type(v) is list and _of_numbers(v)) for v in values)
