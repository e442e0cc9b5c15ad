"""How much memory is left, by control groups of both versions, as files."""

from pathlib import Path

import psutil
import pytest

from strategies.launch.limits import room_on_host

MEBI = 2**20
NO_LIMIT_BYTES = 2**63 - 4096
"""What version 1 writes where there is no limit."""


def group(folder: Path, **values: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / f"memory.{name.replace('__', '.')}").write_text(f"{value}\n")
    return folder


def member(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "membership"
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def test_without_control_groups_it_is_what_the_host_has(tmp_path: Path) -> None:
    room = room_on_host(tmp_path, tmp_path / "missing")
    assert room.words == "the memory of this host that is available"
    assert room.size_bytes == pytest.approx(
        psutil.virtual_memory().available + psutil.swap_memory().free, abs=500 * MEBI
    )


def test_the_narrowest_group_around_the_process_counts_without_its_caches(tmp_path: Path) -> None:
    group(tmp_path, max="max", current=9)
    outer = group(tmp_path / "a", max=100 * MEBI, current=70 * MEBI, swap__max=0, swap__current=0)
    (outer / "memory.stat").write_text(f"anon 5\ninactive_file {4 * MEBI}\nactive_file {6 * MEBI}\n")
    group(tmp_path / "a" / "b", max=90 * MEBI, current=10 * MEBI, swap__max=0, swap__current=0)
    room = room_on_host(tmp_path, member(tmp_path, "0::/a/b"))
    assert (room.size_bytes, room.words) == (40 * MEBI, f"the limit of the control group {outer}")


def test_a_group_may_use_more_than_its_limit(tmp_path: Path) -> None:
    group(tmp_path, max=10 * MEBI, current=12 * MEBI, swap__max=0, swap__current=0)
    assert room_on_host(tmp_path, member(tmp_path, "0::/")).size_bytes == 0


def test_version_1(tmp_path: Path) -> None:
    root = tmp_path / "memory"
    group(root, limit_in_bytes=NO_LIMIT_BYTES, usage_in_bytes=5 * MEBI)
    own = group(
        root / "jobs" / "7",
        limit_in_bytes=64 * MEBI,
        usage_in_bytes=16 * MEBI,
        memsw__limit_in_bytes=64 * MEBI,
        memsw__usage_in_bytes=64 * MEBI,
    )
    (own / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {2 * MEBI}\n")
    lines = ["5:devices:/", "4:cpu,memory:/jobs/7", "1:name=systemd:/", "0::/"]
    room = room_on_host(tmp_path, member(tmp_path, *lines))
    assert (room.size_bytes, room.words) == (50 * MEBI, f"the limit of the control group {own}")


def test_in_a_container_only_the_root_of_the_path_exists(tmp_path: Path) -> None:
    group(tmp_path / "memory", limit_in_bytes=8 * MEBI, usage_in_bytes=3 * MEBI)
    membership = member(tmp_path, "4:memory:/docker/0123abcd")
    assert room_on_host(tmp_path, membership).size_bytes == 5 * MEBI + psutil.swap_memory().free


def test_the_groups_of_this_process_can_be_read() -> None:
    assert 0 < room_on_host().size_bytes <= psutil.virtual_memory().total + psutil.swap_memory().total
