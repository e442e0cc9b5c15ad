"""One loader of the training loop: remembers where it is in its data, and goes on from there in a resumed run."""

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from lightning_fabric.utilities.data import sized_len
from lightning_fabric.utilities.types import _Stateful
from pytorch_lightning.utilities.combined_loader import _shutdown_workers_and_reset_iterator
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from trainer.random_state import plain, preserved_random_state
from trainer.replay import Replayable, owners_of_order
from trainer.shared_order import describe_order, samples_of_process
from trainer.stateful_dataset import stateful_dataset
from trainer.worker_random_state import CollateAndReport, StartWorker, read_report


@dataclass(frozen=True)
class Resumption:
    """How a run is resumed.

    Attributes:
        in_mid_epoch: Whether the next pass is the rest of the one that was saved, or the one after it.
        num_processes_before: How many processes there were.
        num_processes: How many there are.
        rank: Of this one.
    """

    in_mid_epoch: bool
    num_processes_before: int
    num_processes: int
    rank: int


class TrackedLoader(Iterator[Any]):
    """What the training loop iterates over in place of a loader.

    How it goes on in the middle of an epoch:

    * a DataLoader over a map-style dataset draws its order once more and leaves out the indices of the batches that
      have been trained on, so that no sample is read twice;
    * an ``IterableDataset`` with ``state_dict``, read without workers, gets the state that it had behind those batches;
    * a loader with ``state_dict`` is left to Lightning, which loads its state;
    * anything else is read again from the start of the epoch.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._by_index = _draws_indices(loader)
        self._dataset = stateful_dataset(loader)
        self._source = Replayable(loader._index_sampler if self._by_index else loader, owners_of_order(loader))
        self._num_workers = loader.num_workers if self._by_index else 0
        self._shift = 0  # the role of worker 0
        self._reports: dict[int, Any] = {}  # of each role, when it made the last of the batches that were yielded
        self._iterator: Iterator[Any] = iter(())
        self._num_yielded = 0
        self._saved: dict[str, Any] | None = None
        self._how = Resumption(in_mid_epoch=False, num_processes_before=1, num_processes=1, rank=0)
        self._shared_order: dict[str, Any] | None = None  # of a pass that has begun with another number of processes

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> "TrackedLoader":
        saved, self._saved = self._saved, None
        self._num_yielded, self._shared_order = 0, None
        if saved is None:
            self._begin(resumed=False)
        elif self._how.in_mid_epoch:
            with preserved_random_state():
                self._go_on(saved)
        else:
            self._begin(resumed=True)
        return self

    def __next__(self) -> Any:
        data = next(self._iterator)
        if self._num_workers:
            data, report = data
            if report:
                self._reports[self._num_yielded % self._num_workers] = report
        self._num_yielded += 1
        return data

    def position(self) -> dict[str, Any]:
        """Where the loader is, for :meth:`to_save`."""
        position = {"record": self._source.record, "num_yielded": self._num_yielded, "reports": dict(self._reports)}
        if self._dataset is not None:
            position["dataset"] = self._dataset.state()
        return position

    def to_save(self, position: dict[str, Any]) -> dict[str, Any]:
        """A position as plain types and tensors."""
        reports = [position["reports"].get(role) for role in range(self._num_workers)]
        saved = {
            "num_yielded": position["num_yielded"],
            **plain(position["record"]),
            "owners": plain(self._source.state_of_owners()),
            "workers": [None if report is None else read_report(report) for report in reports],
            "shape": self._shape(),
            "samplers": self._samplers(),
            "order": self._shared_order,
            "is_shared": self._shared_order is not None,
        }
        if self._by_index and self._shared_order is None:
            saved["order"] = describe_order(self.loader, position["record"]["first"], self._source.owners)
        return saved | ({"dataset": pickle.loads(position["dataset"])} if "dataset" in position else {})

    def resume(self, saved: dict[str, Any], how: Resumption) -> None:
        """Lets the next pass be the one that :meth:`to_save` saw, or the one after it.

        Raises:
            MisconfigurationException: If it would go on in the middle of an epoch over other data, or if the checkpoint
                has been tampered with.
        """
        if not all(state is None or isinstance(state, dict) for state in saved["workers"]):
            raise MisconfigurationException(
                "The checkpoint holds something else than the random states of a loader's workers where those should "
                "be. Bytes would be run as a pickle there: none of it should be trusted."
            )
        self._saved, self._how = saved, how
        if how.in_mid_epoch:
            changed = how.num_processes_before != how.num_processes or saved["samplers"] != self._samplers()
            saved["is_shared"] |= changed and saved["order"] is not None
            self._check(saved, how)
            return
        self._source.set_state_of_owners(saved["owners"])
        self._reports = dict(enumerate(saved["workers"]))
        if self._dataset is not None and "dataset" in saved:
            self._dataset.load(saved["dataset"])

    def release(self) -> None:
        """Drops the iterators of the current pass, and with them its worker processes."""
        self._iterator = iter(())
        self._source.release()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_iterator": iter(())}  # the iterators of loaders can be neither pickled nor copied

    def _begin(self, *, resumed: bool) -> None:
        """A pass from the start."""
        if not self._by_index:
            self._source.prepare()
            self._iterator = self._iterator_over_dataset(resumed) if self._dataset else iter(self._source)
        elif self._num_workers and self.loader.persistent_workers and (resumed or self._shift):
            # Without interruption, workers in these very roles would be there: they start anew, and draw no seed.
            _shutdown_workers_and_reset_iterator(self.loader)
            self._source.prepare(begun=[self._source.state()])
            self._shift = 0
            self._iterator = self._iterator_over_indices()
        else:
            if not (self._num_workers and self.loader.persistent_workers):
                self._reports, self._shift = {}, 0
            self._source.prepare()
            self._iterator = self._iterator_over_indices()

    def _go_on(self, saved: dict[str, Any]) -> None:
        """A pass from where it was."""
        number = saved["num_yielded"]
        if isinstance(self.loader, _Stateful):
            self._begin(resumed=True)
        elif self._dataset is not None and "dataset" in saved:
            self._dataset.load(saved["dataset"])
            self._begin(resumed=True)
        else:
            if saved["is_shared"]:
                self._shared_order = saved["order"]
                samples = samples_of_process(saved["order"], self.loader, self._how.rank, self._how.num_processes)
                batches = BatchSampler(samples, self.loader.batch_size, self.loader.drop_last)
                self._source.prepare(num_skipped=number, instead=batches)
            else:
                self._source.prepare(saved["begun"], saved["first"], number)
            if self._num_workers == len(saved["workers"]) > 0:
                self._reports, self._shift = dict(enumerate(saved["workers"])), number % self._num_workers
            self._iterator = self._iterator_over_indices() if self._by_index else iter(self._source)
            if number:
                self._source.start()
        self._num_yielded = number

    def _iterator_over_dataset(self, resumed: bool) -> Iterator[Any]:
        assert self._dataset is not None

        def begin() -> Iterator[Any]:
            if self._source.record["begun"]:  # once more, as the first time
                self._source.set_state(self._source.record["begun"][0])
                self._source.prepare()
            iter(self._source)
            return map(next, repeat(self._source))  # iter must not be called on it again

        return self._dataset.checked(begin, may_be_empty=resumed and self._how.in_mid_epoch)

    def _iterator_over_indices(self) -> Iterator[Any]:
        """The DataLoader's own iterator, over indices and from workers that can be followed."""
        loader = self.loader
        replaced: dict[str, Any] = {"sampler" if loader.batch_sampler is None else "batch_sampler": self._source}
        if self._num_workers:
            replaced["collate_fn"] = CollateAndReport(loader.collate_fn)
        if self._shift or self._reports:
            states = {role: read_report(report) for role, report in self._reports.items() if report is not None}
            replaced["worker_init_fn"] = StartWorker(loader.worker_init_fn, self._shift, self._num_workers, states)
        attributes = vars(loader)  # DataLoader refuses to have its samplers assigned
        own = {name: attributes[name] for name in replaced}
        attributes.update(replaced)
        try:
            return iter(loader)
        finally:
            attributes.update(own)

    def _check(self, saved: dict[str, Any], how: Resumption) -> None:
        before, now = _in_all(saved["shape"], how.num_processes_before), _in_all(self._shape(), how.num_processes)
        problem = None
        if before != now:
            problem = f"with {_described(before)}, and this one has {_described(now)}"
        elif how.num_processes_before != how.num_processes and not saved["is_shared"]:
            problem = f"in {how.num_processes_before} processes, of samplers whose order cannot be divided among others"
        elif saved["samplers"] != self._samplers() and not saved["is_shared"]:
            problem = f"with {saved['samplers']}, and this one has {self._samplers()}"
        if problem is not None:
            raise MisconfigurationException(
                f"The checkpoint was written in the middle of an epoch, after {saved['num_yielded']} batches of a "
                f"loader {problem}, so some samples would be left out or trained on twice. Resume as it was trained, "
                "from the end of an epoch, or with pytorch_lightning.Trainer, which begins the loader anew."
            )

    def _shape(self) -> dict[str, int | None]:
        loader = self.loader
        return {
            "batches": _num_in(loader),
            "rows in each": getattr(loader, "batch_size", None),
            "samples": _num_in(getattr(loader, "dataset", None)),
        }

    def _samplers(self) -> str | None:
        """What draws the order; under some strategies, Lightning puts a ``DistributedSampler`` in."""
        if not self._by_index:
            return None
        sampler = self.loader.sampler
        shuffles = ", which shuffles" if getattr(sampler, "shuffle", False) else ""
        return f"{type(self.loader.batch_sampler).__name__} of {type(sampler).__name__}{shuffles}"


def _draws_indices(loader: Any) -> bool:
    """Whether a loader is a DataLoader that takes samples by index, and does so in torch's own way."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader, _Stateful)
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader).__iter__ is DataLoader.__iter__
        and type(loader)._get_iterator is DataLoader._get_iterator
    )


def _num_in(data: Any) -> int | None:
    try:
        return sized_len(data)
    except Exception:  # whatever the user's __len__ raises
        return None


def _in_all(shape: dict[str, int | None], num_processes: int) -> dict[str, int | None]:
    """The shape with the rows of all processes together."""
    rows = shape["rows in each"]
    return {**shape, "rows in each": None if rows is None else rows * num_processes}


def _described(shape: dict[str, int | None]) -> str:
    return ", ".join(f"{number} {name}" for name, number in shape.items() if number is not None)
