"""Slots: files in memory, each with one snapshot, which outlive the process that writes them.

    holder: creates the file, keeps it open        writer: opens it by its address, maps and writes it
    header: number of the snapshot, or none │ number of pickled bytes │ pickled bytes │ storages, one after another

The kernel keeps the values if the writer is killed, and frees them when both the holder and the writer have ended, for
any reason. While a snapshot is being written, its number is *none*, so an incomplete snapshot is never read. A process
has two slots (:data:`NUM_SLOTS`), which it writes alternately.
"""

import mmap
import os
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from strategies.pipeline.transport.storages import as_bytes

NUM_SLOTS = 2
"""Two, so that one slot is complete even if a process is killed while it writes the other slot."""

_HEADER = struct.Struct("<QQ")
_NUMBER = struct.Struct("<Q")
_NO_NUMBER = 0
"""The header of an incomplete snapshot. The header of a complete snapshot is its number plus one."""

_ALIGNED_BYTES = 64

_MAP_ALL_PAGES = getattr(mmap, "MAP_POPULATE", 0)  # only on Linux, as slots


def have_slots() -> bool:
    """Return whether this system has files in memory that another process can open."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


@dataclass(frozen=True)
class SlotAddress:
    """The address by which another process of the same user finds a slot.

    Attributes:
        path: The path of the file, by a file descriptor of its holder.
        inode: The inode of the file, because the holder may have closed it and reused the descriptor.
    """

    path: str
    inode: int


class Slot:
    """A file in memory with one snapshot.

    Args:
        file: The file descriptor, which this object closes.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._map: mmap.mmap | None = None

    @classmethod
    def created(cls, name: str) -> "Slot":
        """Create a slot that this process holds.

        Args:
            name: The name that tools such as ``lsof`` show.
        """
        slot = cls(os.memfd_create(f"relay-snapshot-{name}", os.MFD_CLOEXEC))
        os.ftruncate(slot._file, _HEADER.size)
        return slot

    @classmethod
    def opened(cls, address: SlotAddress) -> "Slot":
        """Open the slot of another process.

        Raises:
            RuntimeError: If the holder has closed the slot.
            OSError: If this process may not open the slot.
        """
        slot = cls(os.open(address.path, os.O_RDWR | os.O_CLOEXEC))
        if os.fstat(slot._file).st_ino != address.inode:
            slot.close()
            raise RuntimeError(f"{address.path} is no longer the slot of a snapshot: the driver has closed the slot")
        return slot

    @property
    def address(self) -> SlotAddress:
        """The address for other processes, valid as long as this process holds the slot."""
        return SlotAddress(f"/proc/{os.getpid()}/fd/{self._file}", os.fstat(self._file).st_ino)

    @property
    def size_bytes(self) -> int:
        """The memory of the slot, in bytes."""
        return os.fstat(self._file).st_size

    @property
    def number(self) -> int | None:
        """The number of the complete snapshot in the slot; ``None`` if there is none."""
        (number,) = _NUMBER.unpack(os.pread(self._file, _NUMBER.size, 0))
        return None if number == _NO_NUMBER else number - 1

    def forget(self) -> None:
        """Mark the snapshot as incomplete."""
        os.pwrite(self._file, _NUMBER.pack(_NO_NUMBER), 0)

    def write(self, number: int, blob: bytes, storages: Sequence[UntypedStorage]) -> None:
        """Replace the snapshot. If this raises, or if the process is killed, the slot has no snapshot.

        Args:
            number: The number of the snapshot, at least 0.
            blob: Pickled bytes.
            storages: The values that are not in ``blob``.

        Raises:
            OSError: If the file may not have this size.
        """
        self.forget()
        places, end = _places(len(blob), [storage.nbytes() for storage in storages])
        if end > self.size_bytes:
            self._grow(end)
        mapped = self._mapped()
        mapped[_HEADER.size : _HEADER.size + len(blob)] = blob
        _HEADER.pack_into(mapped, 0, _NO_NUMBER, len(blob))
        for place, storage in zip(places, storages, strict=True):
            if storage.nbytes():
                _bytes_at(mapped, place, storage.nbytes()).copy_(as_bytes(storage))
        _NUMBER.pack_into(mapped, 0, number + 1)

    def read_blob(self, number: int) -> bytes:
        """Return the pickled bytes of a snapshot.

        Raises:
            RuntimeError: If the slot does not have this snapshot completely.
        """
        if self.number != number:
            raise RuntimeError(f"the slot has snapshot {self.number}, not {number}")
        mapped = self._mapped()
        _, length = _HEADER.unpack_from(mapped, 0)
        return mapped[_HEADER.size : _HEADER.size + length]

    def read_storages(self, storages: Sequence[UntypedStorage]) -> None:
        """Copy the values that are not in the pickled bytes to storages of the same sizes, in the same order."""
        mapped = self._mapped()
        _, length = _HEADER.unpack_from(mapped, 0)
        places, _ = _places(length, [storage.nbytes() for storage in storages])
        for place, storage in zip(places, storages, strict=True):
            if storage.nbytes():
                as_bytes(storage).copy_(_bytes_at(mapped, place, storage.nbytes()))

    def close(self) -> None:
        """Close the file. A second call has no effect. The memory is freed when no process has the file open."""
        file, self._file, self._map = self._file, -1, None
        if file >= 0:
            os.close(file)

    def _grow(self, size_bytes: int) -> None:
        try:
            os.ftruncate(self._file, size_bytes)
        except OSError as error:
            raise OSError(
                error.errno,
                f"a snapshot of {size_bytes} bytes cannot be kept in a file in memory ({error.strerror}); the limit on "
                "file sizes (ulimit -f) also applies to files in memory: raise it, or take no snapshots",
            ) from error

    def _mapped(self) -> mmap.mmap:
        size = self.size_bytes
        if self._map is None or len(self._map) < size:
            # all pages at once, in a third of the time of one after another; tensors keep an earlier map alive
            self._map = mmap.mmap(self._file, size, flags=mmap.MAP_SHARED | _MAP_ALL_PAGES)
        return self._map


def _places(length: int, sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offset of each storage, and the end of the last storage."""
    places, end = [], _HEADER.size + length
    for size in sizes:
        place = -(-end // _ALIGNED_BYTES) * _ALIGNED_BYTES
        places.append(place)
        end = place + size
    return places, end


def _bytes_at(mapped: mmap.mmap, place: int, size: int) -> Tensor:
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=place, count=size)
