"""What Linux's /proc knows about processes, ports and shared memory: the eyes of the test harness."""

import os
from pathlib import Path


def family(session: int, scratch: Path) -> list[int]:
    """The living processes of a session, and those that left it but still work in, or were told of, its scratch folder.

    Zombies do not count: they have ended, and their parent decides when to collect them.
    """
    members = []
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            state, pid_session = _state_and_session(pid)
            if state not in "ZX" and (pid_session == session or _belongs(pid, scratch)):
                members.append(pid)
        except OSError:
            continue  # ended meanwhile, or belongs to somebody else
    return members


def is_alive(pid: int) -> bool:
    try:
        return _state_and_session(pid)[0] not in "ZX"
    except FileNotFoundError:
        return False


def describe(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        command = "(ended)"
    return f"pid {pid}: {command[:300]}"


def listening_ports() -> set[int]:
    """The TCP ports on which this process listens."""
    own_sockets = {target for target in _links("/proc/self/fd") if target.startswith("socket:")}
    ports = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        if not os.path.exists(table):
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            local_address, state, inode = fields[1], fields[3], fields[9]
            if state == "0A" and f"socket:[{inode}]" in own_sockets:
                ports.add(int(local_address.rsplit(":", 1)[1], 16))
    return ports


def shm_segments() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


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


def _state_and_session(pid: int) -> tuple[str, int]:
    # The command name may hold spaces and brackets; the fields are counted from its closing bracket.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[3])


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
