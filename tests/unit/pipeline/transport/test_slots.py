"""Slots: what is read is what has been written whole, and memory is free when nobody holds it."""

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, UntypedStorage

from strategies.pipeline.transport.slots import Slot, SlotAddress, have_slots

pytestmark = pytest.mark.skipif(not have_slots(), reason="files in memory need Linux")


@pytest.fixture
def slot() -> Iterator[Slot]:
    own = Slot.created("test")
    yield own
    own.close()


def storages(*tensors: Tensor) -> list[UntypedStorage]:
    return [tensor.untyped_storage() for tensor in tensors]


def read(slot: Slot, number: int, *like: Tensor) -> tuple[bytes, list[Tensor]]:
    blob, own = slot.read_blob(number), [torch.full_like(tensor, 9) for tensor in like]
    slot.read_storages(storages(*own))
    return blob, own


GIVEN = torch.arange(7), torch.randn(33), torch.empty(0), torch.tensor([True])


def test_another_process_finds_it_by_its_address(slot: Slot) -> None:
    writer = Slot.opened(slot.address)
    writer.write(0, b"pickle", storages(*GIVEN))
    blob, own = read(slot, 0, *GIVEN)
    assert blob == b"pickle" and all(map(torch.equal, own, GIVEN))
    writer.write(3, b"", storages(*(2 * tensor for tensor in GIVEN[:2])))
    blob, own = read(slot, 3, *GIVEN[:2])
    assert blob == b"" and all(torch.equal(mine, 2 * given) for mine, given in zip(own, GIVEN[:2], strict=True))
    assert (slot.number, writer.number) == (3, 3)
    writer.close()
    writer.close()


def test_a_larger_snapshot_grows_the_slot_and_a_smaller_one_does_not_shrink_it(slot: Slot) -> None:
    writer = Slot.opened(slot.address)
    sizes = []
    for number, length in enumerate((10, 100_000, 1000, 200_000)):
        values = torch.full((length,), float(number))
        writer.write(number, b"x" * length, storages(values))
        blob, (own,) = read(slot, number, values)
        assert blob == b"x" * length and torch.equal(own, values)
        sizes.append(slot.size_bytes)
    assert sizes[0] < sizes[1] == sizes[2] < sizes[3] and sizes[3] >= 200_000 * 5
    writer.close()


def test_a_torn_snapshot_has_no_number(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer ends between two storages: the numbers before and of this one are both gone."""
    slot.write(4, b"old", storages(torch.ones(3)))
    written = 0

    def fails(storage: UntypedStorage) -> Any:
        nonlocal written
        if written:
            raise KeyboardInterrupt
        written += 1
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    monkeypatch.setattr("strategies.pipeline.transport.slots.as_bytes", fails)
    with pytest.raises(KeyboardInterrupt):
        slot.write(5, b"new", storages(torch.zeros(3), torch.zeros(3)))
    assert written == 1 and slot.number is None
    for number in (4, 5):
        with pytest.raises(RuntimeError, match=f"the slot has snapshot None, not {number}"):
            slot.read_blob(number)


def test_a_wrong_number_is_refused(slot: Slot) -> None:
    with pytest.raises(RuntimeError, match="has snapshot None, not 0"):
        slot.read_blob(0)
    slot.write(7, b"", [])
    with pytest.raises(RuntimeError, match="has snapshot 7, not 6"):
        slot.read_blob(6)
    slot.forget()
    with pytest.raises(RuntimeError, match="has snapshot None, not 7"):
        slot.read_blob(7)


def test_the_limit_of_the_size_of_files_is_named(slot: Slot) -> None:
    slot.write(0, b"small", [])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(
            OSError, match=r"a snapshot of \d+ bytes cannot be kept .*File too large.*ulimit -f"
        ) as raised:
            slot.write(1, b"large" * 100, [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG and slot.number is None
    slot.write(2, b"large" * 100, [])
    assert slot.read_blob(2) == b"large" * 100


def test_a_descriptor_that_its_holder_uses_for_another_file_is_refused(slot: Slot) -> None:
    gone = Slot.created("gone")
    address = gone.address
    gone.close()
    with pytest.raises(FileNotFoundError):
        Slot.opened(address)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="is no longer the slot of a snapshot: the driver has closed the slot"):
        Slot.opened(SlotAddress(slot.address.path, address.inode))
    assert set(os.listdir("/proc/self/fd")) == before


def test_its_file_has_no_name_in_a_folder_and_goes_with_its_last_descriptor() -> None:
    slot = Slot.created("memory")
    path = slot.address.path
    slot.write(0, b"", storages(torch.zeros(1000)))
    assert os.readlink(path).startswith("/memfd:relay-snapshot-memory")
    slot.close()
    assert not os.path.exists(path)
    maps = Path("/proc/self/maps").read_text()
    assert "relay-snapshot-memory" not in maps
