"""The slots of snapshots, and what has none."""

import pytest

from strategies.pipeline.state.snapshots import Snapshot, Snapshots, check_snapshots
from strategies.pipeline.transport.slots import SlotAddress


def test_a_snapshot_never_takes_the_slot_of_the_last_that_is_complete() -> None:
    slots = [[SlotAddress(f"worker {i}, slot {slot}", 0) for slot in range(2)] for i in range(3)]
    snapshots = Snapshots(slots)
    first = snapshots.order(None, 0)
    assert first == Snapshot(0, 0, 0) and snapshots.addresses(first) == [own[0] for own in slots]
    second = snapshots.order(first, 1)
    assert second == Snapshot(1, 1, 1) and snapshots.addresses(second) == [own[1] for own in slots]
    torn = snapshots.order(second, 2)
    assert torn == Snapshot(2, 0, 2) and snapshots.ordered == [second, torn]
    assert snapshots.order(second, 3) == Snapshot(3, 0, 3)
    assert snapshots.ordered == [second, Snapshot(3, 0, 3)]


def test_a_snapshot_that_one_replica_takes_alone_belongs_to_the_period_of_the_last() -> None:
    snapshots = Snapshots([[SlotAddress("", 0), SlotAddress("", 1)]])
    regular = snapshots.order(None, 4)
    extra = snapshots.order(regular, 5, is_extra=True)
    assert [regular, extra, snapshots.order(extra, 6)] == [Snapshot(0, 0, 4), Snapshot(1, 1, 4), Snapshot(2, 0, 6)]


def test_ranks_that_do_not_replace_workers_are_refused() -> None:
    check_snapshots()
    with pytest.raises(ValueError, match=r"its first Trainer has no max_restarts.*Leave recovery out"):
        check_snapshots(are_replaced=False)


def test_systems_without_files_in_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.pipeline.state.snapshots.have_slots", lambda: False)
    with pytest.raises(ValueError, match="which only Linux has"):
        check_snapshots()
