"""How much more memory the processes on this host may take, by limits of the host, of control groups and of processes.

Every figure is an upper bound: it includes swap, and caches that the kernel can release.
"""

import math
import resource
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_GROUPS, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_LARGEST_LIMIT_BYTES = 2**62
"""Version 1 of control groups reports a number near 2**63 if there is no limit."""


@dataclass(frozen=True)
class Room:
    """Available memory.

    Attributes:
        size_bytes: The size.
        words: A description of the limit, for messages.
    """

    size_bytes: int
    words: str


@dataclass(frozen=True)
class ProcessLimit:
    """A limit of each process. Child processes inherit it.

    Attributes:
        size_bytes: The limit.
        used_bytes: The memory that this process uses.
        words: The name of the limit, for messages.
    """

    size_bytes: int
    used_bytes: int
    words: str


def room_on_host(groups: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> Room:
    """Return how much more memory all processes of this host together may take.

    Args:
        groups: The mount point of control groups.
        membership: The file that names the control groups of this process.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # raised if the kernel hides how much has been swapped
        swap_bytes = psutil.swap_memory().free
    host = Room(psutil.virtual_memory().available + swap_bytes, "the memory of this host that is available")
    rooms = [room for folder in _folders(groups, membership) if (room := _room_in_group(folder, swap_bytes))]
    return min([host, *rooms], key=lambda room: room.size_bytes)


def limits_of_process() -> list[ProcessLimit]:
    """Return the memory limits of this process and of the processes that it starts; empty on systems without Linux."""
    if sys.platform != "linux":
        return []
    used = psutil.Process().memory_info()
    limits = [
        ProcessLimit(resource.getrlimit(resource.RLIMIT_DATA)[0], used.data, "RLIMIT_DATA, `ulimit -d`"),
        ProcessLimit(resource.getrlimit(resource.RLIMIT_AS)[0], used.vms, "RLIMIT_AS, `ulimit -v`"),
    ]
    return [limit for limit in limits if limit.size_bytes != resource.RLIM_INFINITY]


def _folders(groups: Path, membership: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group and of all enclosing groups, for both versions."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            roots = [groups, groups / "unified"]
        elif "memory" in controllers.split(","):
            roots = [groups / "memory"]
        else:
            continue
        for root in roots:
            # Within a container, the path may be the host's. Then only the root exists.
            folder = root / path.lstrip("/")
            yield from (own for own in (folder, *folder.parents) if own.is_relative_to(root))


def _room_in_group(folder: Path, swap_bytes: int) -> Room | None:
    """Return the memory that a control group allows beyond its current use; ``None`` if it has no limit."""
    is_version_2 = (folder / "memory.max").exists()
    limit = _number(folder / ("memory.max" if is_version_2 else "memory.limit_in_bytes"))
    used = _number(folder / ("memory.current" if is_version_2 else "memory.usage_in_bytes"))
    if not math.isfinite(limit) or not math.isfinite(used):
        return None
    swap_limit = _number(folder / ("memory.swap.max" if is_version_2 else "memory.memsw.limit_in_bytes"))
    swap_used = _number(folder / ("memory.swap.current" if is_version_2 else "memory.memsw.usage_in_bytes"))
    swap = min(swap_bytes, swap_limit - swap_used) if math.isfinite(swap_used) else swap_bytes
    room = limit - used + _cached_bytes(folder, "" if is_version_2 else "total_") + max(0, swap)
    return Room(max(0, int(room)), f"the limit of the control group {folder}")


def _number(path: Path) -> float:
    """Return the number in a file; infinity if there is none."""
    try:
        value = int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return math.inf
    return value if value < _LARGEST_LIMIT_BYTES else math.inf


def _cached_bytes(folder: Path, prefix: str) -> int:
    """Return the size of cached files, which the kernel can release when the group needs memory."""
    wanted = {f"{prefix}inactive_file", f"{prefix}active_file"}
    try:
        fields = [line.split() for line in (folder / "memory.stat").read_text().splitlines()]
    except OSError:
        return 0
    return sum(int(field[1]) for field in fields if field[0] in wanted)
