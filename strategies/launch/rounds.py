"""Processes that return to an earlier state together whenever one of them must. A shared store coordinates them.

    round 0   member 0   gate ── gate ── ✗ announces ── tells: snapshots 3, 4 ─┐
              member 1   gate ── gate ────── checks ─── tells: snapshots 2, 3 ─┴─▶ all know both: round 1 begins

A *gate* precedes an operation that all members must run at the same time and that cannot be interrupted, such as a
collective operation of a process group. Either all members pass it or none.
"""

import json
import time
from collections.abc import Callable
from typing import Any

from torch import distributed as dist

from strategies.common.torch_compat import default_store
from strategies.launch.rendezvous import InterruptibleTCPStore

_FIRST_LOOK_SECONDS, _LOOK_SECONDS = 0.0002, 0.002

_CLOSED = -(2**40)
"""The count of a gate that a member has closed. Members that reach it later cannot make it positive."""


class MemberGone(RuntimeError):
    """Raised if a member has left, or does not arrive in time."""


def shared_store(key: str) -> Callable[[], dist.Store]:
    """Return a function that connects to the store of torch's default process group.

    Args:
        key: A name that only this run uses.

    Raises:
        ValueError: If the process group does not use a TCP store.
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
        store: The store of all members, over a separate connection for this object.
        rank: The number of this member.
        size: The number of members.
        timeout_seconds: How long a member may take to reach a gate, or to return.
        kind: What a member is, in messages.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_seconds: float, kind: str = "replica") -> None:
        self._store, self.rank, self.size, self._timeout_seconds = store, rank, size, timeout_seconds
        self.kind = kind
        self.number = 0
        """How often all members have returned."""
        self._num_passed = 0

    def announce(self, why: str) -> str:
        """Announce to all members that this round is over. Returns the reason of the first announcement."""
        return self._store.compare_set(f"{self.number}/over", "", why).decode()

    def announced(self) -> str | None:
        """Return why this round is over; ``None`` if it is not. May be called on another thread."""
        key = f"{self.number}/over"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def pass_gate(self, must_return: Callable[[], bool]) -> bool:
        """Wait until all members have reached the same gate, and return whether they have.

        Args:
            must_return: Returns whether this member must return to an earlier state, so that it must not pass.

        Returns:
            ``False`` if a member must return. In that case no member passes, now or later in this round.

        Raises:
            MemberGone: If a member does not arrive in time.
        """
        if must_return():
            return False
        key = f"{self.number}/gate/{self._num_passed}"
        sleep_seconds, deadline = _FIRST_LOOK_SECONDS, time.monotonic() + self._timeout_seconds
        found = self._store.add(key, 1)
        while 0 < found < self.size:
            if must_return():  # if all other members have arrived at this moment, this member passes, too
                found = int(self._store.compare_set(key, str(found), str(_CLOSED)))
                continue
            if self._left():
                break  # the operation after the gate fails
            if time.monotonic() > deadline:
                raise MemberGone(f"another {self.kind} did not reach the same point within {self._timeout_seconds:g} s")
            time.sleep(sleep_seconds)
            sleep_seconds = min(2 * sleep_seconds, _LOOK_SECONDS)
            found = int(self._store.get(key))
        if found < 0:
            return False
        self._num_passed += 1
        return True

    def tell(self, states: Any, gives_up: Callable[[], bool] = lambda: False) -> list[Any]:
        """Wait until all members have called this. Then the next round begins.

        Args:
            states: The states to which this member can return, in any form that JSON knows.
            gives_up: Returns whether this member must stop waiting.

        Returns:
            What each member has passed.

        Raises:
            MemberGone: If any member has left or does not arrive in time.
        """
        names = [f"{self.number}/states/{rank}" for rank in range(self.size)]
        self._store.set(names[self.rank], json.dumps(states))
        sleep_seconds, deadline = _FIRST_LOOK_SECONDS, time.monotonic() + self._timeout_seconds
        while not self._store.check(names):
            if left := self._left():
                raise MemberGone(f"{self.kind} {left[0]} has ended its run")
            if gives_up():
                raise MemberGone(f"{self.kind} {self.rank} has ended its run")
            if time.monotonic() > deadline:
                raise MemberGone(f"another {self.kind} did not return to a snapshot within {self._timeout_seconds:g} s")
            time.sleep(sleep_seconds)
            sleep_seconds = min(2 * sleep_seconds, _LOOK_SECONDS)
        told = [json.loads(self._store.get(name)) for name in names]
        self._num_passed = 0
        self.number += 1
        return told

    def report(self, number: int) -> None:
        """Report the number of the newest state to which this member can return in this round."""
        self._store.set(f"{self.number}/newest/{self.rank}", str(number))

    def all_have(self, number: int) -> bool:
        """Return whether all members have reported, in this round, a state with this number or a larger one."""
        names = [f"{self.number}/newest/{rank}" for rank in range(self.size)]
        return self._store.check(names) and all(int(self._store.get(name)) >= number for name in names)

    def leave(self) -> None:
        """Leave the group, and take no part in further rounds."""
        self._store.set(f"left/{self.rank}", "")

    def _left(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank and self._store.check([f"left/{rank}"])]
