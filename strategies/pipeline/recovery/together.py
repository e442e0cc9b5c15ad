"""The drivers of several replicas, which replace their workers together.

    driver 0   ✗ a worker is lost ── announces ─────────── agrees ── new workers, the log again
                                        │                    │
    driver 1                       hears of it ─ ends its ── agrees ── new workers, the log again
                                                 workers

The replicas of a stage are connected to each other, so a worker cannot continue when the worker of another replica is
replaced. Collective operations between drivers are not disturbed.
"""

import threading
from collections.abc import Sequence
from contextlib import suppress

from torch import distributed as dist

from strategies.common.errors import WorkerLost
from strategies.launch.rounds import MemberGone, Rounds
from strategies.pipeline.control.client import Failures

_LOOK_SECONDS = 0.03


class Together:
    """Connects this driver to the drivers of the other replicas, from :meth:`start` to :meth:`end`.

    Args:
        rounds: The store through which the drivers agree.
        failures: The failures of the present session. The loss of a worker in another replica is added to them.
    """

    def __init__(self, rounds: Rounds, failures: Failures) -> None:
        self._rounds, self._failures, self._has_heard = rounds, failures, False
        self.reported = -1
        """The period of the newest snapshot from which this pipeline can start, for the other drivers to know."""
        self.agreed = -1
        """The period on which the drivers have agreed last."""
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._listen, name="relay-replicas", daemon=True)

    def start(self) -> None:
        """Listen to the other drivers from now on."""
        self._thread.start()

    @property
    def round(self) -> int:
        """The number of times that the replicas have replaced their workers."""
        return self._rounds.number

    def all_have(self, period: int) -> bool:
        """Return whether each pipeline is known to be able to start from a snapshot of this period."""
        with self._lock, suppress(dist.DistError):  # rank 0 has ended
            return self._rounds.all_have(period)
        return False

    def agree(self, lost: str, periods: Sequence[int], before: Failures, failures: Failures) -> int:
        """Wait until all drivers are about to replace their workers.

        Args:
            lost: Which worker was lost, and how.
            periods: The periods of the snapshots from which this pipeline can start.
            before: The failures of the session that is over. The wait ends when one of these is raised to the user.
            failures: The failures of the session that begins.

        Returns:
            The last period of whose snapshots each replica has one.

        Raises:
            RuntimeError: If another driver has ended its run, or if the replicas have no snapshot in common.
        """
        with self._lock:
            self._rounds.announce(f"in replica {self._rounds.rank}: {lost}")
            period = self._rounds.agree(periods, lambda: before.raised or self._ended.is_set())
            self._failures, self._has_heard = failures, False
        if period is None:
            raise RuntimeError("the replicas have no snapshots of the same step")
        self.agreed = period
        return period

    def end_together(self, failures: Failures) -> None:
        """Wait until no driver needs its workers any more. Replace workers that are lost during the wait."""
        with suppress(MemberGone, dist.DistError):
            while not self._rounds.pass_gate(lambda: failures.any or self._has_heard):
                failures.settle()

    def give_up(self) -> None:
        """End a wait for other drivers."""
        self._ended.set()

    def end(self) -> None:
        """Disconnect from the other drivers, which cannot replace workers from now on."""
        self._ended.set()
        self._thread.join()
        with suppress(dist.DistError):  # rank 0 has ended
            self._rounds.leave()

    def _listen(self) -> None:
        told = -1
        while not self._ended.wait(_LOOK_SECONDS):
            with self._lock:
                try:
                    if self.reported > told:
                        told = self.reported
                        self._rounds.report(told)
                    why = None if self._has_heard else self._rounds.announced()
                except dist.DistError:  # rank 0 has ended, and this process is about to
                    return
                if why is not None:
                    self._has_heard = True
                    self._failures.add(WorkerLost(why), consequence=False)
