"""One training loader: keeps its position in the data and continues from there in a resumed run."""

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from strategies.common.torch_compat import index_sampler, makes_own_iterator, using_iterator
from strategies.lightning.compat import (
    MisconfigurationException,
    Stateful,
    shutdown_workers_and_reset_iterator,
    sized_len,
)
from strategies.lightning.loader_order import owners_of_order
from trainer.resume.random_state import plain, preserved_random_state
from trainer.resume.replay import Replayable
from trainer.resume.sample_order import describe_order, samples_of_process
from trainer.resume.stateful_dataset import stateful_dataset
from trainer.resume.worker_random_state import CollateAndReport, StartWorker, read_report


@dataclass(frozen=True)
class Resumption:
    """How a run is resumed.

    Attributes:
        in_mid_epoch: Whether the next pass is the rest of the pass that was saved, or the pass after it.
        num_processes_before: Number of processes when the checkpoint was written.
        num_processes: Number of processes now.
        rank: The rank of this process.
    """

    in_mid_epoch: bool
    num_processes_before: int
    num_processes: int
    rank: int


class TrackedLoader(Iterator[Any]):
    """Wraps a loader for the training loop, which iterates over this object in place of the loader.

    How a pass continues in the middle of an epoch depends on the loader:

    * A ``DataLoader`` over a map-style dataset draws its order again and leaves out the indices of batches that have
      been trained on, so no sample is read twice.
    * An ``IterableDataset`` with ``state_dict``, read without workers, gets the state that it had after those batches.
      After the end of an epoch, it gets that state if it goes on there in the next epoch.
    * Lightning loads the state of a loader with ``state_dict``.
    * Any other loader is read again from the start of the epoch, and the batches trained on are dropped.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._by_index = _draws_indices(loader)
        self._dataset = stateful_dataset(loader)
        self._source = Replayable(index_sampler(loader) if self._by_index else loader, owners_of_order(loader))
        self._num_workers = loader.num_workers if self._by_index else 0
        self._shift = 0  # the role of worker 0
        self._reports: dict[int, Any] = {}  # by role: the random state after the last yielded batch
        self._iterator: Any = None  # persistent workers stay with it between passes
        self._num_yielded, self._has_ended = 0, False
        self._saved: dict[str, Any] | None = None
        self._how = Resumption(in_mid_epoch=False, num_processes_before=1, num_processes=1, rank=0)
        self._shared_order: dict[str, Any] | None = None  # of a pass that began with another number of processes

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> "TrackedLoader":
        saved, self._saved = self._saved, None
        self._num_yielded, self._has_ended, self._shared_order = 0, False, None
        if saved is None:
            self._begin(resumed=False)
        elif self._how.in_mid_epoch:
            with preserved_random_state():
                self._go_on(saved)
        else:
            self._begin(resumed=True)
        return self

    def __next__(self) -> Any:
        try:
            data = next(self._iterator)
        except StopIteration:
            self._has_ended = True
            raise
        if self._num_workers:
            data, report = data
            if report:
                self._reports[self._num_yielded % self._num_workers] = report
        self._num_yielded += 1
        return data

    def position(self) -> dict[str, Any]:
        """Return the position of the loader, for :meth:`to_save`."""
        position = {
            "random_states": self._source.random_states,
            "num_yielded": self._num_yielded,
            "reports": dict(self._reports),
        }
        if self._dataset is not None:
            position["dataset"] = self._dataset.state(), self._dataset.goes_on, self._has_ended
        return position

    def to_save(self, position: dict[str, Any]) -> dict[str, Any]:
        """Return a position as plain types and tensors."""
        reports = [position["reports"].get(role) for role in range(self._num_workers)]
        saved = {
            "num_yielded": position["num_yielded"],
            **plain(position["random_states"]),
            "owners": plain(self._source.state_of_owners()),
            "workers": [None if report is None else read_report(report) for report in reports],
            "shape": self._shape(),
            "samplers": self._samplers(),
            "order": self._shared_order,
            "is_shared": self._shared_order is not None,
        }
        if self._by_index and self._shared_order is None:
            saved["order"] = describe_order(self.loader, position["random_states"]["first"], self._source.owners)
        if "dataset" in position:
            state, goes_on, has_ended = position["dataset"]
            is_whole = has_ended or position["num_yielded"] == _num_in(self.loader)
            saved |= {"dataset": pickle.loads(state), "dataset_pass": {"goes_on": goes_on, "is_whole": is_whole}}
        return saved

    def resume(self, saved: dict[str, Any], how: Resumption) -> None:
        """Make the next pass the one that was saved, or the one after it.

        Args:
            saved: What :meth:`to_save` returned.
            how: How the run is resumed.

        Raises:
            MisconfigurationException: If the data have changed in the middle of an epoch, or if the checkpoint has been
                tampered with.
        """
        if not all(state is None or isinstance(state, dict) for state in saved["workers"]):
            raise MisconfigurationException(
                "The checkpoint holds something other than the random states of a loader's workers where those should "
                "be. Bytes there would be run as a pickle, so do not trust any part of this file."
            )
        self._saved, self._how = saved, how
        if how.in_mid_epoch:
            changed = how.num_processes_before != how.num_processes or saved["samplers"] != self._samplers()
            saved["is_shared"] |= changed and saved["order"] is not None
            self._check(saved, how)
            return
        self._reports = dict(enumerate(saved["workers"]))
        if self._dataset is None or "dataset" not in saved:
            self._source.set_state_of_owners(saved["owners"])
            return
        unloaded = self._dataset.state()
        self._source.set_state_of_owners(saved["owners"])
        self._dataset.goes_on = saved["dataset_pass"]["goes_on"]
        self._dataset.load_after_pass(saved["dataset"], unloaded, is_whole=saved["dataset_pass"]["is_whole"])

    def release(self) -> None:
        """Drop the iterators of the current pass, and end its worker processes."""
        shutdown_workers_and_reset_iterator(self)
        self._source.release()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_iterator": None}  # iterators of loaders can be neither pickled nor copied

    def _begin(self, *, resumed: bool) -> None:
        """Start a pass from its first batch."""
        if not self._by_index:
            self._source.prepare()
            self._iterator = self._iterator_over_dataset(resumed) if self._dataset else iter(self._source)
        elif self._num_workers and self.loader.persistent_workers and (resumed or self._shift):
            # Without the interruption persistent workers would have these roles. Start new ones and draw no seed.
            shutdown_workers_and_reset_iterator(self)
            self._source.prepare(begun=[self._source.state()])
            self._shift = 0
            self._iterator = self._iterator_over_indices()
        else:
            if not (self._num_workers and self.loader.persistent_workers):
                self._reports, self._shift = {}, 0
            self._source.prepare()
            self._iterator = self._iterator_over_indices()

    def _go_on(self, saved: dict[str, Any]) -> None:
        """Start a pass from the saved position."""
        number = saved["num_yielded"]
        if isinstance(self.loader, Stateful):
            self._begin(resumed=True)
        elif self._dataset is not None and "dataset" in saved:
            self._dataset.goes_on = saved["dataset_pass"]["goes_on"]
            self._dataset.load(saved["dataset"], self._dataset.state())
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
            iter(self._source)
            return map(next, repeat(self._source))  # calling iter on it again would begin another pass

        def rewind() -> None:
            self._source.set_state(self._source.random_states["begun"][0])
            self._source.prepare()

        return self._dataset.checked(begin, rewind, may_be_empty=resumed and self._how.in_mid_epoch)

    def _iterator_over_indices(self) -> Iterator[Any]:
        """Return the DataLoader's iterator, with indices from the source and workers that report random states.

        A DataLoader with persistent workers has one iterator for all passes. Other passes over it, such as those of
        validation, do not get this iterator, and this pass does not get theirs.
        """
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
            with using_iterator(loader, self._iterator):
                return iter(loader)
        finally:
            attributes.update(own)

    def _check(self, saved: dict[str, Any], how: Resumption) -> None:
        before, now = _in_all(saved["shape"], how.num_processes_before), _in_all(self._shape(), how.num_processes)
        problem = None
        if before != now:
            problem = f"with {_described(before)}, and this one has {_described(now)}"
        elif how.num_processes_before != how.num_processes and not saved["is_shared"]:
            problem = f"in {how.num_processes_before} processes, of samplers whose order cannot be divided again"
        elif saved["samplers"] != self._samplers() and not saved["is_shared"]:
            problem = f"with {saved['samplers']}, and this one has {self._samplers()}"
        if problem is not None:
            raise MisconfigurationException(
                f"The checkpoint was written in the middle of an epoch, after {saved['num_yielded']} batches of a "
                f"loader {problem}, so some samples would be left out or trained on twice. Resume with the settings of "
                "that run, from the end of an epoch, or with pytorch_lightning.Trainer, which restarts the loader."
            )

    def _shape(self) -> dict[str, int | None]:
        loader = self.loader
        return {
            "batches": _num_in(loader),
            "rows in each": getattr(loader, "batch_size", None),
            "samples": _num_in(getattr(loader, "dataset", None)),
        }

    def _samplers(self) -> str | None:
        """Return a description of the samplers; Lightning inserts a ``DistributedSampler`` under some strategies."""
        if not self._by_index:
            return None
        sampler = self.loader.sampler
        shuffles = ", which shuffles" if getattr(sampler, "shuffle", False) else ""
        return f"{type(self.loader.batch_sampler).__name__} of {type(sampler).__name__}{shuffles}"


def _draws_indices(loader: Any) -> bool:
    """Return whether a loader is a ``DataLoader`` that takes samples by index and does not override how."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader, Stateful)
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader).__iter__ is DataLoader.__iter__
        and not makes_own_iterator(type(loader), DataLoader)
    )


def _num_in(data: Any) -> int | None:
    try:
        return sized_len(data)
    except Exception:  # the user's __len__ may raise anything
        return None


def _in_all(shape: dict[str, int | None], num_processes: int) -> dict[str, int | None]:
    """Return the shape with the number of rows of all processes together."""
    rows = shape["rows in each"]
    return {**shape, "rows in each": None if rows is None else rows * num_processes}


def _described(shape: dict[str, int | None]) -> str:
    return ", ".join(f"{number} {name}" for name, number in shape.items() if number is not None)
