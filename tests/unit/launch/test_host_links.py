"""Connections to other hosts: what the kernel probes, and what counts as the loss of a host. See also test_hosts.py."""

import errno
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from strategies.common.errors import WorkerLost
from strategies.launch import host_links
from strategies.launch.host_links import HostLinks, explaining_lost_hosts, probed, ranks_in_words

HOSTS = ["127.0.0.1", "127.0.0.1", "127.0.0.2"]
"""The address of each rank. All of 127.0.0.0/8 is of the loopback interface."""


@pytest.fixture(autouse=True)
def _nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(HostLinks, "lost", None)
    monkeypatch.setattr(HostLinks, "are_watched", False)
    monkeypatch.setattr(host_links, "_exit_in_time", lambda: None)  # the process of the tests does not end
    yield


@pytest.fixture
def own_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of the store that a rank is given is its own address."""
    monkeypatch.setattr(host_links, "interface_to", lambda address: (address, "lo"))


def wait_until(holds: Any) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def links_over(store: dist.Store, hosts: list[str]) -> list[HostLinks]:
    return [
        HostLinks(lambda: store, "run", rank, len(hosts), address, timeout_seconds=60.0)
        for rank, address in enumerate(hosts)
    ]


def num_probed() -> int:
    """The connections of this process that its kernel probes."""
    found = list(host_links.connections_to(HOSTS))
    number = sum(link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for link in found)
    for link in found:
        link.close()
    return number


@pytest.mark.usefixtures("own_addresses")
def test_each_rank_is_connected_to_the_first_rank_of_each_other_host() -> None:
    before = num_probed()
    links = links_over(dist.HashStore(), HOSTS)
    wait_until(lambda: num_probed() == before + 6)  # 0-2, 1-2 and 2-0, from both sides
    links[0].end()  # is no loss for the other ranks
    time.sleep(0.3)
    assert HostLinks.lost is None
    for each in links:
        each.end()
    assert num_probed() == before and HostLinks.lost is None


@pytest.mark.usefixtures("own_addresses")
def test_nothing_is_watched_on_one_host() -> None:
    before = num_probed()
    links = links_over(dist.HashStore(), ["127.0.0.1"] * 3)
    wait_until(lambda: not any(each._thread.is_alive() for each in links))
    assert num_probed() == before and not HostLinks.are_watched


@pytest.mark.usefixtures("own_addresses")
def test_a_stranger_is_not_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_links, "_TOKEN_SECONDS", 0.2)
    store = dist.HashStore()
    links = links_over(store, HOSTS)
    wait_until(lambda: store.check(["run/port/2"]))
    port = int(store.get("run/port/2").split()[0])
    with socket.create_connection(("127.0.0.2", port)) as stranger:
        stranger.sendall(b"x" * 16)
        stranger.settimeout(20)
        assert stranger.recv(1) == b""
    for each in links:
        each.end()


@pytest.mark.usefixtures("own_addresses")
@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EHOSTUNREACH])
def test_a_silent_host_ends_every_wait(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports the silence; a connection to that host is then shut down."""
    served = socket.create_server(("127.0.0.2", 0))
    waiting = socket.create_connection(served.getsockname())

    class Silent(socket.socket):
        def recv(self, *_: Any) -> bytes:
            raise OSError(number, "silent")

    def silent(link: socket.socket, _: float) -> socket.socket:
        other = Silent(fileno=link.detach())
        other.settimeout(None)
        return other

    monkeypatch.setattr(host_links, "probed", silent)
    links = links_over(dist.HashStore(), HOSTS[1:])
    wait_until(lambda: all(each.is_connected for each in links))
    links[1].end()  # so that the connection becomes readable
    waiting.settimeout(20)
    assert waiting.recv(1) == b""
    links[0].end()
    assert HostLinks.lost is not None
    assert "rank 0 on" in HostLinks.lost and "(127.0.0.2), the host of rank 1, for 60 s" in HostLinks.lost
    served.close()
    waiting.close()


@pytest.mark.usefixtures("own_addresses")
def test_a_host_that_has_lost_this_one_says_so() -> None:
    """Packets may be lost in one direction only. The other process ends, which is not how a rank leaves a run."""
    store = dist.HashStore()
    links = links_over(store, HOSTS[1:])
    wait_until(lambda: all(each.is_connected for each in links))
    port, token = store.get("run/port/0").decode().split()
    with socket.create_connection((HOSTS[1], int(port)), source_address=(HOSTS[2], 0)) as other:
        other.sendall(token.encode() + host_links._LOST)
        wait_until(lambda: HostLinks.lost is not None)
    assert HostLinks.lost is not None and "rank 0 on" in HostLinks.lost
    for each in links:
        each.end()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux only")
@pytest.mark.parametrize(("seconds", "interval", "silent_ms"), [(60.0, 1, 59_000), (300.0, 3, 297_000), (1.0, 1, 500)])
def test_what_the_kernel_probes(seconds: float, interval: int, silent_ms: int) -> None:
    with socket.socket() as link:
        probed(link, seconds)
        options = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT]
        assert [link.getsockopt(socket.IPPROTO_TCP, each) for each in options] == [interval, interval, silent_ms]
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_an_error_of_a_connection_names_the_lost_host() -> None:
    def lose() -> None:
        HostLinks.lost = "b is silent"

    HostLinks.are_watched = True
    timer = threading.Timer(0.3, lose)  # another process has found it first
    timer.start()
    with pytest.raises(RuntimeError, match="b is silent"), explaining_lost_hosts():
        raise WorkerLost("stage 1")
    with pytest.raises(RuntimeError, match="b is silent This process cannot train"), explaining_lost_hosts():
        raise AssertionError("not reached")
    timer.join()


@pytest.mark.parametrize("error", [ValueError("of a layer"), RuntimeError("of a layer"), WorkerLost("stage 1")])
def test_other_errors_stay(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)), explaining_lost_hosts():
        raise error


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([2], "rank 2"), ([2, 3], "ranks 2 and 3"), ([8, 9, 10], "ranks 8 to 10"), ([0, 2, 4], "ranks 0, 2 and 4")],
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert ranks_in_words(ranks) == words


@pytest.mark.usefixtures("own_addresses")
def test_a_rank_that_ends_before_it_accepts_is_not_lost() -> None:
    """The kernel resets the connection, with the token unread."""
    store = dist.HashStore()
    store.set("run/host/1", json.dumps(["b", "127.0.0.2"]))
    with socket.create_server(("127.0.0.2", 0)) as never_accepts:
        store.set("run/port/1", f"{never_accepts.getsockname()[1]} {'0' * 16}")
        links = HostLinks(lambda: store, "run", 0, 2, "127.0.0.1", 60.0)
        wait_until(lambda: links.is_connected)
    time.sleep(0.3)
    links.end()
    assert HostLinks.lost is None
