"""What Linux's /proc knows about processes, ports and shared memory: the eyes of the test harness."""

import os
import signal
import socket
import struct
import time
from pathlib import Path

MEBI = 2**20
PREFIX = "relay-test-"
"""With which the names of scratch folders of tests begin."""


def family(session: int, scratch: Path, fork_server: int = -1) -> list[int]:
    """The living processes of a session, and those that left it but still work in, or were told of, its scratch folder.

    Zombies do not count: they have ended, and their parent decides when to collect them.

    Args:
        session: The session.
        scratch: The folder.
        fork_server: A process outside of the session whose children belong to it.
    """
    members = []
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            state, pid_parent, pid_session = _state_parent_session(pid)
            belongs = pid_session == session or pid_parent == fork_server or _belongs(pid, scratch)
            if state not in "ZX" and belongs and pid != fork_server:
                members.append(pid)
        except OSError:
            continue  # ended meanwhile, or belongs to somebody else
    return members


def parent(pid: int) -> int:
    return _state_parent_session(pid)[1]


def is_alive(pid: int) -> bool:
    try:
        return _state_parent_session(pid)[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # it ended before the file was opened, or between that and the read
        return False


def stop(pid: int) -> None:
    """Stops a process and waits until each of its threads stands still: one stops first, and tells the others."""
    os.kill(pid, signal.SIGSTOP)
    while any(_state_parent_session(task)[0] != "T" for task in Path(f"/proc/{pid}/task").iterdir()):
        time.sleep(0.001)


def describe(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        command = "(ended)"
    return f"pid {pid}: {command[:300]}"


def listening_ports() -> set[int]:
    """The TCP ports on which this process listens."""
    return {port for _, port in listeners([os.getpid()])}


def listeners(pids: list[int]) -> set[tuple[str, int]]:
    """Address and port of each socket on which one of these processes listens."""
    own_sockets = {target for pid in pids for target in _links(f"/proc/{pid}/fd") if target.startswith("socket:")}
    found = set()
    for table, family, words in (("tcp", socket.AF_INET, 1), ("tcp6", socket.AF_INET6, 4)):
        file = Path(f"/proc/self/net/{table}")
        for line in file.read_text().splitlines()[1:] if file.exists() else []:
            fields = line.split()
            local_address, state, inode = fields[1], fields[3], fields[9]
            if state == "0A" and f"socket:[{inode}]" in own_sockets:
                address, port = local_address.split(":")
                packed = struct.pack(f"={words}I", *(int(address[8 * k : 8 * k + 8], 16) for k in range(words)))
                found.add((socket.inet_ntop(family, packed), int(port, 16)))
    return found


def own_memory_bytes(what: str) -> int:
    """``VmRSS``, which is what this process holds now, or ``VmHWM``, the most it has ever held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def shm_segments(test: str) -> set[str]:
    """The names of segments of shared memory; of semaphores only those of one test.

    Semaphores with the prefix of multiprocessing are left out: new interpreters, of whichever test, make them, and the
    resource tracker of each removes them.

    Args:
        test: The name of the scratch folder of the test, with which the names of its semaphores begin.
    """
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if not name.startswith("sem.") or name.startswith(f"sem.{test}-")}


def unowned(segments: set[str]) -> list[str]:
    """Those shared-memory segments that no living process has open or mapped; others' runs use the folder too."""
    if not segments:
        return []
    used = set()
    for pid in [name for name in os.listdir("/proc") if name.isdigit()]:
        try:
            text = Path(f"/proc/{pid}/maps").read_text() + "\n".join(_links(f"/proc/{pid}/fd"))
        except OSError:
            continue
        used |= {name for name in segments if f"/dev/shm/{name}" in text}
    return sorted(segments - used)


def _state_parent_session(pid: int | Path) -> tuple[str, int, int]:
    # The command name may hold spaces and brackets; the fields are counted from its closing bracket.
    fields = Path("/proc", f"{pid}", "stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[1]), int(fields[3])


def _belongs(pid: int, scratch: Path) -> bool:
    path = os.fsencode(scratch)
    return path in Path(f"/proc/{pid}/environ").read_bytes() or os.fsencode(os.readlink(f"/proc/{pid}/cwd")).startswith(
        path
    )


def _links(folder: str) -> list[str]:
    targets = []
    for name in os.listdir(folder):
        try:
            targets.append(os.readlink(f"{folder}/{name}"))
        except OSError:
            continue  # closed meanwhile
    return targets
