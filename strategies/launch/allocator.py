"""Settings of glibc's allocator: whether the next pass can reuse memory that a pass frees.

Each pass allocates and frees the same large blocks. By default, glibc returns large blocks to the kernel, and the next
pass must fault in every page again. The functions of this module have no effect on other systems.
"""

import ctypes
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

_IS_GLIBC = platform.libc_ver()[0] == "glibc"
_IS_RECENT = _IS_GLIBC and tuple(map(int, platform.libc_ver()[1].split(".")[:2])) >= (2, 36)
"""Older versions refuse thresholds over 32 MiB, and most of them do not know huge pages."""

_MOST_KEPT_BYTES = (33 if _IS_RECENT else 32) * 2**20
"""The largest block that the process keeps when it is freed.

A larger free block, such as the gradient of a large layer, would soon be split for small blocks, and the next gradient
would need a new block: a stage took twice its size. Tensors of exactly 32 MiB are common.
"""

_NO_LIMIT = 2**31 - 1

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h

_HUGE_PAGES = "glibc.malloc.hugetlb"

_SMALL_BLOCKS_JOINED = {"glibc.malloc.tcache_count": 0, "glibc.malloc.mxfast": 0}
"""Settings with which a freed small block rejoins its neighbours at once.

torch's tensors are aligned, so glibc cuts the ends off a larger block and frees them. By default it keeps such small
blocks separate for the next small object. While an object has one, the next tensor does not fit into the freed block.
An operation of torch takes up to 1 µs longer, so hosts with GPUs, where the tensors are elsewhere, do without.
"""


def variables_of_worker(base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that set the allocator of a worker.

    Args:
        base: The other variables of the worker.
    """
    variables = {
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "MALLOC_MMAP_THRESHOLD_": str(_MOST_KEPT_BYTES),
        "MALLOC_ARENA_MAX": "1",
    }
    own = {**_SMALL_BLOCKS_JOINED} if _IS_GLIBC and not torch.cuda.device_count() else {}
    if _has_huge_pages():
        own[_HUGE_PAGES] = 1  # each pass faults in larger blocks again; this costs 20 to 50 % less
    given = [tunable for tunable in base.get("GLIBC_TUNABLES", "").split(":") if tunable]
    known = {tunable.partition("=")[0] for tunable in given}
    tunables = [*given, *(f"{name}={value}" for name, value in own.items() if name not in known)]
    return variables | ({"GLIBC_TUNABLES": ":".join(tunables)} if tunables else {})


def keep_freed_memory() -> None:
    """Make this process keep freed blocks for the next pass, as workers do, unless the user set up the allocator."""
    _set_thresholds(_MOST_KEPT_BYTES, 2 * _MOST_KEPT_BYTES)


@contextmanager
def all_freed_memory_kept() -> Iterator[None]:
    """Context that keeps freed blocks of any size; afterwards, the settings of :func:`keep_freed_memory` apply.

    A layer that is measured separately cannot reuse memory that other layers freed, as it does in a run.
    """
    _set_thresholds(_NO_LIMIT, _NO_LIMIT)
    try:
        yield
    finally:
        keep_freed_memory()
        return_freed_memory()


def return_freed_memory() -> None:
    """Return the currently freed blocks to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set_thresholds(most_kept: int, free_at_the_end: int) -> None:
    own = "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"
    if any(name in os.environ for name in own) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, most_kept)
        mallopt(_M_TRIM_THRESHOLD, free_at_the_end)


def _has_huge_pages() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return _IS_RECENT and setting.exists() and "[never]" not in setting.read_text()
