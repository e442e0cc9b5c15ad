"""Going through an iterable once more, from the random state that its order came from, to where a checkpoint was."""

from collections.abc import Iterable, Iterator, Sized
from copy import deepcopy
from itertools import islice
from typing import Any, cast

from lightning_fabric.utilities.distributed import _DatasetSamplerWrapper
from torch.utils.data import DataLoader, IterableDataset, Sampler

from trainer.random_state import Generator, generator_state, random_state, set_generator_state, set_random_state


class Replayable(Iterator[Any]):
    """A sampler or a loader, each pass over which can be repeated.

    The order of a pass may be drawn in two places: when it begins (``iter``; DataLoader does that twice if it has
    workers) and when the first element is asked for, as generator functions do. :attr:`record` holds the random state
    of each of these moments: that of the process, and what the owners hold themselves.

    Args:
        source: What is gone through.
        owners: Objects whose attributes decide the order: generators, a ``seed``, and numbers that change, such as an
            epoch, or lists of numbers, such as an order that is shuffled in place.
    """

    def __init__(self, source: Iterable[Any], owners: Iterable[Any]) -> None:
        self._source, self.owners = source, list(owners)
        self._at_first = [deepcopy(_numbers(owner)) for owner in self.owners]
        self.record: dict[str, Any] = {"begun": [], "first": None}
        self._iterator: Iterator[Any] = iter(())

    def prepare(
        self,
        begun: list[Any] | None = None,
        first: Any = None,
        num_skipped: int = 0,
        instead: Iterable[Any] | None = None,
    ) -> None:
        """Says what the next pass is to be.

        Args:
            begun: The random states in which it begins; by default the present ones.
            first: That in which its first element is drawn.
            num_skipped: How many elements it leaves out.
            instead: What it goes through in place of the source.
        """
        self.record = {"begun": [], "first": None}
        self._begun, self._first, self._num_skipped = begun, first, num_skipped
        self._instead = instead

    def __iter__(self) -> "Replayable":
        if self._begun:
            self.set_state(self._begun[min(len(self.record["begun"]), len(self._begun) - 1)])
        self.record["begun"].append(self.state())
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
        """Drops the iterator of the current pass, which may hold worker processes."""
        self._iterator = iter(())

    def start(self) -> None:
        """Draws the order and leaves out what is to be left out, unless that has been done."""
        if self.record["first"] is None:
            if self._first is not None:
                self.set_state(self._first)
            self.record["first"] = self.state()
            next(islice(self._iterator, self._num_skipped, self._num_skipped), None)

    def state(self) -> dict[str, Any]:
        """The random state of the process and of the owners."""
        return {"process": random_state(), "owners": self.state_of_owners()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Sets what :meth:`state` gave."""
        set_random_state(state["process"])
        self.set_state_of_owners(state["owners"])

    def state_of_owners(self) -> list[dict[str, Any]]:
        """What the owners hold themselves."""
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
        """Sets what :meth:`state_of_owners` gave, where there is such an attribute."""
        for owner, state in zip(self.owners, states, strict=False):
            for name, generator in _generators(owner).items():
                if name in state["generators"]:
                    set_generator_state(generator, state["generators"][name])
            vars(owner).update(deepcopy(state["numbers"]))


def owners_of_order(loader: Any) -> list[Any]:
    """The loader, its samplers and what those are made from, or its dataset if that decides the order itself."""
    found: list[Any] = []
    waiting = [loader, getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        waiting.append(loader.dataset)
    while waiting:
        owner = waiting.pop(0)
        if not hasattr(owner, "__dict__") or any(owner is other for other in found):
            continue
        found.append(owner)
        waiting += [value for value in vars(owner).values() if isinstance(value, Sampler | _DatasetSamplerWrapper)]
        waiting += [owner._sampler] if isinstance(owner, _DatasetSamplerWrapper) else []
    return found


def _generators(owner: Any) -> dict[str, Generator]:
    return {name: value for name, value in vars(owner).items() if isinstance(value, Generator)}


def _numbers(owner: Any) -> dict[str, Any]:
    if isinstance(owner, DataLoader):
        return {}
    numbers = {name: value for name, value in vars(owner).items() if isinstance(value, int | float)}
    # Of these very types, as a checkpoint may hold no numpy.float64, which is a float, too.
    plain = {n: next(kind for kind in (bool, int, float) if isinstance(v, kind))(v) for n, v in numbers.items()}
    if isinstance(owner, IterableDataset):
        return plain  # its lists are data
    return plain | {name: value for name, value in vars(owner).items() if type(value) is list and _of_numbers(value)}


def _of_numbers(values: Any) -> bool:
    return all(type(v) in (int, float) or (type(v) is list and _of_numbers(v)) for v in values)
