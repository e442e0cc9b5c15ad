"""Report to other processes what a worker does: while it computes, when it hangs, and after it has been killed.

compute thread ── doing = "F2, layer 1" ──▶ Activity ──▶ the driver asks for the progress and the Python stack
                                               └───────▶ a file, which remains after the process has ended
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
    """The progress of a stage.

    Attributes:
        num_done: The number of activities that the stage has begun.
        doing: The current or most recent activity: ``F2, layer 1``.
        waits: Whether the stage waits for another process.
        idle: Whether the stage waits for its next command.
        busy_seconds: The time for which the process and its children have computed or waited for a core.
        stack: The Python stack of the compute thread.
    """

    num_done: int
    doing: str
    waits: bool
    idle: bool
    busy_seconds: float
    stack: str


class ActivityFile:
    """A file with the current or most recent activity of the process that writes it.

    The file is mapped into memory, so its content remains if the process is killed.

    Args:
        path: The file. It is created, or emptied if it exists.
    """

    def __init__(self, path: Path) -> None:
        with open(path, "w+b") as file:
            file.truncate(_NOTE_BYTES)
            self._bytes = mmap.mmap(file.fileno(), _NOTE_BYTES)

    def write(self, text: str) -> None:
        """Replace the content of the file."""
        self._bytes[:] = text.encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES, b"\0")


class Activity:
    """Notes what a stage does. The compute thread creates this object, or it exists before the compute thread starts.

    Args:
        note: The file from which other processes read the activity after this process has ended.
    """

    def __init__(self, note: Path | None = None) -> None:
        self.num_done, self._doing, self._waits, self._idle = 0, "", False, False
        self._thread: threading.Thread | None = None
        self._note = ActivityFile(note) if note is not None else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context in which the calling thread computes for the stage."""
        self._thread = threading.current_thread()
        yield

    @property
    def doing(self) -> str:
        """The current or most recent activity, for error reports: ``F3, layer 5``."""
        return self._doing

    @doing.setter
    def doing(self, what: str) -> None:
        self._doing = what
        self.num_done += 1
        self._write(f"in {what}")

    def wait(self, wait: Callable[[], Any]) -> Any:
        """Call a function that waits for another process."""
        self._waits = True
        try:
            return wait()
        finally:
            self._waits = False

    def idle(self, wait: Callable[[], Any]) -> Any:
        """Call a function that waits for the next command."""
        self._write(f"idle after {self._doing}" if self._doing else "idle")
        self._idle = True
        try:
            return wait()
        finally:
            self._idle = False

    def progress(self) -> Progress:
        """Return the progress of the stage. Any thread may call this."""
        frame = sys._current_frames().get(self._thread.ident or 0) if self._thread is not None else None
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        return Progress(self.num_done, self._doing, self._waits, self._idle, self._busy_seconds(), stack)

    def _write(self, text: str) -> None:
        if self._note is not None:
            self._note.write(text)

    def _busy_seconds(self) -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = time.process_time() + children.ru_utime + children.ru_stime
        with suppress(OSError):  # the system is not Linux, or its kernel does not provide the file
            # The second number is the time for which the thread waited for a free core; psutil does not provide it.
            thread = self._thread.native_id if self._thread is not None else 0
            waited = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]
            seconds += int(waited) / 1e9
        return seconds + _seconds_of_descendants()


def noted(note: Path | None) -> str:
    """Describe the most recent activity of the process that wrote this file; empty if it is not known."""
    if note is None:
        return ""
    try:
        text = note.read_bytes().rstrip(b"\0")
    except FileNotFoundError:  # not written yet, or removed at the end of the session
        text = b""
    return text.decode(errors="replace") or "while it started"


def _seconds_of_descendants() -> float:
    """Return the CPU time of this process's descendants, such as compilers."""
    seconds = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # the descendant has ended
            times = process.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds
