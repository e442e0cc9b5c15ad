"""The driver's log: what it has exchanged with its workers since the last snapshot, in order.

    snapshot 3 │ order: run │ value sent │ value received │ order: step │ ...
               └──────────── is gone through again by new workers that have begun with snapshot 3

Everything that changes a worker comes from the driver, or from workers for which the same is true, so workers that
begin with a snapshot and get the log once more end where the lost ones were. What they send a second time must equal
what they have sent before. (In the literature: sender-based message logging with deterministic receivers.)
"""

import threading
from collections import deque
from typing import Any

import torch
from torch import Tensor

from strategies.common.errors import is_consequence
from strategies.pipeline.control.client import Entry, Failures
from strategies.pipeline.stage.edges import leaves_of, tensors_of, with_leaves


class Log:
    """What the driver has exchanged with its workers since the last snapshot.

    Args:
        failures: Those of the first session.
    """

    def __init__(self, failures: Failures) -> None:
        self.lock = threading.RLock()
        """Held while an operation is carried out, and while workers are replaced."""
        self.failures = failures
        """Those of the session in which operations run."""
        self.size_bytes = 0
        self._entries: deque[Entry] = deque()
        self._num_forgotten = 0
        self._marks: dict[int, int] = {}
        """For each snapshot, how many entries were made before it."""

    def perform(self, entry: Entry) -> None:
        """Note an operation and carry it out; if workers are lost meanwhile, their successors carry it out.

        Raises:
            Exception: The cause of a failure that is not repaired.
        """
        with self.lock:
            failures = self.failures
            self.note(entry)
            try:
                entry.run()
            except Exception as error:
                failed = error
            else:
                return
        self.overcome(failures, failed)

    def note(self, entry: Entry) -> None:
        """Add an operation that has been carried out, or is about to be."""
        self._entries.append(entry)
        self.size_bytes += entry.size_bytes

    def overcome(self, failures: Failures, error: Exception) -> None:
        """Return when the session in which an operation has failed is followed by another one.

        Args:
            failures: Those of the session.
            error: How the operation has failed.

        Raises:
            Exception: The cause of the failures, if they are not repaired.
        """
        failures.add(error, consequence=is_consequence(error))
        failures.settle()

    def mark(self, number: int) -> None:
        """Note that a snapshot has been ordered."""
        self._marks[number] = self._num_forgotten + len(self._entries)

    def forget_before(self, number: int) -> None:
        """Drop what was before a snapshot that every worker has whole."""
        mark = self._marks[number]
        while self._num_forgotten < mark:
            self.size_bytes -= self._entries.popleft().size_bytes
            self._num_forgotten += 1
        self._marks = {other: place for other, place in self._marks.items() if place >= mark}

    def can_begin_at(self, number: int) -> bool:
        """Return whether the log has all since a snapshot, and every question asked before it has been answered."""
        if number not in self._marks:
            return False
        before = self._marks[number] - self._num_forgotten
        return all(getattr(entry, "is_answered", True) for _, entry in zip(range(before), self._entries, strict=False))

    def run_again(self, number: int) -> int:
        """Go through everything since a snapshot once more; return how many operations that were."""
        entries = list(self._entries)[self._marks[number] - self._num_forgotten :]
        for entry in entries:
            entry.run_again()
        return len(entries)


def copied(value: Any) -> tuple[Any, int]:
    """Return a value with copies of its tensors, on the CPU, and their bytes."""
    leaves, spec = leaves_of(value)
    copies, size_bytes = [], 0
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            size_bytes += leaf.nbytes
            leaf = leaf.detach().to("cpu", copy=True).requires_grad_(leaf.requires_grad)
        copies.append(leaf)
    return with_leaves(copies, spec), size_bytes


def fingerprint(value: Any) -> tuple[Any, ...]:
    """Return what is different for values that differ in one bit: shapes, dtypes, and sums of the bytes as integers."""
    return tuple((tensor.shape, tensor.dtype, _checksum(tensor.detach())) for tensor in tensors_of(value))


def _checksum(tensor: Tensor) -> int:
    flat = tensor.cpu().reshape(-1)
    if flat.nbytes % 8 == 0 and flat.storage_offset() * flat.itemsize % 8 == 0:
        return int(flat.view(torch.int64).sum())
    single = flat.view(torch.uint8)
    whole = len(single) // 8 * 8
    return int(single[:whole].clone().view(torch.int64).sum()) + int(single[whole:].sum())
