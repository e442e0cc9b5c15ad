"""Detects that the network between hosts has failed, in every process on either side.

    host a   rank 0 ◀──────────── rank 2, rank 3        an idle connection from each rank
             rank 1 ──▶ rank 2                          to the first rank of each other host
    host b   rank 2 ◀──────────── rank 0, rank 1
             rank 3 ──▶ rank 0

The processes send nothing over these connections. The kernels probe them every second (TCP keepalive), and answer for a
process that computes, is stopped, or holds Python's lock. So a connection without answers means that the network or the
host has failed. The connections of gloo, RPC and the store cannot be probed in this way: the kernel does not probe a
connection with data under way, and a time limit for such data (``TCP_USER_TIMEOUT``) would end a connection to a
process that computes and does not read.
"""

import atexit
import errno
import faulthandler
import json
import math
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import ClassVar

import psutil
from torch import distributed as dist

from strategies.common.errors import WorkerLost, is_consequence
from strategies.launch.rendezvous import interface_to

_LOOK_SECONDS = 0.1
_TOKEN_SECONDS = 5.0
_TOKEN_BYTES = 16
"""The first bytes of a connection. Other connections are closed."""

_LEAVE_SECONDS = 8.0
"""How long a process may take to end its run after the loss of a host, before it is ended."""

_EXIT_SECONDS = 5
"""How long a process that has lost a host may take to exit, after the handlers of ``atexit`` begin to run."""

_JOIN_SECONDS = 2.0

_CONNECT_SECONDS = 10.0
"""How long a process waits for its connections before its session begins. After that, it begins without them."""

_LOST = b"-"
"""What a process sends to a host that it has lost: its packets may still arrive there, although none come back."""

_SKEW_SECONDS = 3.0
"""How long processes may take to detect the same loss: the kernels probe once per second."""

_MOST_PROBES = 100
"""Maximum number of probes without an answer; the kernel allows 127."""

_SILENT = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}
"""How the kernel reports a connection without answers. A process that ends closes or resets its connections."""


class HostLinks:
    """Watches the connections of this process to the other hosts, on a thread, until :meth:`end`.

    When a host is lost, the thread shuts down all connections of this process to hosts of the run, so that every wait
    for another rank raises an error. It ends the process if the process does not leave its run within 8 s after that.

    On one host, nothing is watched.

    Args:
        connect: Connects to the store of the run.
        key: A name that only this run uses, the same on all ranks.
        rank: The number of this process.
        size: Number of processes.
        address: An address that all processes can reach.
        timeout_seconds: How long a host may be silent.
    """

    lost: ClassVar[str | None] = None
    """Which host this process has lost, in words. The connections to it do not return."""

    are_watched: ClassVar[bool] = False
    """Whether there are other hosts that this process watches."""

    def __init__(
        self, connect: Callable[[], dist.Store], key: str, rank: int, size: int, address: str, timeout_seconds: float
    ) -> None:
        self._connect, self._key, self._rank, self._size = connect, key, rank, size
        self._address, self._seconds = address, timeout_seconds
        self._over, self._token = threading.Event(), secrets.token_hex(_TOKEN_BYTES // 2)
        self._hosts: dict[str, tuple[str, list[int]]] = {}
        """Name and ranks of each host, by its address."""
        self._connected = threading.Event()
        self._thread = threading.Thread(target=self._work, name="relay-host-links", daemon=True)
        self._thread.start()

    @property
    def is_connected(self) -> bool:
        """Whether this process has connected to the other hosts."""
        return self._connected.is_set()

    def wait_until_connected(self) -> None:
        """Wait until this process watches the other hosts, but at most 10 s: another rank may take longer to start."""
        self._connected.wait(_CONNECT_SECONDS)

    @classmethod
    def wait_for_lost(cls) -> str | None:
        """Return which host is lost. Call this after the loss of a connection, of which it may be the cause.

        Another process may have detected the loss of a host first, and have ended.
        """
        deadline = time.monotonic() + _SKEW_SECONDS
        while cls.lost is None and cls.are_watched and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        return cls.lost

    def end(self) -> None:
        """Stop watching. The other processes do not take this for the loss of this host."""
        HostLinks.are_watched = False
        self._over.set()
        self._thread.join(_JOIN_SECONDS)

    def _work(self) -> None:
        # Before all connections exist, the waits of the start-up have time limits and report who does not appear.
        with ExitStack() as stack, suppress(dist.DistError, OSError):
            listener, links = self._open(self._connect(), stack)
            if lost := self._watch(listener, links, stack):
                self._lose(lost)

    def _open(self, store: dist.Store, stack: ExitStack) -> tuple[socket.socket | None, list[socket.socket]]:
        """Connect to the first rank of each other host. Returns this rank's listener and its connections."""
        own, _ = interface_to(self._address)
        store.set(f"{self._key}/host/{self._rank}", json.dumps([socket.gethostname(), own]))
        found: dict[str, tuple[str, list[int]]] = defaultdict(lambda: ("", []))
        for rank in range(self._size):
            name, address = json.loads(self._get(store, f"{self._key}/host/{rank}"))
            found[address] = name, [*found[address][1], rank]
        self._hosts = dict(found)
        first = {address: ranks[0] for address, (_, ranks) in self._hosts.items()}
        listener = None
        if first[own] == self._rank and len(first) > 1:
            listener = stack.enter_context(socket.create_server((own, 0), backlog=self._size))
            store.set(f"{self._key}/port/{self._rank}", f"{listener.getsockname()[1]} {self._token}")
        links = []
        for address, rank in first.items():
            if address != own:
                port, token = self._get(store, f"{self._key}/port/{rank}").decode().split()
                with suppress(ConnectionError):  # that process has ended; the run fails for this reason
                    link = stack.enter_context(socket.create_connection((address, int(port)), self._seconds))
                    link.sendall(token.encode())
                    links.append(probed(link, self._seconds))
        return listener, links

    def _get(self, store: dist.Store, key: str) -> bytes:
        while not store.check([key]):
            if self._over.wait(_LOOK_SECONDS):
                raise ConnectionAbortedError("the run has ended")
        return store.get(key)

    def _watch(self, listener: socket.socket | None, links: list[socket.socket], stack: ExitStack) -> str | None:
        """Return the address of the first host that is lost; ``None`` at the end of the run."""
        hosts = {link: link.getpeername()[0] for link in links}
        self._connected.set()
        HostLinks.are_watched = len(self._hosts) > 1 and not self._over.is_set()
        while not self._over.is_set() and (listener is not None or hosts):
            watched = [*hosts, *([] if listener is None else [listener])]
            for ready in select.select(watched, [], [], _LOOK_SECONDS)[0]:
                if ready is listener:
                    link = self._accepted(listener)
                    if link is not None:
                        hosts[stack.enter_context(link)] = link.getpeername()[0]
                    continue
                try:
                    if ready.recv(1) == _LOST:
                        return hosts[ready]
                except OSError as error:
                    if error.errno in _SILENT:
                        for link, address in hosts.items():
                            if address == hosts[ready]:
                                with suppress(OSError):
                                    link.send(_LOST)
                        return hosts[ready]
                del hosts[ready]  # the other process has ended, or has left the run
        return None

    def _accepted(self, listener: socket.socket) -> socket.socket | None:
        link, (address, _) = listener.accept()
        link.settimeout(_TOKEN_SECONDS)
        with suppress(OSError):
            if address in self._hosts and link.recv(_TOKEN_BYTES, socket.MSG_WAITALL) == self._token.encode():
                return probed(link, self._seconds)
        link.close()
        return None

    def _lose(self, address: str) -> None:
        if self._over.is_set():
            return
        own, _ = interface_to(self._address)
        here, _ = self._hosts[own]
        there, ranks = self._hosts[address]
        HostLinks.lost = (
            f"rank {self._rank} on {here} ({own}) has heard nothing from {there} ({address}), the host of "
            f"{ranks_in_words(ranks)}, for {self._seconds:g} s: the network between the two hosts may be down, or "
            f"{there} may have stopped. A connection that comes back within rpc_timeout_sec continues. The launcher "
            "must start the run again from the last checkpoint."
        )
        atexit.register(_exit_in_time)
        # Also to ranks on this host: a rank may wait for one that waits for the lost host.
        for connection in connections_to(self._hosts):
            with suppress(OSError), connection:
                connection.shutdown(socket.SHUT_RDWR)
        if not self._over.wait(_LEAVE_SECONDS):
            with suppress(OSError, ValueError):  # the reader of standard error may have ended
                sys.stderr.write(f"{HostLinks.lost} This process did not leave its run, so it ends.\n")
                sys.stderr.flush()
            os._exit(1)


def _exit_in_time() -> None:
    """End this process after 5 s, although a destructor of gloo may wait for operations with the lost host."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    faulthandler.dump_traceback_later(_EXIT_SECONDS, exit=True, file=nowhere)  # a thread of C, which needs no lock


def probed(link: socket.socket, seconds: float) -> socket.socket:
    """Make the kernel close a connection whose other side has not answered probes for about ``seconds``."""
    link.settimeout(None)
    interval = max(1, math.ceil(seconds / _MOST_PROBES))
    # The last answer is up to one interval old when the link fails, and the kernel looks once per interval.
    silent = max(seconds - interval, seconds / 2)
    options = {
        "TCP_KEEPIDLE": interval,
        "TCP_KEEPINTVL": interval,
        "TCP_KEEPCNT": max(1, round(silent / interval)),
        "TCP_USER_TIMEOUT": round(1000 * silent),  # Linux only, where it replaces the count
    }
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return link


def connections_to(addresses: Collection[str]) -> Iterator[socket.socket]:
    """Yield the TCP connections of this process to IPv4 addresses, as sockets that share them."""
    for each in psutil.Process().net_connections("tcp"):
        if each.raddr and each.raddr.ip.removeprefix("::ffff:") in addresses:
            with suppress(OSError):  # closed in the meantime
                yield socket.socket(fileno=os.dup(each.fd))


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ``rank 2`` or ``ranks 2 and 3``, or for many ranks ``ranks 8 to 15``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    is_range = list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    if is_range and len(ranks) > 2:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


@contextmanager
def explaining_lost_hosts() -> Iterator[None]:
    """Context of a run. An error of a connection becomes an error that names the lost host, if there is one.

    Raises:
        RuntimeError: In place of the error of the connection; or at once, if this process has lost a host before.
    """
    if HostLinks.lost is not None:
        raise RuntimeError(f"{HostLinks.lost} This process cannot train with the other ranks again.")
    try:
        yield
    except RuntimeError as error:
        is_lost = isinstance(error, dist.DistError | WorkerLost) or is_consequence(error)
        if (lost := HostLinks.wait_for_lost() if is_lost else HostLinks.lost) is None:
            raise
        raise RuntimeError(lost) from error
