"""Reads what torch.distributed.checkpoint notes of its files, without running anything that was put into it.

That is a pickle, which torch's own reader loads as such: it would call any function that the file names.
"""

import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

_NAMES = {
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


class ShardReader(FileSystemReader):
    """torch's, which takes nothing but what torch itself has written."""

    def __init__(self, shards: Path) -> None:
        super().__init__(shards)
        self._directory = shards

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What is in which file.

        Raises:
            RuntimeError: If there is anything else in it.
        """
        with open(self._directory / ".metadata", "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise RuntimeError(f"{self._directory / '.metadata'} holds a {type(metadata).__name__}, not metadata")
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("pathlib") and name == "PosixPath":  # where it was written; nobody needs it
            return PurePosixPath
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and (module, name) not in _NAMES:
            raise RuntimeError(
                f"the .metadata of a checkpoint names {module}.{name}, which torch does not write there; nothing has "
                "been loaded, and none of it should be trusted"
            )
        return super().find_class(module, name)
