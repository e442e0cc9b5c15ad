"""Whether blocks that were freed are faulted in again, as counted by the kernel, and the settings of workers."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paths import environment as variables_of_tests

from strategies.launch.allocator import variables_of_worker
from strategies.launch.workers import environment_of_worker

HAS_GLIBC = platform.libc_ver()[0] == "glibc"
IS_RECENT = HAS_GLIBC and tuple(map(int, platform.libc_ver()[1].split("."))) >= (2, 36)

pytestmark = pytest.mark.skipif(
    not IS_RECENT or any(name.startswith(("MALLOC_", "GLIBC_")) for name in os.environ),
    reason="needs glibc 2.36 with its own settings",
)


JOINED = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
"""Small blocks rejoin their neighbours when they are freed."""

PROGRAM = """
import os, resource, statistics, sys
from strategies.launch.allocator import all_freed_memory_kept, keep_freed_memory, return_freed_memory
def faults(mebi):
    return_freed_memory()
    counts = []
    for _ in range(7):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        bytearray(b"1") * (mebi * 2**20)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return statistics.median(counts) / (mebi * 2**20 // resource.getpagesize())
"""
"""``faults`` returns how many pages of a block are faulted in when it is used again and again, relative to its size."""


def printed(program: str, environment: dict[str, str] | None = None) -> list[float]:
    """Return the numbers that a process prints that has nothing else in its heap, where blocks might find a place."""
    command = [sys.executable, "-c", PROGRAM + program]
    found = subprocess.run(
        command, env=environment or variables_of_tests(), capture_output=True, text=True, timeout=120, check=True
    )
    return [float(number) for number in found.stdout.split()]


def test_freed_blocks_up_to_the_limit_are_kept() -> None:
    small, limit, large = printed("keep_freed_memory(); print(faults(8), faults(32), faults(128))")
    assert small < 0.1 and limit < 0.1 and large > 0.9


def test_a_measurement_keeps_blocks_of_any_size() -> None:
    within, large, limit = printed(
        """
with all_freed_memory_kept():
    print(faults(48))
print(faults(128), faults(32))
"""
    )
    assert within < 0.1 and large > 0.9 and limit < 0.1


@pytest.mark.parametrize("name", ["MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_settings_of_the_user_stay(name: str) -> None:
    value = "glibc.malloc.trim_threshold=4096" if name == "GLIBC_TUNABLES" else "4096"
    (found,) = printed(
        f"""
keep_freed_memory()
os.environ[{name!r}] = {value!r}
with all_freed_memory_kept():
    print(faults(128))
"""
    )
    assert found > 0.9


@pytest.mark.parametrize(
    "given, expected",
    [
        ("", f"{JOINED}:glibc.malloc.hugetlb=1"),
        ("glibc.cpu.x86_shstk=on", f"glibc.cpu.x86_shstk=on:{JOINED}:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", f"glibc.malloc.hugetlb=0:{JOINED}"),
        (
            "glibc.malloc.tcache_count=7",
            "glibc.malloc.tcache_count=7:glibc.malloc.mxfast=0:glibc.malloc.hugetlb=1",
        ),
    ],
)
def test_settings_are_added_to_what_the_user_has_tuned(
    given: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strategies.launch.allocator._has_huge_pages", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    variables = {"GLIBC_TUNABLES": given} | variables_of_worker({"GLIBC_TUNABLES": given})
    assert variables["GLIBC_TUNABLES"] == expected


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_no_huge_pages_where_there_are_none(num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.launch.allocator._has_huge_pages", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert variables_of_worker({}).get("GLIBC_TUNABLES") == (None if num_gpus else JOINED)


@pytest.mark.slow
def test_a_worker_faults_in_large_blocks_by_huge_pages_if_the_kernel_has_them() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    has_huge_pages = setting.exists() and "[never]" not in setting.read_text()
    environment = environment_of_worker(sys.path, threads=1)
    assert ("glibc.malloc.hugetlb=1" in environment.get("GLIBC_TUNABLES", "")) == has_huge_pages
    (found,) = printed("print(faults(48))", environment)
    assert found < 0.5 if has_huge_pages else found > 0.9
