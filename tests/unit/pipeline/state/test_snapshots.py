"""The places of snapshots, and what has none."""

import re
from typing import Any

import pytest
import torch

from strategies.pipeline.state.snapshots import Snapshot, Snapshots, check_snapshots
from strategies.pipeline.transport.slots import SlotAddress

CPU = torch.device("cpu")


def test_a_snapshot_never_takes_the_place_of_the_last_that_is_complete() -> None:
    slots = [[SlotAddress(f"worker {i}, place {place}", 0) for place in range(2)] for i in range(3)]
    snapshots = Snapshots(slots)
    first = snapshots.order(None)
    assert first == Snapshot(0, 0) and snapshots.addresses(first) == [places[0] for places in slots]
    second = snapshots.order(first)
    assert second == Snapshot(1, 1) and snapshots.addresses(second) == [places[1] for places in slots]
    torn = snapshots.order(second)
    assert torn == Snapshot(2, 0) and snapshots.ordered == [second, torn]
    assert snapshots.order(second) == Snapshot(3, 0)
    assert snapshots.ordered == [second, Snapshot(3, 0)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"are_replaced": False}, "its first Trainer has no max_restarts"),
        ({"devices": [CPU, torch.device("cuda", 1)]}, "but one is on cuda:1"),
    ],
)
def test_what_has_no_snapshots_is_refused(changed: dict[str, Any], message: str) -> None:
    fine: dict[str, Any] = {"devices": [CPU, CPU]}
    check_snapshots(**fine)
    with pytest.raises(ValueError, match=f"{re.escape(message)}.*Leave recovery out"):
        check_snapshots(**{**fine, **changed})


def test_systems_without_files_in_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.pipeline.state.snapshots.have_slots", lambda: False)
    with pytest.raises(ValueError, match="which only Linux has"):
        check_snapshots(devices=[CPU])
