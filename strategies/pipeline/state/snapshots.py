"""Snapshots of the workers of a pipeline in memory, from which new workers start when workers are lost.

    number          0     3     6     9          every worker keeps the last two snapshots, in two places
    place           0     1     0     1

Each worker writes its state into slots that the driver holds (:mod:`strategies.pipeline.transport.slots`), so that the
values outlive the worker. A snapshot can be used when it is complete in every worker. Snapshot ``n + 1`` is written
only when snapshot ``n`` is complete in every worker, and never overwrites it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from strategies.pipeline.transport.slots import NUM_SLOTS, Slot, have_slots


def check_snapshots(*, devices: Sequence[torch.device], num_hosts: int = 1, are_replaced: bool = True) -> None:
    """Check that workers can take snapshots, from which lost workers are replaced and steps are verified.

    Args:
        devices: The device of each stage.
        num_hosts: Number of hosts with stages.
        are_replaced: Whether new workers can replace lost workers.

    Raises:
        ValueError: If lost workers cannot be replaced.
    """
    others = [device for device in devices if device.type != "cpu"]
    reasons = {
        f"snapshots are in memory of the driver's host, but the stages are on {num_hosts} hosts": num_hosts > 1,
        "ranks do not replace workers in this run, because its first Trainer has no max_restarts": not are_replaced,
        f"snapshots are copies of stages on CPUs, but one is on {', '.join(map(str, others[:1]))}": bool(others),
        "snapshots need files in memory (memfd_create), which only Linux has": not have_slots(),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"{reason}. Leave recovery out")


@dataclass(frozen=True)
class Whole:
    """A snapshot that is complete in every worker.

    Attributes:
        number: The number of the snapshot.
        place: The slot of each worker that has the snapshot, 0 or 1.
    """

    number: int
    place: int


class Snapshots:
    """The last two snapshots of the workers of a pipeline.

    Args:
        num_workers: Number of workers.
    """

    def __init__(self, num_workers: int) -> None:
        self.slots = [[Slot.created(f"{i}-{place}") for i in range(num_workers)] for place in range(NUM_SLOTS)]
        """At each place, the slot of each worker."""
        self._ordered: Whole | None = None

    @property
    def size_bytes(self) -> int:
        """The memory of all slots, in bytes."""
        return sum(slot.size_bytes for slots in self.slots for slot in slots)

    @property
    def is_under_way(self) -> bool:
        """Whether a worker may still be writing the last snapshot."""
        return self._ordered is not None and self._number_at(self._ordered.place) != self._ordered.number

    def order(self) -> Whole:
        """Return the number of the next snapshot, and the place in which workers must write it."""
        number = 0 if self._ordered is None else self._ordered.number + 1
        last = self.last()
        self._ordered = Whole(number, 0 if last is None else 1 - last.place)
        return self._ordered

    def whole(self) -> list[Whole]:
        """Return the snapshots that are complete in every worker, in order."""
        found = [(self._number_at(place), place) for place in range(NUM_SLOTS)]
        whole = [Whole(number, place) for number, place in found if number is not None]
        return sorted(whole, key=lambda each: each.number)

    def last(self) -> Whole | None:
        """Return the last snapshot that is complete in every worker; ``None`` if there is none."""
        return next(reversed(self.whole()), None)

    def close(self) -> None:
        """Release the memory. Call this when all workers have ended."""
        for slots in self.slots:
            for slot in slots:
                slot.close()

    def _number_at(self, place: int) -> int | None:
        """The number of the snapshot that all workers have at a place; ``None`` if there is none."""
        numbers = {slot.number for slot in self.slots[place]}
        return numbers.pop() if len(numbers) == 1 else None
