"""The two formats of a checkpoint, a file and a sharded directory: write them atomically and read them.

    FILE                       written by ``torch.save``

    DIRECTORY/meta.pt          the checkpoint; tensors of ``state_dict`` and ``optimizer_states`` are on ``meta``
    DIRECTORY/shards-.../      their values, written by ``torch.distributed.checkpoint``: one file per process

``meta.pt`` has the names, shapes and dtypes of all tensors, and names the subdirectory with their values. It is
replaced last and in one step, so a directory always holds either the previous checkpoint or the new one. The key of a
tensor is its flattened path in the checkpoint of one process (``state_dict.layers.0.weight``,
``optimizer_states.0.state.17.exp_avg``). Keys do not depend on which process wrote a tensor, so any number of processes
can read the tensors that they need.
"""

import pickle
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import uuid4
from zipfile import is_zipfile

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from strategies.checkpoint import streaming
from strategies.checkpoint.atomic import new_directory, remove, replacing, sync_directory
from strategies.checkpoint.streaming import LateTensors
from strategies.common.trees import flat, special_layout, with_tensors

STATE_DICT_TYPES = ("full", "sharded")
"""The formats of a checkpoint, named as in Lightning's ``FSDPStrategy``."""

SHARDED_KEYS = ("state_dict", "optimizer_states")
"""The entries of a checkpoint whose tensors are stored in shards; ``meta.pt`` holds all other entries, with values."""

_META = "meta.pt"
_ZIP = b"PK\x03\x04"
"""The first bytes of a file that ``torch.save`` writes."""
_SHARDS = "shards-"
_OF_PARAMETERS = re.compile(r"state_dict\.|optimizer_states\.\d+\.state\.")
"""The keys of weights and of their optimizer states. Every process needs all other tensors, such as learning rates."""


def local_path(path: str | Any) -> Path | None:
    """Return the local path of a path or URL; ``None`` if it is on another filesystem."""
    filesystem, stripped = url_to_fs(str(path))
    return Path(stripped) if isinstance(filesystem, LocalFileSystem) else None


def is_sharded(path: Path) -> bool:
    """Whether ``path`` is a sharded checkpoint."""
    return (path / _META).is_file()


def sharded_tensors(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of ``checkpoint`` that belong in shards, keyed by flattened path."""
    return flat({key: checkpoint[key] for key in SHARDED_KEYS if key in checkpoint})


def check_can_be_sharded(checkpoint: Mapping[str, Any]) -> None:
    """Check that shards can hold the tensors of a checkpoint.

    Raises:
        ValueError: If one is sparse, quantized or nested.
    """
    for name, tensor in sharded_tensors(checkpoint).items():
        if layout := special_layout(tensor):
            raise ValueError(
                f"{name} is a {layout} tensor, which a sharded checkpoint cannot hold; use "
                'state_dict_type="full", or persistent=False if the model makes the buffer anew'
            )


def without_values(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a shallow copy of ``checkpoint`` in which the tensors of sharded entries are on the ``meta`` device."""
    return {**checkpoint, **{key: _on_meta(checkpoint[key]) for key in SHARDED_KEYS if key in checkpoint}}


def _on_meta(tree: Any) -> Any:
    bare = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in flat(tree).items()}
    return with_tensors(tree, bare)


# Writing


def save_file(checkpoint: Mapping[str, Any], path: Path, late: LateTensors | None = None) -> None:
    """Write ``checkpoint`` to one file, and return when the file is on the disk.

    The new file replaces a file at ``path`` in one step, or a sharded checkpoint in two.

    Args:
        checkpoint: The checkpoint.
        path: The file.
        late: Reads the values of tensors of other processes, one tensor at a time.

    Raises:
        OSError: If the file cannot be written, such as on a full disk.
    """
    with _naming(path), replacing(path, may_be_directory=is_sharded(path)) as file:
        streaming.save(checkpoint, file, late)


def save_sharded(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write the ``checkpoint`` of this process to a directory with one shard.

    Several processes that write one checkpoint use :func:`writing_shards` instead.
    """
    with writing_shards(checkpoint, path) as shards, _without_warning():
        dcp.save(sharded_tensors(checkpoint), storage_writer=dcp.FileSystemWriter(shards), no_dist=True)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raise an error of the operating system as an ``OSError`` that names the checkpoint; torch may omit the reason."""
    try:
        yield
    except (Exception, dcp.CheckpointException) as error:  # a BaseException
        if (found := _system_error(error)) is None:
            raise
        raise OSError(found.errno, f"the checkpoint {path} could not be written: {found.strerror}") from error


def _system_error(error: BaseException) -> OSError | None:
    """Return the error of the operating system that caused an exception, if any."""
    found: BaseException | None = error
    seen: set[int] = set()  # an exception may be its own cause
    while found is not None and id(found) not in seen:
        if isinstance(found, OSError) and found.errno is not None:
            return found
        seen.add(id(found))
        of_ranks = list(found.failures.values()) if isinstance(found, dcp.CheckpointException) else []
        found = of_ranks[0][0] if of_ranks else found.__cause__ or found.__context__
    return None


@contextmanager
def writing_shards(checkpoint: Mapping[str, Any], path: Path, late: LateTensors | None = None) -> Iterator[Path]:
    """Yield an empty directory for the shards of a checkpoint; at the end, make them the checkpoint at ``path``.

    One process calls this. The body writes a checkpoint of ``torch.distributed.checkpoint`` to the directory, with the
    tensors of all processes and their ``.metadata``. If the body raises, the previous content of ``path`` remains.

    Args:
        checkpoint: The checkpoint. Only shapes and dtypes of the tensors in its sharded entries are used.
        path: The directory of the checkpoint. A file, a symbolic link or another checkpoint there is replaced.
        late: Reads the values of tensors of other processes in the entries that are not sharded.

    Raises:
        OSError: If files cannot be written, such as on a full disk.
    """
    with _naming(path), _directory_of(path) as directory:
        shards = directory / f"{_SHARDS}{uuid4().hex}"
        shards.mkdir()
        try:
            yield shards
            sync_directory(shards)
        except BaseException:
            remove(shards)
            raise
        relay = {**checkpoint.get("relay", {}), "shards": shards.name}
        with replacing(directory / _META) as file:
            streaming.save({**without_values(checkpoint), "relay": relay}, file, late)
        for old in directory.glob(f"{_SHARDS}*"):
            if old != shards:
                remove(old)


@contextmanager
def _directory_of(path: Path) -> Iterator[Path]:
    """Yield the directory of an existing sharded checkpoint, or a new one that is renamed to ``path`` at the end.

    A symbolic link is replaced, as ``os.replace`` does, and the checkpoint that it points to remains.
    """
    is_link = path.is_symlink()
    if is_sharded(path) and not is_link:
        yield path
        return
    if path.is_dir() and not is_link and any(path.iterdir()):
        raise IsADirectoryError(
            f"{path} is a directory that is not a sharded checkpoint, and would be replaced by one. Save under a name "
            "of its own"
        )
    with new_directory(path) as directory:
        yield directory


# Reading


def check_not_cut_off(path: Path) -> None:
    """Check that a file that ``torch.save`` wrote is complete.

    Raises:
        RuntimeError: If the file is empty or cut off.
    """
    with open(path, "rb") as file:
        start = file.read(len(_ZIP))
    if _ZIP.startswith(start) and not is_zipfile(path):  # torch's error would not name the file
        raise RuntimeError(
            f"the checkpoint {path} is incomplete, and nothing of it has been loaded: the file is cut off after "
            f"{path.stat().st_size} bytes. Use an earlier checkpoint, or copy the file again."
        )


def load_sharded(
    path: Path, keys: Sequence[str] = SHARDED_KEYS, weights_only: bool | None = None
) -> tuple[dict[str, Any], Path]:
    """Read a sharded checkpoint.

    Args:
        path: The directory.
        keys: The sharded entries whose values are read. In all other sharded entries, weights and the states of
            optimizers stay on the ``meta`` device; all other tensors, such as learning rates, are read.
        weights_only: As in ``torch.load``; applies to ``meta.pt``. Shards hold only tensors.

    Returns:
        The checkpoint, and the directory from which :func:`read_tensors` reads the remaining values.

    Raises:
        RuntimeError: If a tensor is missing, if a file is cut off, or if ``meta.pt`` names a directory that is not a
            subdirectory of the checkpoint.
    """
    check_not_cut_off(path / _META)
    checkpoint = torch.load(path / _META, map_location="cpu", weights_only=weights_only)
    name = checkpoint["relay"].pop("shards")
    if not name.startswith(_SHARDS) or Path(name).name != name:
        raise RuntimeError(
            f"the checkpoint {path} names {name!r} as the directory of its tensors, which is not a subdirectory of it; "
            "nothing has been loaded"
        )
    shards = path / name
    tensors, starts = sharded_tensors(checkpoint), tuple(f"{key}." for key in keys)
    _check_complete(shards, tensors)
    now = {name: t for name, t in tensors.items() if name.startswith(starts) or not _OF_PARAMETERS.match(name)}
    values = read_tensors(shards, now)
    for key in SHARDED_KEYS:
        if key in checkpoint:
            checkpoint[key] = with_tensors(checkpoint[key], values, key)
    if not checkpoint["relay"]:
        del checkpoint["relay"]
    return checkpoint, shards


def read_tensors(shards: Path, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read the tensors of ``wanted`` that are on the ``meta`` device; their keys, shapes and dtypes must match."""
    tensors = {name: torch.empty(like.shape, dtype=like.dtype) for name, like in wanted.items() if like.is_meta}
    load_tensors(tensors, shards)
    return tensors


def load_tensors(tensors: Mapping[str, Tensor], shards: Path) -> None:
    """Read the values of tensors, by key, in place. For a ``DTensor``, this process reads its local part."""
    with _without_warning():
        dcp.load(dict(tensors), storage_reader=ShardReader(shards), no_dist=True)


def _check_complete(shards: Path, wanted: Mapping[str, Tensor]) -> None:
    """Check that ``shards`` holds exactly the tensors ``wanted``, before any of them is read."""
    metadata = ShardReader(shards).read_metadata()
    missing = [name for name in wanted if name not in metadata.state_dict_metadata]
    unexpected = [name for name in metadata.state_dict_metadata if name not in wanted]
    ends: dict[str, int] = {}
    stored = [(index.fqn, place) for index, place in (metadata.storage_data or {}).items()]  # one entry for each part
    for _, place in stored:
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    broken = [
        file for file, end in ends.items() if not (shards / file).is_file() or (shards / file).stat().st_size < end
    ]
    missing += dict.fromkeys(name for name, place in stored if place.relative_path in broken)
    if missing or unexpected:
        writers = [f"{file}, written by process {file.lstrip('_').partition('_')[0]}" for file in sorted(broken)]
        files = f" (absent or too short: {'; '.join(writers)})" if writers else ""
        raise RuntimeError(
            f"the checkpoint {shards.parent} is incomplete{files}, and nothing of it has been loaded: missing "
            f"{missing}, unexpected {unexpected}"
        )


@contextmanager
def _without_warning() -> Iterator[None]:
    """Suppress torch's warning that a single process saves or loads; Relay does this on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


_TORCH_NAMES = {
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
"""The globals that torch writes to ``.metadata`` for plain tensors, besides dtypes."""


class ShardReader(dcp.FileSystemReader):
    """A ``FileSystemReader`` that reads ``.metadata`` without running code from it.

    ``.metadata`` is a pickle. torch's reader unpickles it without restriction and so calls any function that the file
    names.
    """

    def __init__(self, shards: Path) -> None:
        super().__init__(shards)
        self._directory = shards

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the keys, shapes and dtypes of all tensors, and the file and offset of each.

        Raises:
            RuntimeError: If the file is cut off, or holds objects that torch does not write.
        """
        with open(self._directory / ".metadata", "rb") as file:
            try:
                metadata = _MetadataUnpickler(file).load()
            except (EOFError, pickle.UnpicklingError) as error:
                raise RuntimeError(
                    f"the checkpoint {self._directory.parent} is incomplete, and nothing of it has been loaded: its "
                    f"file {self._directory.name}/.metadata is cut off ({error}). Use an earlier checkpoint."
                ) from error
        if not isinstance(metadata, Metadata):
            raise RuntimeError(f"{self._directory / '.metadata'} holds a {type(metadata).__name__}, not metadata")
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("pathlib") and name == "PosixPath":  # the writer's path; not used here
            return PurePosixPath
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _TORCH_NAMES:
            raise _foreign(f"{module}.{name}")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Enum:
    """Return a member of an enumeration, which Python 3.11.0 to 3.11.3 pickles as ``getattr(kind, name)``."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise _foreign("builtins.getattr")
    return kind[name]


def _foreign(name: str) -> RuntimeError:
    return RuntimeError(
        f"the .metadata of a checkpoint names {name}, which torch does not write there; nothing has been loaded. Do "
        "not trust this checkpoint."
    )
