"""A recording of the actions of every process of a pipeline in one batch."""

import time
from collections.abc import Callable, Sequence

from strategies.pipeline.stage.records import ProcessRecords


class BatchRecording:
    """A recording of the actions of every process of a pipeline in one batch, until it is stopped.

    Args:
        batch: The number of the batch.
        balance: The balance of the pipeline.
        stop: Stops recording in all processes. Returns a function that waits for the records and returns those of each
            process, with the driver's last.

    Attributes:
        begin: When the current processes began to record. Later than the start of the recording if layers have moved.
        balance: The balance of the pipeline at that time.
    """

    def __init__(
        self, batch: int, balance: Sequence[int], stop: Callable[[], Callable[[], list[ProcessRecords]]]
    ) -> None:
        self.batch, self._stop = batch, stop
        self._answers: Callable[[], list[ProcessRecords]] | None = None
        self._records: list[ProcessRecords] | None = None
        self._is_lost = False
        self.begin_again(balance)

    def begin_again(self, balance: Sequence[int]) -> None:
        """Continue the recording with new processes, because the previous processes have ended."""
        self.begin, self.balance = time.perf_counter(), balance

    @property
    def is_over(self) -> bool:
        """Whether the recording has been stopped."""
        return self._answers is not None

    @property
    def is_taken(self) -> bool:
        """Whether the records have been received or lost."""
        return self._is_lost or self._records is not None

    def stop(self) -> None:
        """Stop recording. Does not wait for the workers, which may still be busy. Can be called several times."""
        if self._answers is None:
            self._answers = self._stop()

    def take(self) -> list[ProcessRecords] | None:
        """Wait for the records of a stopped recording.

        Returns:
            The records of each process, with the driver's last; ``None`` if a worker was lost with its records.
        """
        assert self._answers is not None
        if self._records is None and not self._is_lost:
            records = self._answers()
            if not self._is_lost:  # it may have become lost above
                self._records = records
        return self._records

    def lose(self) -> None:
        """Mark the records as lost if they have not been taken: a worker has ended with its records.

        The other processes go on recording until :meth:`stop`.
        """
        self._is_lost = self._records is None
