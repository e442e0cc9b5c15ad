"""Snapshots of the workers of a pipeline in memory, from which new workers start when workers are lost.

    number          0     3     6     9          every worker keeps the last two snapshots, in two slots
    slot            0     1     0     1

Each worker writes its state into slots (:mod:`strategies.pipeline.transport.slots`). Another process of its host holds
the slots and outlives the worker: the driver, or the supervisor of a rank. A snapshot can be used when it is complete
in every worker. Snapshot ``n + 1`` is written only when snapshot ``n`` is complete in every worker, and never
overwrites it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from strategies.pipeline.transport.slots import SlotAddress, have_slots


def check_snapshots(*, are_replaced: bool = True) -> None:
    """Check that workers can take snapshots, from which lost workers are replaced and steps are verified.

    Args:
        are_replaced: Whether new workers can replace lost workers.

    Raises:
        ValueError: If lost workers cannot be replaced.
    """
    reasons = {
        "ranks do not replace workers in this run, because its first Trainer has no max_restarts": not are_replaced,
        "snapshots need files in memory (memfd_create), which only Linux has": not have_slots(),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"{reason}. Leave recovery out")


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that has been ordered. It is complete when every worker has answered.

    Attributes:
        number: The number of the snapshot.
        slot: The slot of each worker that has the snapshot, 0 or 1.
        period: The number of points before it that all replicas pass: optimizer steps, verifications, and loading of
            optimizer states. An extra snapshot has the period of the last regular one. Replicas that start from
            snapshots of the same period continue together.
    """

    number: int
    slot: int
    period: int


class Snapshots:
    """The last two snapshots of the workers of a pipeline.

    Args:
        addresses: The two slots of each worker.
    """

    def __init__(self, addresses: Sequence[Sequence[SlotAddress]]) -> None:
        self._addresses = addresses
        self._number = self._period = 0
        self.ordered: list[Snapshot] = []
        """The snapshots that have been ordered and not written over, in order."""

    def order(self, last: Snapshot | None, period: int, *, is_extra: bool = False) -> Snapshot:
        """Return the number of the next snapshot, and the slot into which workers must write it.

        Args:
            last: The last snapshot from which workers can start, whose slot is kept; ``None`` if there is none.
            period: The period of a regular snapshot.
            is_extra: Whether replicas that are not in step with this pipeline do not take this snapshot.
        """
        self._period = self._period if is_extra else period
        ordered = Snapshot(self._number, 0 if last is None else 1 - last.slot, self._period)
        self._number += 1
        self.ordered = [*(each for each in self.ordered if each.slot != ordered.slot), ordered]
        return ordered

    def addresses(self, snapshot: Snapshot) -> list[SlotAddress]:
        """Return the slot of each worker for a snapshot."""
        return [slots[snapshot.slot] for slots in self._addresses]
