"""Detects a stage that hangs, and distinguishes it from stages that only wait for it.

A stage is alive while its counter of actions increases, its process computes (a long layer, an import, a compilation),
or its Python stack changes. Otherwise it hangs, unless it waits for a neighbour or for the driver. If it still waits
some seconds after another process has failed, its waits are ended. (A process that has died is noticed by
:class:`~strategies.pipeline.control.client.RemoteStage`: RPC reports that its connection has ended.)
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from strategies.commands.host import progress
from strategies.common.activity import Progress
from strategies.launch.session import BUSY_FACTOR
from strategies.pipeline.control.client import RemoteStage

_LOOKS = 10
"""Number of times that each stage is asked within the time-out.

A hang is declared after a number of questions, not after a time, so a suspended machine does not look like a hang.
"""

_LATE_LOOK_SECONDS = 0.5
"""Seconds between two questions after a failure or Ctrl-C, when a stage only has to return its state."""

_BUSY_SHARE = 0.05
"""A process counts as busy if it computes for more than this share of the time."""

_ABORT_SECONDS = 2.0
"""How long a stage may wait after the failure of another process before its waits are ended. Usually the report of the
failure ends them earlier, but a stage that sends may wait for a process that receives nothing any more. The first look
after a failure may come later."""


def abort_waits(host: Any) -> None:
    """End all waits of a stage for other processes, because one of them has failed.

    Args:
        host: The ``RRef`` to the host of the stage.
    """
    host.local_value().hosted.abort_waits()


class Watch:
    """A thread that asks the stages for their progress at regular intervals, and ends stages that hang.

    Args:
        remotes: The stages.
        timeout_seconds: How long a stage may be idle before it is declared hung. A stage may be busy with one action
            for ten times as long.
    """

    def __init__(self, remotes: Sequence[RemoteStage], timeout_seconds: float) -> None:
        self._watched = [_WatchedStage(remote, timeout_seconds) for remote in remotes]
        self._seconds, self._ended = timeout_seconds / _LOOKS, threading.Event()
        self._thread = threading.Thread(target=self._work, name="relay-stage-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._ended.wait(self._seconds):
            for watched in self._watched:
                watched.look()
                if watched.remote.failures.any:
                    self._seconds = min(self._seconds, _LATE_LOOK_SECONDS)


class _WatchedStage:
    """The answers of one stage so far."""

    def __init__(self, remote: RemoteStage, timeout_seconds: float) -> None:
        self.remote, self._timeout_seconds = remote, timeout_seconds
        self._asked: Any = None
        self._last: Progress | None = None
        self._answered_at = 0.0
        self._silent = self._asleep = self._in_one_action = 0  # in looks
        self._waits_since: float | None = None
        self._has_aborted, self._abort_seconds = False, min(_ABORT_SECONDS, timeout_seconds / 2)
        self._has_gone = False

    def look(self) -> None:
        """Evaluate the answer to the last question, if it has arrived, and ask again."""
        if self.remote.is_lost or self._has_gone:
            return
        if self._asked is not None and not self._asked.done():
            self._silent += 1
            if self._silent >= _LOOKS:
                self._give_up("does not answer", "Its process is stopped, or a library in it holds Python's lock.")
            return
        answer = None
        if self._asked is not None:
            answer = self._answer()
        if self._has_gone:
            return
        self._silent, self._asked = 0, self._called(progress)
        if answer is not None:
            self._judge(answer)

    def _called(self, function: Callable[[Any], Any]) -> Any:
        try:
            return self.remote.begin_beside(function)
        except RuntimeError:  # the RPC session of a Pipe has ended
            self._has_gone = True
            return None

    def _answer(self) -> Progress | None:
        try:
            answer: Progress = self._asked.wait()
        except Exception:  # the present command of the stage, or the next command, reports it
            self._has_gone = True
            return None
        return answer

    def _judge(self, now: Progress) -> None:
        before, self._last = self._last, now
        elapsed, self._answered_at = time.monotonic() - self._answered_at, time.monotonic()
        got_on = before is None or now.waits or now.idle or now.num_done != before.num_done
        self._in_one_action = 0 if got_on else self._in_one_action + 1
        busy = before is not None and abs(now.busy_seconds - before.busy_seconds) > _BUSY_SHARE * elapsed
        self._asleep = 0 if got_on or busy or (before and now.stack != before.stack) else self._asleep + 1
        after_failure = now.waits and self.remote.failures.any  # the message that it waits for may never come
        if not after_failure:
            self._waits_since, self._has_aborted = None, False
        elif self._waits_since is None:
            self._waits_since = time.monotonic()
        elif self._has_aborted and time.monotonic() - self._waits_since > self._timeout_seconds:
            self._give_up("still waits after another process has failed", f"Its stack:\n{now.stack}")
        elif not self._has_aborted and time.monotonic() - self._waits_since > self._abort_seconds:
            self._has_aborted, self._waits_since = True, time.monotonic()
            self._called(abort_waits)
        if self._asleep >= _LOOKS:
            self._give_up("hangs", f"Its stack:\n{now.stack}")
        elif self._in_one_action >= _LOOKS * BUSY_FACTOR:
            self._give_up("has run one action for too long", f"Its stack:\n{now.stack}", times=BUSY_FACTOR)

    def _give_up(self, how: str, more: str, *, times: int = 1) -> None:
        seconds, doing = times * self._timeout_seconds, self.remote.process.doing()
        self.remote.give_up(
            f"{how}: it has made no progress {doing} for {seconds:g} s. If it is only slow, raise rpc_timeout_sec. "
            f"{more}"
        )
