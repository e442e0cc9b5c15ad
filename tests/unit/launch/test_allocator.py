"""Whether blocks that were freed are faulted in again, as counted by the kernel, and the settings of workers."""

import os
import platform
import resource
import statistics
import subprocess
import sys

import pytest
import torch

from strategies.launch.allocator import (
    all_freed_memory_kept,
    keep_freed_memory,
    return_freed_memory,
    variables_of_worker,
)
from strategies.launch.workers import environment_of_worker

MEBI = 2**20
PAGES_OF_A_MEBI = MEBI // resource.getpagesize()
HAS_GLIBC = platform.libc_ver()[0] == "glibc"
IS_RECENT = HAS_GLIBC and tuple(map(int, platform.libc_ver()[1].split("."))) >= (2, 36)

pytestmark = pytest.mark.skipif(
    not IS_RECENT or any(name.startswith(("MALLOC_", "GLIBC_")) for name in os.environ),
    reason="needs glibc 2.36 with its own settings",
)


def faults(mebi: int) -> float:
    """Return how many pages of a block are faulted in when it is used again and again, relative to its size."""
    return_freed_memory()
    counts = []
    for _ in range(7):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(mebi * MEBI, dtype=torch.uint8)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return statistics.median(counts) / (mebi * PAGES_OF_A_MEBI)


@pytest.mark.parametrize("mebi, kept", [(8, True), (32, True), (128, False)])
def test_freed_blocks_up_to_the_limit_are_kept(mebi: int, kept: bool) -> None:
    keep_freed_memory()
    assert (faults(mebi) < 0.1) is kept


def test_a_measurement_keeps_blocks_of_any_size() -> None:
    with all_freed_memory_kept():
        assert faults(48) < 0.1
    assert faults(128) > 0.9  # more than what may have become free within the heap
    assert faults(32) < 0.1


@pytest.mark.parametrize("name", ["MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_settings_of_the_user_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_freed_memory()
    monkeypatch.setenv(name, "glibc.malloc.trim_threshold=4096" if name == "GLIBC_TUNABLES" else "4096")
    with all_freed_memory_kept():
        assert faults(128) > 0.9


@pytest.mark.parametrize(
    "given, expected",
    [
        ("", "glibc.malloc.hugetlb=1"),
        ("glibc.cpu.x86_shstk=on", "glibc.cpu.x86_shstk=on:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_huge_pages_are_added_to_what_the_user_has_tuned(
    given: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strategies.launch.allocator._has_huge_pages", lambda: True)
    variables = {"GLIBC_TUNABLES": given} | variables_of_worker({"GLIBC_TUNABLES": given})
    assert variables["GLIBC_TUNABLES"] == expected


def test_no_huge_pages_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.launch.allocator._has_huge_pages", lambda: False)
    assert "GLIBC_TUNABLES" not in variables_of_worker({})


@pytest.mark.slow
def test_a_worker_faults_in_large_blocks_by_huge_pages() -> None:
    environment = environment_of_worker(sys.path, threads=1)
    if "GLIBC_TUNABLES" not in environment:
        pytest.skip("this kernel has no transparent huge pages")
    program = f"from {__name__} import faults; print(faults(48))"
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True).stdout
    assert float(printed) < 0.5
