"""Reports to other processes what a worker does: while it computes, when it hangs, and after it has been killed.

compute thread ── doing = "F2, layer 1" ──▶ Activity ──▶ a call of the driver's: how far, and where its stack stands
                                               └───────▶ a file, which is still there when the process is not
"""

import mmap
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_NOTE_BYTES = 256


@dataclass(frozen=True)
class Progress:
    """How far a stage is.

    Attributes:
        num_done: How many things it has begun so far.
        doing: What it does now or did last: ``F2, layer 1``.
        waits: Whether it waits for another process.
        idle: Whether it waits for something to do.
        busy_seconds: For how long the process has computed so far, or waited for a core; its children included.
        stack: Where the compute thread's Python stack stands.
    """

    num_done: int
    doing: str
    waits: bool
    idle: bool
    busy_seconds: float
    stack: str


class Note:
    """A file that tells what its writer does or did last. It is mapped memory, so it outlives its writer.

    Args:
        path: Of the file, which is made, or emptied.
    """

    def __init__(self, path: Path) -> None:
        with open(path, "w+b") as file:
            file.truncate(_NOTE_BYTES)
            self._bytes = mmap.mmap(file.fileno(), _NOTE_BYTES)

    def write(self, text: str) -> None:
        """Replaces what is there."""
        self._bytes[:] = text.encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES, b"\0")


class Activity:
    """What a stage does. Made by the thread that computes, or before there is one.

    Args:
        note: The file that tells it after the process's death.
    """

    def __init__(self, note: Path | None = None) -> None:
        self.num_done, self._doing, self._waits, self._idle = 0, "", False, False
        self._thread: threading.Thread | None = None
        self._note = Note(note) if note is not None else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within this, the calling thread computes for the stage."""
        self._thread = threading.current_thread()
        yield

    @property
    def doing(self) -> str:
        """What the stage does now or did last, for error reports: ``F3, layer 5``."""
        return self._doing

    @doing.setter
    def doing(self, what: str) -> None:
        self._doing = what
        self.num_done += 1
        self._write(f"in {what}")

    def wait(self, wait: Callable[[], Any]) -> Any:
        """Calls what waits for another process."""
        self._waits = True
        try:
            return wait()
        finally:
            self._waits = False

    def idle(self, wait: Callable[[], Any]) -> Any:
        """Calls what waits for something to do."""
        self._write(f"idle after {self._doing}" if self._doing else "idle")
        self._idle = True
        try:
            return wait()
        finally:
            self._idle = False

    def progress(self) -> Progress:
        """How far the stage is; any thread may ask."""
        frame = sys._current_frames().get(self._thread.ident or 0) if self._thread is not None else None
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        return Progress(self.num_done, self._doing, self._waits, self._idle, self._busy_seconds(), stack)

    def _write(self, text: str) -> None:
        if self._note is not None:
            self._note.write(text)

    def _busy_seconds(self) -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = time.process_time() + children.ru_utime + children.ru_stime
        with suppress(OSError):  # the system is not Linux, or its kernel does not tell
            # psutil does not have this: the second number is the time for which the thread waited for a free core.
            thread = self._thread.native_id if self._thread is not None else 0
            waited = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]
            seconds += int(waited) / 1e9
        return seconds + _seconds_of_descendants()


def noted(note: Path | None) -> str:
    """What the process that wrote this file did last, in words; empty if it is not known."""
    if note is None:
        return ""
    text = note.read_bytes().rstrip(b"\0") if note.exists() else b""
    return text.decode(errors="replace") or "while it started"


def _seconds_of_descendants() -> float:
    """The CPU time of the processes (compilers, for instance) that this one, or one of them, has started."""
    seconds = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            times = process.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds
