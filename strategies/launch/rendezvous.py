"""The rendezvous of the processes of a run, as a URL, and the interface on which they listen.

file:///tmp/relay-x                on one host: files that only this user can read; needs no port
relay://node0:29500/relay-1f0c     under torchrun or SLURM: keys in the common TCP store of the ranks
"""

import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import psutil
from torch import distributed as dist

LOOPBACK = "127.0.0.1"
_FIRST_LOOK_SECONDS, _LOOK_SECONDS = 0.0005, 0.005
"""Polling intervals of a wait: short at first, because processes that start together arrive within milliseconds."""


def store_at(url: str, size: int) -> dist.Store:
    """Connect to the store of a rendezvous.

    Args:
        url: The URL, as above.
        size: The number of processes that connect.
    """
    place = urlparse(url)
    if place.scheme == "file":
        return dist.FileStore(place.path, size)
    assert place.hostname is not None and place.port is not None
    return dist.PrefixStore(place.path, dist.TCPStore(place.hostname, place.port, is_master=False))


class InterruptibleStore(dist.Store):
    """A store whose waits can be interrupted by Ctrl-C and by a failure that ``check`` reports.

    A wait of torch's stores runs in C++ and cannot be interrupted. During ``init_rpc`` it lasts up to 24 days.

    Args:
        store: The underlying store.
        check: Raises an exception if there is no more reason to wait.
        timeout_seconds: Time limit of waits. It overrides the caller's limit: gloo passes its time-out for connections.
    """

    def __init__(self, store: dist.Store, check: Callable[[], None], timeout_seconds: float) -> None:
        super().__init__()
        self._store, self._check, self._seconds = store, check, timeout_seconds

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def set_timeout(self, timeout: timedelta) -> None:
        """Called by gloo."""

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        deadline, sleep_seconds = time.monotonic() + self._seconds, _FIRST_LOOK_SECONDS
        while not self._store.check(keys):
            self._check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"another process of the run did not appear within {self._seconds:g} s")
            time.sleep(sleep_seconds)
            sleep_seconds = min(2 * sleep_seconds, _LOOK_SECONDS)


def check_loopback() -> None:
    """Check that processes of this host can connect to each other.

    Raises:
        RuntimeError: If they cannot, which torch would report by ending the process.
    """
    try:
        with socket.create_server((LOOPBACK, 0)) as listener, socket.create_connection(listener.getsockname(), 5):
            pass
    except OSError as error:
        raise RuntimeError(
            f"The processes of this host connect to each other at {LOOPBACK}, which does not work here: {error}. The "
            "loopback interface may be down, as in a new network namespace: `ip link set lo up` starts it."
        ) from error


def interface_to(address: str) -> tuple[str, str]:
    """Return address and name (empty if not known) of the interface of this host that leads to an address.

    ``GLOO_SOCKET_IFNAME`` selects another interface, as everywhere in torch.
    """
    if address == LOOPBACK:
        return LOOPBACK, next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    addresses = dict(_interfaces())
    if name := os.environ.get("GLOO_SOCKET_IFNAME", ""):
        return addresses.get(name, ""), name
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))  # sends nothing
        own = probe.getsockname()[0]
    return own, next((name for name, its in addresses.items() if its == own), "")


def _interfaces() -> Iterator[tuple[str, str]]:
    """Yield name and IPv4 address of each interface that has an address."""
    for name, addresses in psutil.net_if_addrs().items():
        if own := [address.address for address in addresses if address.family == socket.AF_INET]:
            yield name, own[0]


class InterruptibleTCPStore(InterruptibleStore):
    """A TCP store of this process whose waits can be interrupted."""

    def __init__(self, store: dist.TCPStore, check: Callable[[], None], timeout_seconds: float) -> None:
        super().__init__(store, check, timeout_seconds)
        self.host, self.port = store.host, store.port
