"""Monitor the ranks that rank 0 started on its host: whether they run, what they do, and their common end.

rank 0   main thread     in a call of the Trainer ──▶ a connection is lost, or ◀┐ ──▶ asks why ──▶ one error, for all
         monitor         checks the processes ──▶ one has failed ── 2 s later ──┴─ interrupts it ── 7 s: ends rank 0
                                 ▲
rank > 0                 write what they do to memory of rank 0

The workers of a pipeline are not ranks: :mod:`strategies.pipeline.control.client` detects the loss of a worker.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

import torch.distributed as dist

from strategies.common.activity import ActivityFile, noted
from strategies.common.errors import is_consequence
from strategies.common.torch_compat import default_store, forget_group_names, has_excepthook_of_groups
from strategies.launch.host_links import HostLinks
from strategies.launch.process_ends import Watchdog, end_together, ending
from strategies.launch.rendezvous import InterruptibleTCPStore
from strategies.launch.session import set_variables

_LOOK_SECONDS = 0.1
_ALONE_SECONDS = 2.0
"""How long rank 0 may take to detect that a rank has ended. Most collectives detect it immediately."""

_LAST_SECONDS = 7.0
"""After this time, rank 0 is killed, because it is in a library that cannot be interrupted."""

_AGAIN_SECONDS = 1.0
"""How long an interrupted rank 0 may take to leave the call before it is interrupted again."""

_DIAGNOSIS_SECONDS = 3.0
"""How long to look for the process behind a lost connection, which closes before the process has ended."""

_LEAVE_SECONDS = 5.0
"""How long ranks may take to leave a call after rank 0 has."""

_END_SECONDS = 2.0
"""How long a rank may take to end after it was asked to, before it is killed."""

_ABSENT_SECONDS = 3.0
"""How long rank 0 may stay in a call that another rank has left with an error. It may wait forever for that rank."""

_DISMISSAL_SECONDS = 10.0
"""How long a rank that has lost a connection waits for rank 0 to end it: longer than rank 0 looks for the cause."""

_ANSWER_SECONDS = 5.0
"""How long a rank waits in its teardown for an answer of rank 0's store. The host of rank 0 may be unreachable."""

_RAISED = ", which raised "

_FOREVER = timedelta(days=20)  # c10d counts milliseconds in 31 bits


class RankLost(BaseException):
    """Raised in the main thread of rank 0 when a rank has failed. No ``except Exception`` catches it."""


class RankMonitor:
    """Ranks 1, 2, ... of one host. They keep running when the Trainer that started them ends, and serve later Trainers.

    Args:
        processes: The processes of the ranks, in the order of the ranks.
        notes: The memory in which each rank notes what it does, rank 0 first; empty if not supported.
        before: Environment variables before the launch; ``None`` for variables that did not exist.
    """

    def __init__(
        self, processes: Sequence[subprocess.Popen], notes: Sequence[int], before: Mapping[str, str | None]
    ) -> None:
        self.processes, self._notes, self._before = list(processes), list(notes), before
        self._note = ActivityFile(_path(notes[0])) if notes else None
        self.calls = 0
        """The number of calls of a Trainer that all ranks have entered."""
        self._lost, self._is_known, self._excepthook = "", False, sys.excepthook
        self._found, self._over = threading.Event(), threading.Event()
        self._in_call = self._have_entered = False
        self._left: dict[int, float] = {}
        """When each rank was first seen to have left rank 0's current call with an error."""
        self._thread = threading.Thread(target=self._watch, name="relay-rank-monitor", daemon=True)
        self._thread.start()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Enclose a call of the Trainer. If a rank fails during the call, ``RankLost`` is raised in it."""
        self._is_known = self._have_entered = False
        self._left.clear()
        main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGURG, self._interrupt) if main else None  # does nothing in other programs
        self._in_call = True
        try:
            yield
            self.have_left()
            self.check()
        finally:
            self._in_call = False
            if self._note is not None:
                self._note.write(after_call(self.calls))
            if main:
                signal.signal(signal.SIGURG, before or signal.SIG_DFL)

    def mark_entered(self) -> None:
        """Note that all ranks have entered the same call of the Trainer."""
        self.calls += 1
        self._have_entered = True

    def check(self) -> None:
        """Raise ``RankLost`` if a rank has failed."""
        if self._find(bool):
            raise RankLost(self._lost)

    def have_left(self) -> bool:
        """Wait for all ranks to leave the call that this rank has just left. Returns whether they left it in time."""
        deadline, after = time.monotonic() + _LEAVE_SECONDS, after_call(self.calls)
        while self._notes and self.calls:
            running = [rank for rank, process in enumerate(self.processes, 1) if process.poll() is None]
            if all((noted(_path(self._notes[rank])) or after).startswith(after) for rank in running):
                break
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_SECONDS / 10)
        return True

    def why(self, error: BaseException) -> str | None:
        """Describe which rank ended a call, and how; ``None`` if rank 0 itself raised the error."""
        if not isinstance(error, RankLost) and not is_consequence(error) and not is_lost_connection(error):
            return None
        if not self._found.wait(_DIAGNOSIS_SECONDS):
            self._find(lambda status: status is not None)
        return self._lost or None

    def raised(self) -> list[str]:
        """Return descriptions of running ranks that raised an error in the call that rank 0 has just left."""
        found = []
        for rank in range(1, len(self._notes)):
            if kind := self._raised_by(rank):
                found.append(f"rank {rank}, process {self.processes[rank - 1].pid}, has raised {kind}")
        return found

    def _raised_by(self, rank: int) -> str:
        """The type of the error with which a rank left the last call that all ranks entered; otherwise empty."""
        _, _, kind = noted(_path(self._notes[rank])).partition(after_call(self.calls) + _RAISED)
        return kind.partition(",")[0]

    @property
    def has_ended(self) -> bool:
        """Whether one of the ranks has ended, so that training cannot continue."""
        return any(process.poll() is not None for process in self.processes)

    @property
    def news(self) -> str | None:
        """The failure of a rank that has not been reported yet; ``None`` if there is none."""
        return None if self._is_known else self._lost or None

    def excuse(self) -> None:
        """Note that rank 0 raises its own error, so that failures of other ranks are not reported too."""
        self._is_known = True

    def dismiss(self) -> None:
        """End all other ranks and the process group, and restore the environment from before the launch."""
        self._over.set()
        self._thread.join()
        self._end()
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_group_names()  # names are numbers, and new ranks start to count from the beginning
        if has_excepthook_of_groups(sys.excepthook):  # each process group adds one
            sys.excepthook = self._excepthook
        set_variables(self._before)
        for note in self._notes:
            os.close(note)
        self._notes = []

    def _end(self) -> None:
        for process in self.processes:
            process.terminate()
        end_together(self.processes, _END_SECONDS)

    def _watch(self) -> None:
        while not (self._find(bool) or self._find_absent()):
            if self._over.wait(_LOOK_SECONDS) or all(process.poll() == 0 for process in self.processes):
                return
        deadline = time.monotonic() + _LAST_SECONDS
        self._found.set()
        if self._over.wait(_ALONE_SECONDS):
            return
        if not self._in_call and not self._is_known:
            self._say("")
        self._end()
        while self._in_call:
            if time.monotonic() > deadline:
                self._say("; rank 0 did not come back, so it ends as well")
                os._exit(1)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)
            if self._over.wait(_AGAIN_SECONDS):  # do not interrupt cleanup code immediately
                return

    def _find(self, failed: Callable[[int | None], bool]) -> bool:
        """Note the first rank that has ended in this way. A rank that was killed comes first, as a cause."""
        if self._lost:
            return True
        ended = [(process.poll(), rank) for rank, process in enumerate(self.processes, 1)]
        for status, rank in sorted((status, rank) for status, rank in ended if status is not None and failed(status)):
            doing = (noted(_path(self._notes[rank])) or "while it started") if self._notes else ""
            more = "; see its output above" if status > 0 else ""
            self._lost = f"{self._described(rank)}, {ending(status)} {doing}".rstrip() + more
            return True
        return False

    def _find_absent(self) -> bool:
        """Note a rank whose script has caught an error of rank 0's current call."""
        if not (self._in_call and self._have_entered):
            return False
        for rank in range(1, len(self._notes)):
            if kind := self._raised_by(rank):
                seen = self._left.setdefault(rank, time.monotonic())
                if time.monotonic() - seen > _ABSENT_SECONDS:
                    self._lost = (
                        f"{self._described(rank)}, has raised {kind} in call {self.calls} of the Trainer, in which "
                        "rank 0 still waited for it"
                    )
                    return True
        return False

    def _described(self, rank: int) -> str:
        return f"rank {rank}, process {self.processes[rank - 1].pid} on {socket.gethostname()}"

    def _say(self, more: str) -> None:
        with suppress(OSError, ValueError):  # the reader of standard error may have ended
            sys.stderr.write(f"{self._lost}{more}\n")
            sys.stderr.flush()

    def _interrupt(self, *_: object) -> None:
        if self._in_call:
            raise RankLost(self._lost)


class MonitoredRank:
    """A rank other than 0 that a monitor watches.

    Args:
        place: The path of this rank's note.
        of_rank_0: The path of rank 0's note.
    """

    def __init__(self, place: str, of_rank_0: str) -> None:
        self.note, self._of_rank_0, self.calls = ActivityFile(Path(place)), Path(of_rank_0), 0
        self._how = ""
        """How the rank has left its last call."""

    def mark_entered(self) -> None:
        """Note that all ranks have entered the same call of the Trainer."""
        self.calls += 1
        self.note.write("in set-up")

    @contextmanager
    def call(self) -> Iterator[None]:
        """Context for a call of the Trainer."""
        # This rank may begin a call, or even end it with an error, while rank 0 still asks about the previous call.
        self.note.write(f"{after_call(self.calls)}{self._how}, in set-up" if self.calls else "in set-up")
        self._how = ""
        try:
            yield
        except BaseException as error:
            self._how = f"{_RAISED}{type(error).__name__}"
            raise
        finally:
            self.note.write(after_call(self.calls) + self._how)

    def await_end(self) -> None:
        """Wait if rank 0 is about to end this process: after an error of this rank alone, or a lost connection.

        Otherwise the collective operations of the next call would be matched with those of rank 0's current call. Or
        the script might fail in its next call and end before rank 0 checks; rank 0 would then report this end as the
        cause.
        """
        while self._how and self.calls and self._of_rank_0.exists():
            if noted(self._of_rank_0).startswith(after_call(self.calls)):
                break
            time.sleep(_LOOK_SECONDS / 2)
        if _lost_connection():
            time.sleep(_DISMISSAL_SECONDS)


class Rank0Watch:
    """Ends a rank when rank 0 ends: Lightning starts ranks as rank 0's children, and they would survive its SIGKILL.

    There is one object per run and rank, between the start of the process group and the teardown of the strategy. Rank
    0 hosts the store. In each other rank, a thread waits for the rank's key over a connection to the store. If rank 0
    dies, the connection closes. In ``teardown``, rank 0 sets the keys of all ranks, because it may end first. Any other
    rank sets its key, because it may end before rank 0, and then waits for the thread: a thread that returned from
    torch's wait while Python ends would abort the process (see decision record 027).

    If the process group does not use a TCP store, or if there is one rank, nothing is watched.

    Args:
        key: A name that only this run uses, the same on all ranks.
    """

    def __init__(self, key: str) -> None:
        self._rank, self._ended = dist.get_rank(), threading.Event()
        self._keys = [f"{key}/{rank}" for rank in range(dist.get_world_size())]
        store = default_store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        self._store: dist.Store | None = None
        self._watchdog: Watchdog | None = None
        if isinstance(store, dist.TCPStore | InterruptibleTCPStore) and len(self._keys) > 1:
            self._store = store
            if self._rank != 0:
                # A separate connection, because a client that waits cannot make another call.
                lost = partial(self._has_lost_rank_0, dist.TCPStore(store.host, store.port, is_master=False))
                message = f"rank {self._rank}: rank 0 is gone, so this process ends as well"
                self._watchdog = Watchdog("relay-rank-0-watch", lost, message=message)
                self._watchdog.start()

    def end(self) -> None:
        """End the watch of this rank; on rank 0, of all ranks."""
        self._ended.set()
        if self._store is None:
            return
        with suppress(dist.DistNetworkError):  # after a failure of rank 0 its store is closed
            for key in self._keys if self._watchdog is None else [self._keys[self._rank]]:
                self._store.set(key, "ended")
        if self._watchdog is not None:
            self._watchdog.join(_ANSWER_SECONDS)

    def _has_lost_rank_0(self, store: dist.TCPStore) -> bool:
        try:
            store.wait([self._keys[self._rank]], _FOREVER)
        except dist.DistNetworkError:
            return not self._ended.is_set() and HostLinks.wait_for_lost() is None  # its error comes instead
        return False


_AT_GLOO = re.compile(r"\[[^\]]*/gloo/[^\]]*:\d+\]")
"""The source location in a message of gloo: ``[.../gloo/transport/tcp/pair.cc:553]``."""


def is_lost_connection(error: BaseException) -> bool:
    """Return whether an error means that a process group has lost a connection or that a wait has timed out.

    Only torch's error types count. An error of user code, such as a missing file in a folder ``gloo`` or a reset
    connection to a data source, does not affect the process group.
    """
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and _AT_GLOO.search(str(error)) is not None
    )


_lost: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
"""Process groups that have lost a connection, with the error. Later operations of such groups fail or hang."""


def note_lost_connection(error: BaseException) -> None:
    """If ``error`` is a lost connection, note that the default process group can no longer be used."""
    if dist.is_initialized() and dist.group.WORLD is not None and is_lost_connection(error):
        _lost[dist.group.WORLD] = f"{type(error).__name__}: {error}"


def _lost_connection() -> str | None:
    """The error of the default process group, if it has lost a connection."""
    return _lost.get(dist.group.WORLD) if dist.is_initialized() and dist.group.WORLD is not None else None


def check_connections() -> None:
    """Check that the default process group, if there is one, has lost no connection in an earlier call.

    Raises:
        RuntimeError: If it has lost a connection.
    """
    if (why := _lost_connection()) is not None:
        raise RuntimeError(
            "This process cannot train, validate, test or predict with the other ranks again, because their process "
            f"group has lost a connection in an earlier call ({why}), and torch cannot reconnect it. Let the error end "
            "this process, so that the launcher can start all ranks again, such as torchrun --max-restarts=1, and "
            "continue from the last checkpoint."
        )


def after_call(number: int) -> str:
    """Return the note of a rank that has left a call of the Trainer."""
    return f"after call {number} of the Trainer"


def new_notes(number: int) -> list[int]:
    """Return file descriptors of memory that exists as long as this process, without leftover files after a kill."""
    return [os.memfd_create("relay-note") for _ in range(number)] if sys.platform == "linux" else []


def places(notes: Sequence[int]) -> list[str]:
    """Return the paths with which other processes of this user open this memory."""
    return [f"/proc/{os.getpid()}/fd/{note}" for note in notes]


def _path(note: int) -> Path:
    return Path(f"/proc/self/fd/{note}")
