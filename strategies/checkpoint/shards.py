"""A checkpoint in parts: a directory into which every process writes what it holds, at the same time as the others.

    DIRECTORY/meta.pt          the checkpoint of one process, with tensors on the ``meta`` device where it is in parts
    DIRECTORY/shards-.../      a checkpoint of torch.distributed.checkpoint: flat names, one file a process

``meta.pt`` tells names, shapes and types of everything without reading it, and which ``shards-...`` belongs to it. It
is replaced in one step, last of all, so a directory is the old checkpoint or the new one. Tensors have the names of one
process (``state_dict.layers.0.weight``, ``optimizer_states.0.state.17.exp_avg``) and belong to no stage any more, so
any number of processes can read what they need.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from strategies.checkpoint.atomic import new_directory, remove, replacing, sync_directory
from strategies.checkpoint.metadata import ShardReader
from strategies.common.trees import flat, replaced, with_meta_tensors

STATE_DICT_TYPES = ("full", "sharded")
"""A file, or this; as FSDPStrategy calls them."""

PARTS = ("state_dict", "optimizer_states")
"""What of a checkpoint is in parts."""

_META = "meta.pt"
_SHARDS = "shards-"


def is_sharded(path: Path) -> bool:
    """Whether there is such a checkpoint at ``path``."""
    return (path / _META).is_file()


def plan(tensors: Mapping[str, Tensor]) -> SavePlan:
    """What a process will write; shapes and types suffice."""
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(dict(tensors), is_coordinator=False)
    return planner.create_local_plan()


def write(directory: Path, own: SavePlan, tensors: Mapping[str, Tensor]) -> list[WriteResult]:
    """Writes one process's file, and returns when it is on the disk."""
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(dict(tensors), is_coordinator=False)
    planner.create_local_plan()
    return dcp.FileSystemWriter(directory).write_data(planner.finish_plan(own), planner).value()


def write_of(stage: Any, number: int, directory: Path, own: SavePlan) -> list[WriteResult]:
    """:func:`write` on the worker of a stage (an ``RRef``), beside what it computes; see ``HostedStage.shelve``."""
    return write(directory, own, stage.local_value().hosted.shelf.pop(number))


def read_of(stage: Any, number: int, shards: Path, tree: Any, prefix: str) -> None:
    """:func:`fill` on the worker of a stage; what is read stays on the shelf."""
    bare = with_meta_tensors(tree)
    stage.local_value().hosted.shelf[number] = replaced(bare, fill(shards, flat(bare, prefix)), prefix)


def save(path: Path, checkpoint: Mapping[str, Any], plans: Sequence[SavePlan], write_all: Callable[..., Any]) -> None:
    """Writes a checkpoint in parts to ``path``, in place of what is there.

    Args:
        path: The directory.
        checkpoint: The checkpoint; in its parts only shapes and types are looked at.
        plans: What each process will write.
        write_all: Gets the directory and the final plans, and returns the results of :func:`write` of each process.
    """
    with _home(path) as home:
        shards = home / f"{_SHARDS}{uuid4().hex}"
        writer = dcp.FileSystemWriter(shards)
        planner = dcp.DefaultSavePlanner()
        final_plans, metadata = planner.create_global_plan(list(plans))
        shards.mkdir()
        try:
            writer.finish(metadata, write_all(shards, writer.prepare_global_plan(final_plans)))
            sync_directory(shards)
        except BaseException:
            remove(shards)
            raise
        relay = {**checkpoint.get("relay", {}), "shards": shards.name}
        with replacing(home / _META) as file:
            torch.save({**without_values(checkpoint), "relay": relay}, file)
        for old in home.glob(f"{_SHARDS}*"):
            if old != shards:
                remove(old)


@contextmanager
def _home(path: Path) -> Iterator[Path]:
    """The directory to write into: a new one, or that of an older checkpoint in parts."""
    if is_sharded(path):
        yield path
        return
    with new_directory(path) as directory:
        yield directory


def load(path: Path, parts: Sequence[str] = PARTS, weights_only: bool | None = None) -> tuple[dict[str, Any], Path]:
    """Reads a checkpoint; of what is in parts only some of it.

    Returns:
        The checkpoint, which has tensors on the ``meta`` device for what has not been read, and where to read that.

    Raises:
        RuntimeError: If some of its tensors are not there, or if it is none of ours.
    """
    checkpoint = torch.load(path / _META, map_location="cpu", weights_only=weights_only)
    name = checkpoint["relay"].pop("shards")
    if not name.startswith(_SHARDS) or Path(name).name != name:
        raise RuntimeError(f"the checkpoint {path} says that its tensors are in {name!r}, which is not a part of it")
    shards = path / name
    _check(shards, flat({part: checkpoint[part] for part in PARTS if part in checkpoint}))
    for part in parts:
        if part in checkpoint:
            read = fill(shards, flat(checkpoint[part], part))
            checkpoint[part] = replaced(checkpoint[part], read, part)
    if not checkpoint["relay"]:
        del checkpoint["relay"]
    return checkpoint, shards


def fill(shards: Path, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Reads tensors of the given names, shapes and types."""
    tensors = {name: torch.empty(like.shape, dtype=like.dtype) for name, like in wanted.items() if like.is_meta}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(dict(tensors), storage_reader=ShardReader(shards), no_dist=True)
    return tensors


def _check(shards: Path, wanted: Mapping[str, Tensor]) -> None:
    """Checks that what is to be read is there, before any of it is."""
    metadata = ShardReader(shards).read_metadata()
    missing = [name for name in wanted if name not in metadata.state_dict_metadata]
    unexpected = [name for name in metadata.state_dict_metadata if name not in wanted]
    ends: dict[str, int] = {}
    stored = {index.fqn: place for index, place in (metadata.storage_data or {}).items()}
    for place in stored.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    broken = [
        file for file, end in ends.items() if not (shards / file).is_file() or (shards / file).stat().st_size < end
    ]
    missing += [name for name, place in stored.items() if place.relative_path in broken]
    if missing or unexpected:
        told = [f"{file}, written by process {file.lstrip('_').partition('_')[0]}" for file in sorted(broken)]
        files = f" (absent or too short: {'; '.join(told)})" if told else ""
        raise RuntimeError(
            f"the checkpoint {shards.parent} is not whole{files}, and nothing of it has been loaded: missing "
            f"{missing}, unexpected {unexpected}"
        )


def without_values(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint, of whose parts only shapes and types are left."""
    return {**checkpoint, **{part: _bare(checkpoint[part]) for part in PARTS if part in checkpoint}}


def _bare(tree: Any) -> Any:
    bare = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in flat(tree).items()}
    return replaced(tree, bare)
