"""Where the processes of a run meet, as a URL that ``init_rpc`` takes as well, and on which interface they listen.

file:///tmp/relay-x                on one host: files that only this user can read; no port is agreed on
relay://node0:29500/relay-1f0c     where ranks have been started from outside: keys in their common TCP store
"""

import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, urlparse

from torch import distributed as dist
from torch.distributed import register_rendezvous_handler

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
"""From ``linux/sockios.h``: asks for the address of an interface."""


def store_at(url: str, size: int) -> dist.Store:
    """Connects to a meeting place.

    Args:
        url: As above.
        size: How many processes meet there.
    """
    place = urlparse(url)
    if place.scheme == "file":
        return dist.FileStore(place.path, size)
    assert place.hostname is not None and place.port is not None
    return dist.PrefixStore(place.path, dist.TCPStore(place.hostname, place.port, is_master=False))


def _rendezvous(url: str, **kwargs: Any) -> Iterator[tuple[dist.Store, int, int]]:
    asked = parse_qs(urlparse(url).query)
    rank, size = int(asked["rank"][0]), int(asked["world_size"][0])
    yield store_at(url, size), rank, size


register_rendezvous_handler("relay", _rendezvous)


def interface_towards(address: str) -> tuple[str, str]:
    """The interface of this host that leads to an address: its own address, and its name (empty if not known).

    ``GLOO_SOCKET_IFNAME`` names another one, as everywhere in torch.
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
    """Name and IPv4 address of each interface, where the system tells."""
    if sys.platform != "linux":
        return
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # has no address
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                yield name, socket.inet_ntoa(answer[20:24])
