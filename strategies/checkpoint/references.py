"""References to tensors in a checkpoint, for processes that each read the tensors of their own layers.

If no process can hold the whole model, each process that gets layers reads their values itself. The driver knows only
the shapes and the place of each tensor: an offset in a file, or a key in a sharded directory.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from strategies.checkpoint.save_and_load import SHARDED_KEYS, read_tensors, sharded_tensors
from strategies.common.torch_compat import (
    fake_tensors,
    num_changes,
    offset_in_file,
    storage_key,
    tree_leaves,
    tree_map_only,
)
from strategies.common.transformers_compat import read_safetensors
from strategies.common.trees import flat, special_layout, with_tensors
from strategies.pipeline.construction.stored import FileReference, Stored, where_stored


def file_state(path: Path) -> tuple[int, int]:
    """Return the size and the modification time of a file, which differ after the file has been replaced."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _check_unchanged(path: Path, state: tuple[int, int]) -> None:
    if file_state(path) != state:
        raise RuntimeError(f"the file {path} has been replaced since its tensors were found in it; start again")


@dataclass(frozen=True)
class Geometry:
    """Which elements of a storage a tensor has."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Geometry":
        """Return the geometry of a tensor."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def on(self, storage: UntypedStorage) -> Tensor:
        """Return the tensor on a storage."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class InFile(Stored):
    """A tensor in a file that ``torch.save`` wrote.

    Attributes:
        path: The file.
        start: Offset of the tensor's storage in the file, in bytes.
        num_bytes: Size of the storage.
        state: Size and modification time of the file, to detect that it has been replaced.
        geometry: Which elements of the storage the tensor has.
    """

    path: Path
    state: tuple[int, int]
    start: int
    num_bytes: int
    geometry: Geometry

    def read(self) -> Tensor:
        """Return the values."""
        _check_unchanged(self.path, self.state)
        storage = UntypedStorage(self.num_bytes)
        with self.path.open("rb") as file:
            file.seek(self.start)
            data: Any = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            if file.readinto(data) != self.num_bytes:
                raise RuntimeError(f"the checkpoint {self.path} has been cut off since it was opened")
        return self.geometry.on(storage)


@dataclass(frozen=True)
class InShards(Stored):
    """A tensor of a sharded checkpoint, or a view of one.

    Attributes:
        shards: The directory of the values.
        key: The name of the tensor in it.
        dtype, size: The dtype and the size of the tensor in it.
        geometry: Which elements of the tensor in it the tensor has.
    """

    shards: Path
    key: str
    dtype: torch.dtype
    size: tuple[int, ...]
    geometry: Geometry

    def read(self) -> Tensor:
        """Return the values."""
        return read_together([self])[self]

    @property
    def like(self) -> Tensor:
        """The whole tensor, on the ``meta`` device."""
        return torch.empty(self.size, dtype=self.dtype, device="meta")

    @property
    def is_whole(self) -> bool:
        """Whether this is the whole tensor, with its rows in order."""
        return self.geometry == Geometry.of(self.like)


@dataclass(frozen=True)
class InSafetensors(Stored):
    """A tensor in a ``safetensors`` file.

    Attributes:
        path: The file.
        state: Size and modification time of the file, to detect that it has been replaced.
        key: The name of the tensor in it.
    """

    path: Path
    state: tuple[int, int]
    key: str

    @classmethod
    def of(cls, path: str, key: str) -> "InSafetensors":
        """Return a reference to a tensor in the current version of a file."""
        return cls(Path(path).absolute(), file_state(Path(path)), key)

    def read(self) -> Tensor:
        """Return the values."""
        _check_unchanged(self.path, self.state)
        return read_safetensors(self.path, self.key)


def references_in_file(
    path: Path, checkpoint: Mapping[str, Any], weights_only: bool | None
) -> dict[int, FileReference]:
    """Return references to the weights and the optimizer states of a checkpoint, keyed by the tensors' storages.

    A sparse tensor has no reference. Without memory, torch can load no other tensor of a special layout, so a
    checkpoint that has one, such as a quantized tensor, has no references at all; the driver then reads everything.

    Args:
        path: A file that ``torch.save`` wrote.
        checkpoint: What ``torch.load`` returned for this file.
        weights_only: As for ``torch.load``.
    """
    if {*map(special_layout, flat(checkpoint).values())} - {"", "sparse_coo"}:
        return {}
    path = path.absolute()
    state = file_state(path)
    with fake_tensors():
        offsets = torch.load(path, map_location="cpu", weights_only=weights_only)
    places = flat({key: offsets.get(key) for key in SHARDED_KEYS})
    found: dict[int, FileReference] = {}
    for name, tensor in flat({key: checkpoint.get(key) for key in SHARDED_KEYS}).items():
        if special_layout(tensor):
            continue
        start, storage = offset_in_file(places[name]), tensor.untyped_storage()
        if start is None:
            continue

        def refer(own: Tensor, start: int = start, num_bytes: int = storage.nbytes()) -> InFile:
            return InFile(path, state, start, num_bytes, Geometry.of(own))

        found[storage_key(tensor)] = FileReference(tensor, refer, num_changes(tensor))
    return found


def read_together(stored: Iterable[InShards]) -> dict[InShards, Tensor]:
    """Read tensors of sharded checkpoints. What two of them have in common is read once, and they share its memory."""
    stored = set(stored)
    wanted: dict[Path, dict[str, Tensor]] = {own.shards: {} for own in stored}
    for own in stored:
        wanted[own.shards][own.key] = own.like
    values = {shards: read_tensors(shards, tensors) for shards, tensors in wanted.items()}
    return {own: own.geometry.on(values[own.shards][own.key].untyped_storage()) for own in stored}


def with_values(tree: Any) -> Any:
    """Return the structure with the values of each :class:`InShards` in its place."""
    values = read_together(leaf for leaf in tree_leaves(tree) if isinstance(leaf, InShards))
    return tree_map_only(InShards, values.__getitem__, tree)


class Unread:
    """The tensors of a sharded checkpoint whose values have not been read. They are on the ``meta`` device.

    Args:
        shards: The directory of the values.
        checkpoint: The checkpoint, as it was read.

    Attributes:
        shards: The directory of the values.
        references: References to the tensors.
    """

    def __init__(self, shards: Path, checkpoint: Mapping[str, Any]) -> None:
        self.shards = shards
        self.references = references_in_shards(shards, checkpoint)

    def located(self, tree: Any, prefix: str) -> Any:
        """Return the structure with an :class:`InShards` in place of each tensor on the ``meta`` device.

        Args:
            tree: A part of the checkpoint, in which ``on_load_checkpoint`` may have moved tensors and made views.
            prefix: The path of the part.

        Raises:
            RuntimeError: If a tensor on the ``meta`` device is not from the checkpoint, or was changed in place. torch
                does not count changes through ``.data``.
        """
        found = {name: where_stored(t, self.references) for name, t in flat(tree, prefix).items() if t.is_meta}
        if names := [name for name, stored in found.items() if stored is None]:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise RuntimeError(
                "on_load_checkpoint or a hook of an optimizer has copied, converted or computed "
                f"{', '.join(names[:3])}{more} of the sharded checkpoint {self.shards.parent} from tensors that have "
                "no values yet: each process reads its part later, and until then the tensors are on the meta device. "
                "Rename or remove such tensors, take views of them, or put tensors with values in their place; or load "
                "a checkpoint in one file, see strategies.checkpoint.consolidate."
            )
        return with_tensors(tree, found, prefix)


def references_in_shards(shards: Path, checkpoint: Mapping[str, Any]) -> dict[int, FileReference]:
    """Return references to the tensors of a checkpoint on the ``meta`` device, keyed by the tensors' storages."""
    found: dict[int, FileReference] = {}
    for key, tensor in sharded_tensors(checkpoint).items():
        if tensor.is_meta:

            def refer(own: Tensor, key: str = key, whole: Tensor = tensor) -> InShards:
                return InShards(shards, key, whole.dtype, tuple(whole.shape), Geometry.of(own))

            found[storage_key(tensor)] = FileReference(tensor, refer, num_changes(tensor))
    return found
