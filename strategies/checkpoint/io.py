"""How Relay's strategies write a checkpoint, where the user has not chosen a ``CheckpointIO``: atomically."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO

from strategies.checkpoint import shards
from strategies.checkpoint.atomic import remove, replacing


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's, but a local file is replaced in one step, when its content is on the disk.

    The checkpoint goes to the file as it is; Lightning's own first makes two copies of it in memory. Other filesystems
    (``s3://``, ...) are left to Lightning.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Any, storage_options: Any | None = None) -> None:
        """Write ``checkpoint`` to ``path``, and return when it is there for good."""
        local = local_path(path)
        if storage_options is not None or local is None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with replacing(local) as file:
            torch.save(checkpoint, file)
            if shards.is_sharded(local):  # no file can take the place of a directory in one step
                file.flush()
                os.fsync(file.fileno())
                remove(local)

    def load_checkpoint(
        self,
        path: str | Any,
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint: tensors and plain types only, unless ``weights_only`` says otherwise."""
        return super().load_checkpoint(path, map_location, careful(path, weights_only))


def careful(path: str | Any, weights_only: bool | None) -> bool | None:
    """``weights_only`` for Lightning, which by default takes whatever comes from the web."""
    return True if weights_only is None and str(path).startswith("http") else weights_only


def local_path(path: str | Any) -> Path | None:
    """A path or URL as a path on this machine; ``None`` if it is not on it."""
    filesystem, stripped = url_to_fs(str(path))
    return Path(stripped) if isinstance(filesystem, LocalFileSystem) else None
