"""The drivers of several pipelines, which replace their workers together.

    driver 0   ✗ a worker is lost ── announces ─────────── agrees ── new workers, the log again
                                        │                    │
    driver 1                       is notified ─ ends its ── agrees ── new workers, the log again
                                                 workers

The same stages of all pipelines are connected, so a worker cannot continue when the worker of another pipeline is
replaced. Collective operations between drivers are not disturbed.

Pipelines that divide layers (``tensor_parallel_size``) or parameters (``zero_stage=3``) are *in step*: their stages
exchange values in every pass, so they run the same passes, take all snapshots at the same points, and return to the
same one. Replicas that are not in step meet when they average gradients, and may take further snapshots between two
such meetings.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import distributed as dist

from strategies.common.errors import WorkerLost
from strategies.launch.rounds import MemberGone, Rounds
from strategies.pipeline.control.client import Failures
from strategies.pipeline.state.snapshots import Snapshot

_LOOK_SECONDS = 0.03

NUM_FLAGS = 2
"""The number of flags in a message between drivers. gloo ends a process if messages of different sizes meet."""


@dataclass(frozen=True)
class InStep:
    """The pipelines that divide layers or parameters with this one. They run the same passes.

    Attributes:
        ranks: Their numbers, with the number of this pipeline.
        any: Collective over their drivers: returns, for each flag, whether a driver has passed ``True``. Takes up to
            :data:`NUM_FLAGS` flags.
    """

    ranks: Collection[int]
    any: Callable[[Sequence[bool]], list[bool]]


class Together:
    """Connects this driver to the drivers of the other pipelines, from :meth:`start` to :meth:`end`.

    Args:
        rounds: The store through which the drivers agree.
        failures: The failures of the present session. The loss of a worker in another pipeline is added to them.
        in_step: The number of this pipeline and of the pipelines that are in step with it.
    """

    def __init__(self, rounds: Rounds, failures: Failures, in_step: Collection[int]) -> None:
        self._rounds, self._failures, self._has_heard = rounds, failures, False
        self._in_step = in_step
        self.has_others = len(in_step) < rounds.size
        """Whether there are pipelines that are not in step with this one."""
        self.reported = -1
        """The period of the newest snapshot from which this pipeline can start, for the other drivers to know.

        -1 if there is none since the workers have been replaced.
        """
        self.agreed: Snapshot | None = None
        """The snapshot from which the workers have started last; ``None`` if they have not been replaced."""
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._listen, name="relay-together", daemon=True)

    def start(self) -> None:
        """Listen to the other drivers from now on."""
        self._thread.start()

    @property
    def round(self) -> int:
        """The number of times that the pipelines have replaced their workers."""
        return self._rounds.number

    def all_have(self, period: int) -> bool:
        """Return whether each pipeline is known to be able to start from a snapshot of this period."""
        with self._lock, suppress(dist.DistError):  # rank 0 has ended
            return self._rounds.all_have(period)
        return False

    def agree(self, lost: str, snapshots: Sequence[Snapshot], before: Failures, failures: Failures) -> Snapshot:
        """Wait until all drivers are about to replace their workers.

        Args:
            lost: Which worker was lost, and how.
            snapshots: The snapshots from which this pipeline can start, in order.
            before: The failures of the session that is over. The wait ends when one of these is raised to the user.
            failures: The failures of the session that begins.

        Returns:
            The last of these snapshots from which all pipelines can continue together.

        Raises:
            RuntimeError: If another driver has ended its run, or if the pipelines have no snapshot in common.
        """
        rank, kind = self._rounds.rank, self._rounds.kind
        with self._lock:
            self._rounds.announce(f"in {kind} {rank}: {lost}")
            own = [(each.period, each.number) for each in snapshots]
            told = self._rounds.tell(own, lambda: before.raised or self._ended.is_set())
            self._failures, self._has_heard, self.reported = failures, False, -1
        chosen = common_snapshot(told, self._in_step)
        if chosen is None:
            raise RuntimeError(
                f"the {kind}s have no snapshots of the same step. Perhaps some of them could take none, because an "
                "output of the model that was computed with gradients is kept, and no backward pass has used it"
            )
        self.agreed = next(each for each in snapshots if (each.period, each.number) == chosen)
        return self.agreed

    def have_returned_to(self, snapshot: Snapshot, *, is_extra: bool) -> bool:
        """Return whether a pipeline may have started again from this snapshot, or from a later one.

        Args:
            snapshot: The snapshot.
            is_extra: Whether the question is for the pipelines in step with this one only. They have the same numbers.
        """
        if self.agreed is None or (is_extra and len(self._in_step) == 1):
            return False
        if is_extra or not self.has_others:
            return self.agreed.number >= snapshot.number
        return self.agreed.period >= snapshot.period

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
        told = -1, -1
        while not self._ended.wait(_LOOK_SECONDS):
            with self._lock:
                try:
                    if self.reported >= 0 and (self.round, self.reported) > told:
                        told = self.round, self.reported
                        self._rounds.report(self.reported)
                    why = None if self._has_heard else self._rounds.announced()
                except dist.DistError:  # rank 0 has ended, and this process is about to
                    return
                if why is not None:
                    self._has_heard = True
                    self._failures.add(WorkerLost(why), consequence=False)


def common_snapshot(told: Sequence[Sequence[Sequence[int]]], in_step: Collection[int]) -> tuple[int, int] | None:
    """Return the snapshot from which a pipeline continues together with all others; ``None`` if there is none.

    Args:
        told: For each pipeline, the period and the number of each snapshot from which it can start.
        in_step: The pipelines that run the same passes, with this one. They start from the same snapshot.
    """
    known = [{(period, number) for period, number in own} for own in told]
    periods = set.intersection(*({period for period, _ in own} for own in known))
    shared = set.intersection(*(known[rank] for rank in in_step))
    return max((each for each in shared if each[0] == max(periods, default=None)), default=None)
