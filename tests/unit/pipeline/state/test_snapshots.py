"""Which snapshot of the workers can be used."""

import re
from typing import Any

import pytest
import torch

from strategies.pipeline.state.snapshots import Snapshots, Whole, check_snapshots

CPU = torch.device("cpu")


def written(snapshots: Snapshots, whole: Whole, *workers: int) -> None:
    for i in workers:
        snapshots.slots[whole.place][i].write(whole.number, b"", [])


def test_the_snapshot_to_use_is_the_last_that_all_have_and_is_never_written_over() -> None:
    snapshots = Snapshots(2)
    assert snapshots.last() is None and not snapshots.is_under_way
    for number in range(3):
        whole = snapshots.order()
        assert whole.number == number and snapshots.is_under_way
        written(snapshots, whole, 0)
        assert snapshots.is_under_way and snapshots.last() == (Whole(number - 1, 1 - whole.place) if number else None)
        written(snapshots, whole, 1)
        assert not snapshots.is_under_way and snapshots.last() == whole
    torn = snapshots.order()
    written(snapshots, torn, 1)
    assert snapshots.last() == whole == Whole(2, 1 - torn.place)
    assert snapshots.order() == Whole(4, torn.place)  # the place of the torn one, again
    assert snapshots.size_bytes > 0
    snapshots.close()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_hosts": 2}, "snapshots are in memory of the driver's host, but the stages are on 2 hosts"),
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
