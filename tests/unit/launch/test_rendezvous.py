"""The loopback interface, over which the processes of a host connect, is checked before a process starts."""

import errno
import socket
from typing import Any

import pytest

from strategies.launch.rendezvous import check_loopback, interface_to
from strategies.launch.workers import Workers


def test_the_interface_to_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.2 is an address of this host, like that of another interface."""
    loopback = "127.0.0.1", next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    assert interface_to("127.0.0.1") == interface_to("127.0.0.2") == loopback
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", loopback[1])
    assert interface_to("10.0.0.1") == loopback
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    assert interface_to("10.0.0.1") == ("", "no-such-interface")


def test_a_loopback_interface_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    check_loopback()

    def unreachable(*_: Any) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    workers = Workers(["stage 0"])
    with pytest.raises(RuntimeError, match=r"at 127.0.0.1, which does not work here:.*unreachable.*ip link set lo up"):
        workers.start(timeout_seconds=1.0, threads=1)
    workers.stop(grace_seconds=0.0)
