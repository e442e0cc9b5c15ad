"""Which errors say that a process group has lost a connection; when the thread ends that watches rank 0."""

import socket
import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from strategies.common.errors import WorkerLost
from strategies.launch import rank_monitor
from strategies.launch.rank_monitor import Rank0Watch, is_lost_connection

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:48867"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        RuntimeError(f"Gloo connectFullMesh failed with {GLOO}"),
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv"),
        dist.DistNetworkError("failed to recv, got 0 bytes"),
    ],
)
def test_errors_of_a_process_group(error: Exception) -> None:
    assert is_lost_connection(error)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file or directory", "/data/gloo/rows.csv"),
        RuntimeError("cannot read /data/gloo/rows.csv:17"),
        ConnectionResetError(104, "Connection reset by peer"),
        ValueError(GLOO),
        WorkerLost(f"stage 1: {GLOO}"),
    ],
)
def test_errors_of_something_else(error: Exception) -> None:
    """The ranks stay, and so does the error: it is the user's, or that of a stage."""
    assert not is_lost_connection(error)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.TCPStore]:
    """The store of three ranks, all of which are this process."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port, descriptor = listener.getsockname()[1], listener.detach()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    monkeypatch.setattr(rank_monitor, "default_store", lambda: dist.PrefixStore("default_pg", store))
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    yield store
    for rank in range(3):
        store.set(f"run/{rank}", "")  # of a test that fails: a thread that lost its store would end this process


def watch_of(rank: int, monkeypatch: pytest.MonkeyPatch) -> Rank0Watch:
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    return Rank0Watch("run")


def num_watching() -> int:
    return sum(thread.name == "relay-rank-0-watch" for thread in threading.enumerate())


def test_a_rank_that_ends_before_rank_0_ends_its_own_thread_only(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python would end with the thread inside torch's wait, and abort if rank 0 ended the wait in that moment."""
    ranks = [watch_of(rank, monkeypatch) for rank in (1, 2)]
    assert num_watching() == 2
    for left, rank in zip((1, 0), ranks, strict=True):
        rank.end()
        assert num_watching() == left


def test_rank_0_ends_the_threads_of_ranks_that_end_later(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they would find that rank 0 is gone, which may end as soon as its own work is done."""
    rank_0, *others = [watch_of(rank, monkeypatch) for rank in range(3)]
    rank_0.end()
    for rank in others:
        assert rank._watchdog is not None
        rank._watchdog.join()
    assert num_watching() == 0
    for rank in others:
        rank.end()
