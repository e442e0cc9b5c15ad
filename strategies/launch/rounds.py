"""Processes that go back together, as often as one of them has to; what they agree on is in a store that they share.

    round 0   member 0   gate ── gate ── ✗ announces ── its snapshots: 3, 4 ─┐
              member 1   gate ── gate ────── looks ──── its snapshots: 2, 3 ─┴─▶ all go back to 3: round 1 begins

A *gate* stands in front of whatever all members have to do at the same time and none can be brought back from, such as
a collective operation of a process group. Either all members pass it or none does.
"""

import json
import time
from collections.abc import Callable, Collection

from torch import distributed as dist

from strategies.common.torch_compat import default_store
from strategies.launch.rendezvous import InterruptibleTCPStore

_FIRST_LOOK_SECONDS, _LOOK_SECONDS = 0.0002, 0.002

_CLOSED = -(2**40)
"""What a gate counts that a member has closed; others that come to it later do not make it positive."""


class MemberGone(RuntimeError):
    """Raised if a member has left, or does not arrive in time."""


def shared_store(key: str) -> Callable[[], dist.Store]:
    """Return a function that connects to the store of torch's default process group.

    Args:
        key: A name that only this run uses.

    Raises:
        ValueError: If the processes do not meet at a TCP store.
    """
    store = default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore | InterruptibleTCPStore):
        raise ValueError(f"the default process group must use a TCPStore, got a {type(store).__name__}")
    host, port = store.host, store.port
    return lambda: dist.PrefixStore(key, dist.TCPStore(host, port, is_master=False))


class Rounds:
    """One member of a group of processes that restore an earlier state together.

    Args:
        store: Shared by all members, over a connection of this object's own.
        rank: The number of this member.
        size: The number of members.
        timeout_seconds: How long a member may take to come to a gate, or to go back.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_seconds: float) -> None:
        self._store, self.rank, self._size, self._timeout_seconds = store, rank, size, timeout_seconds
        self.number = 0
        """How often all have gone back."""
        self._num_passed = 0

    def announce(self, why: str) -> str:
        """Tell all members that this round is over; return why, as the first one has told it."""
        return self._store.compare_set(f"{self.number}/over", "", why).decode()

    def announced(self) -> str | None:
        """Return why this round is over; ``None`` if it is not. May be called on another thread."""
        key = f"{self.number}/over"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def pass_gate(self, must_return: Callable[[], bool]) -> bool:
        """Wait until all members have come to the same gate; return whether they have.

        Args:
            must_return: Returns whether this member has to go back, so that it must not pass.

        Returns:
            ``False`` if a member has to go back: then no member passes, now or later in this round.

        Raises:
            MemberGone: If a member does not come in time.
        """
        if must_return():
            return False
        key = f"{self.number}/gate/{self._num_passed}"
        sleep_seconds, deadline = _FIRST_LOOK_SECONDS, time.monotonic() + self._timeout_seconds
        found = self._store.add(key, 1)
        while 0 < found < self._size:
            if must_return():  # the others may have come in this moment: then this member passes, too
                found = int(self._store.compare_set(key, str(found), str(_CLOSED)))
                continue
            if self._left():
                break  # what comes after the gate fails
            if time.monotonic() > deadline:
                raise MemberGone(f"another replica did not come to the same point within {self._timeout_seconds:g} s")
            time.sleep(sleep_seconds)
            sleep_seconds = min(2 * sleep_seconds, _LOOK_SECONDS)
            found = int(self._store.get(key))
        if found < 0:
            return False
        self._num_passed += 1
        return True

    def agree(self, numbers: Collection[int], gives_up: Callable[[], bool] = lambda: False) -> int | None:
        """Wait until all members have called this; the next round begins.

        Args:
            numbers: Those that this member can go back to.
            gives_up: Whether this member waits no longer.

        Returns:
            The largest number that all members have given; ``None`` if there is none.

        Raises:
            MemberGone: If a member has left, this one included, or does not come in time.
        """
        names = [f"{self.number}/numbers/{rank}" for rank in range(self._size)]
        self._store.set(names[self.rank], json.dumps(sorted(numbers)))
        sleep_seconds, deadline = _FIRST_LOOK_SECONDS, time.monotonic() + self._timeout_seconds
        while not self._store.check(names):
            if left := self._left():
                raise MemberGone(f"replica {left[0]} has ended its run")
            if gives_up():
                raise MemberGone(f"replica {self.rank} has ended its run")
            if time.monotonic() > deadline:
                raise MemberGone(f"another replica did not go back within {self._timeout_seconds:g} s")
            time.sleep(sleep_seconds)
            sleep_seconds = min(2 * sleep_seconds, _LOOK_SECONDS)
        found = [set(json.loads(self._store.get(name))) for name in names]
        self._num_passed = 0
        self.number += 1
        return max(set.intersection(*found), default=None)

    def leave(self) -> None:
        """Take no part in further rounds."""
        self._store.set(f"left/{self.rank}", "")

    def _left(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self.rank and self._store.check([f"left/{rank}"])]
