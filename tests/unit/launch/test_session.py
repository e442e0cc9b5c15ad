"""What a process of a session sets for NCCL, and that it is set when a worker connects its devices."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from strategies.common.activity import Activity
from strategies.launch import session as session_module
from strategies.launch.session import Session, variables_of_nccl
from strategies.pipeline.worker import process

SESSION = Session("file:///nowhere", "token", 2, timeout_seconds=1, threads=1, paths=[], driver_pid=0)


def test_on_one_host_nccl_listens_on_the_loopback_interface_only() -> None:
    assert variables_of_nccl(SESSION, {})["NCCL_SOCKET_IFNAME"].startswith("lo")
    elsewhere = Session("", "", 2, timeout_seconds=1, threads=1, paths=[], driver_pid=0, reachable_address="10.0.0.1")
    assert "NCCL_SOCKET_IFNAME" not in variables_of_nccl(elsewhere, {})


def test_a_variable_that_the_user_has_set_stays() -> None:
    base = {"NCCL_SOCKET_IFNAME": "eth0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    assert not base.keys() & variables_of_nccl(SESSION, base).keys()


def test_the_watchdog_of_torch_ends_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, str] = {}

    def open_transport(*args: Any) -> Any:
        found.update(os.environ)
        raise KeyError("enough")

    names = [
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS",
        "TORCH_NCCL_ENABLE_MONITORING",
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
    ]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(process, "open_transport", open_transport)
    placement = SimpleNamespace(process_of=(0, 1), driver=1)
    payload: Any = SimpleNamespace(plane="nccl", index=0, device="cpu", placement=placement, ties=())
    group: Any = None  # of the host plane, which the double does not use
    with pytest.raises(KeyError, match="enough"):
        process._transport(payload, group, SESSION, Activity())
    assert [found.get(name) for name in names] == ["0"] * len(names)
    assert not any(name in os.environ for name in names)


def test_rpc_starts_to_listen_on_the_interface_of_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads the variable when the agent starts. Otherwise it takes the address of the name of the host."""
    found: list[str | None] = []
    monkeypatch.setattr(session_module.rpc, "TensorPipeAgent", lambda *_: None)
    monkeypatch.setattr(session_module, "store_at", lambda *_: HashStore())
    monkeypatch.setattr(session_module, "set_autograd_number", lambda _: None)
    monkeypatch.setattr(session_module, "set_rpc_agent", lambda _: found.append(os.environ.get("TP_SOCKET_IFNAME")))
    monkeypatch.setattr(Session, "has_been", Session.has_been)
    session_module.join_rpc(SESSION, 0)
    assert found[0] is not None and found[0].startswith("lo")
    assert "TP_SOCKET_IFNAME" not in os.environ
