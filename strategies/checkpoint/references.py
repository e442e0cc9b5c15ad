"""References to tensors in a checkpoint, for processes that each read the tensors of their own layers.

The values of a model that no process can hold are read by the processes that get its layers. The driver knows shapes,
and where each tensor is: in a file at an offset, or in a sharded directory under a key.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from strategies.checkpoint.store import SHARDED_KEYS, read_tensors
from strategies.common.torch_compat import fake_tensors, num_changes, offset_in_file, storage_key
from strategies.common.transformers_compat import read_safetensors
from strategies.common.trees import flat
from strategies.pipeline.construction.stored import FileReference, Stored


def file_state(path: Path) -> tuple[int, int]:
    """Return what differs after a file has been replaced: its size, and when it was written."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _check_unchanged(path: Path, state: tuple[int, int]) -> None:
    if file_state(path) != state:
        raise RuntimeError(f"the file {path} has been replaced since its tensors were found in it; start again")


@dataclass(frozen=True)
class InFile(Stored):
    """A tensor in a file that ``torch.save`` has written.

    Attributes:
        path: The file.
        start: Offset of the tensor's storage in the file, in bytes.
        num_bytes: Size of the storage.
        state: What tells whether the file has been replaced.
        dtype, size, stride, offset: The geometry of the tensor.
    """

    path: Path
    state: tuple[int, int]
    start: int
    num_bytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def read(self) -> Tensor:
        """Return the values."""
        _check_unchanged(self.path, self.state)
        storage = UntypedStorage(self.num_bytes)
        with self.path.open("rb") as file:
            file.seek(self.start)
            data: Any = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            if file.readinto(data) != self.num_bytes:
                raise RuntimeError(f"the checkpoint {self.path} has been cut off since it was opened")
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class InShards(Stored):
    """A tensor of a sharded checkpoint.

    Attributes:
        shards: The directory of the values.
        key: The name of the tensor in it.
        dtype, size: Those of the tensor.
    """

    shards: Path
    key: str
    dtype: torch.dtype
    size: tuple[int, ...]

    def read(self) -> Tensor:
        """Return the values."""
        like = torch.empty(self.size, dtype=self.dtype, device="meta")
        return read_tensors(self.shards, {self.key: like})[self.key]


@dataclass(frozen=True)
class InSafetensors(Stored):
    """A tensor in a file of ``safetensors``.

    Attributes:
        path: The file.
        state: What tells whether the file has been replaced.
        key: The name of the tensor in it.
    """

    path: Path
    state: tuple[int, int]
    key: str

    @classmethod
    def of(cls, path: str, key: str) -> "InSafetensors":
        """Return a reference to a file as it is now."""
        return cls(Path(path).absolute(), file_state(Path(path)), key)

    def read(self) -> Tensor:
        """Return the values."""
        _check_unchanged(self.path, self.state)
        return read_safetensors(self.path, self.key)


def references_in_file(
    path: Path, checkpoint: Mapping[str, Any], weights_only: bool | None
) -> dict[int, FileReference]:
    """Return references to the weights and the optimizer states of a checkpoint, by the number of their storage.

    Args:
        path: A file that ``torch.save`` has written.
        checkpoint: What ``torch.load`` returned for it.
        weights_only: As for ``torch.load``.
    """
    path = path.absolute()
    state = file_state(path)
    with fake_tensors():
        offsets = torch.load(path, map_location="cpu", weights_only=weights_only)
    places = flat({key: offsets.get(key) for key in SHARDED_KEYS})
    found: dict[int, FileReference] = {}
    for name, tensor in flat({key: checkpoint.get(key) for key in SHARDED_KEYS}).items():
        start, storage = offset_in_file(places[name]), tensor.untyped_storage()
        if start is None:
            continue

        def refer(own: Tensor, start: int = start, num_bytes: int = storage.nbytes()) -> InFile:
            geometry = own.dtype, tuple(own.shape), own.stride(), int(own.storage_offset())
            return InFile(path, state, start, num_bytes, *geometry)

        found[storage_key(tensor)] = FileReference(tensor, refer, num_changes(tensor))
    return found


def references_in_shards(shards: Path, state: Mapping[str, Any]) -> dict[int, FileReference]:
    """Return references to the tensors of a state dict that are on the ``meta`` device, by their storage's number."""
    found: dict[int, FileReference] = {}
    for key, tensor in flat(state, "state_dict").items():
        if tensor.is_meta:

            def refer(own: Tensor, key: str = key) -> InShards:
                return InShards(shards, key, own.dtype, tuple(own.shape))

            found[storage_key(tensor)] = FileReference(tensor, refer, num_changes(tensor))
    return found
