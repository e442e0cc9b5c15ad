"""The loopback interface, over which the processes of a host connect, is checked before a process starts."""

import errno
import socket
from typing import Any

import pytest

from strategies.launch.rendezvous import check_loopback
from strategies.launch.workers import Workers


def test_a_loopback_interface_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    check_loopback()

    def unreachable(*_: Any) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    workers = Workers(["stage 0"])
    with pytest.raises(RuntimeError, match=r"at 127.0.0.1, which does not work here:.*unreachable.*ip link set lo up"):
        workers.start(timeout_seconds=1.0, threads=1)
    workers.stop(grace_seconds=0.0)
