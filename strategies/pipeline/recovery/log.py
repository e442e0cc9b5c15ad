"""The driver's log: what the driver has exchanged with its workers since the last snapshot, in order.

    snapshot 3 │ order: run │ value sent │ value received │ order: step │ ...
               └──────────── the driver repeats this with new workers, which have started from snapshot 3

Everything that changes a worker comes from the driver or from another worker. So new workers that start from the
snapshot reach the state of the lost workers when the driver repeats the log. The values that the new workers send to
the driver must equal the values that it received the first time. (The literature calls this sender-based message
logging with deterministic receivers.)
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from strategies.common.errors import is_consequence
from strategies.pipeline.control.client import Entry, Failures
from strategies.pipeline.stage.edges import leaves_of, with_leaves

WHY_DIFFERENT = (
    "Either one of its layers, or one before it, depends on something other than its input, its state and the seed of "
    "the pass (such as the time, or its own random generator), or one of the processes computes wrongly."
)


class NotRepeated(RuntimeError):
    """A worker has sent a different value the second time.

    Args:
        stage: The number of the stage.
        description: The stage in words, with its layers.
        number: The pass.
        microbatch: The micro-batch.
    """

    def __init__(self, stage: int, description: str, number: int, microbatch: int) -> None:
        super().__init__(
            f"{description} was run again after a worker was lost, and computed different values for micro-batch "
            f"{microbatch} of pass {number} than before. {WHY_DIFFERENT} The run cannot go on from there: start again "
            "from the last checkpoint."
        )
        self.stage, self.number, self.microbatch = stage, number, microbatch


class Log:
    """What the driver has exchanged with its workers since the last snapshot.

    Args:
        failures: The failures of the first session.
    """

    def __init__(self, failures: Failures) -> None:
        self.lock = threading.RLock()
        """Held while an operation starts, and while workers are replaced."""
        self.failures = failures
        """The failures of the session in which operations run."""
        self.size_bytes = 0
        self._entries: deque[Entry] = deque()
        self._num_forgotten = 0
        self._marks: dict[int, int] = {}
        """For each snapshot, how many entries were made before it."""
        self._last_meeting = -1
        """The number of the last entry in which stages may have exchanged values with other replicas."""

    def perform(self, entry: Entry, run: Callable[[], object]) -> None:
        """Note an operation and run it. If workers are lost while it runs, it is repeated with new workers.

        Args:
            entry: The operation.
            run: Runs the operation for the first time.

        Raises:
            Exception: The cause of a failure that is not repaired.
        """
        with self.lock:
            failures = self.failures
            self.note(entry)
            try:
                run()
            except Exception as error:
                failed = error
            else:
                return
        self.overcome(failures, failed)

    def note(self, entry: Entry) -> None:
        """Add an operation that has run or is about to run."""
        if entry.meets_replicas:
            self._last_meeting = self._num_forgotten + len(self._entries)
        self._entries.append(entry)
        self.size_bytes += entry.size_bytes

    def overcome(self, failures: Failures, error: Exception) -> None:
        """Wait until a new session follows the session in which an operation has failed.

        Args:
            failures: The failures of the session in which the operation has failed.
            error: The error of the operation.

        Raises:
            Exception: The cause of the failures, if they are not repaired.
        """
        failures.add(error, consequence=is_consequence(error))
        failures.settle()

    def mark(self, number: int) -> None:
        """Note that a snapshot has been ordered."""
        self._marks[number] = self._num_forgotten + len(self._entries)

    def forget_before(self, number: int) -> None:
        """Drop the entries before a snapshot that every worker has completed."""
        mark = self._marks[number]
        while self._num_forgotten < mark:
            self.size_bytes -= self._entries.popleft().size_bytes
            self._num_forgotten += 1
        self._marks = {other: place for other, place in self._marks.items() if place >= mark}

    def drop(self) -> None:
        """Drop everything: no earlier snapshot will be used."""
        self._num_forgotten += len(self._entries)
        self._entries.clear()
        self._marks.clear()
        self.size_bytes = 0

    def can_begin_at(self, number: int) -> bool:
        """Return whether the log is complete since a snapshot and every question before the snapshot is answered."""
        if number not in self._marks:
            return False
        before = self._marks[number] - self._num_forgotten
        return all(entry.is_answered for _, entry in zip(range(before), self._entries, strict=False))

    def has_met_since(self, number: int) -> bool:
        """Return whether stages may have exchanged values with other replicas since a snapshot."""
        return self._last_meeting >= self._marks[number]

    def run_again(self, number: int, differences: list[NotRepeated] | None = None) -> int:
        """Repeat all operations since a snapshot; return their number.

        Args:
            number: The number of the snapshot.
            differences: Gets an entry for each value that is different the second time.

        Raises:
            NotRepeated: At the first value that is different, if ``differences`` is ``None``.
        """
        entries = list(self._entries)[self._marks[number] - self._num_forgotten :]
        for entry in entries:
            try:
                entry.run_again()
            except NotRepeated as difference:
                if differences is None:
                    raise
                differences.append(difference)
        return len(entries)


def copied(value: Any) -> tuple[Any, int]:
    """Return a value with copies of its tensors on the CPU, and the size of the copies in bytes."""
    leaves, spec = leaves_of(value)
    copies, size_bytes = [], 0
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            size_bytes += leaf.nbytes
            leaf = leaf.detach().to("cpu", copy=True).requires_grad_(leaf.requires_grad)
        copies.append(leaf)
    return with_leaves(copies, spec), size_bytes
