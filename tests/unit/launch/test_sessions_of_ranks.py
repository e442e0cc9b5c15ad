"""The driver's side of a session whose workers are ranks of the user's launcher."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import run
from rpc_workers import rpc_workers
from torch.distributed import HashStore, rpc

from strategies.common.errors import WorkerLost
from strategies.launch.ranks import Ranks, World, over_key
from strategies.launch.session import Session
from strategies.launch.workers import Workers

WORLD = World("127.0.0.1", 1, 0, 2, num_stages=2, num_local=2)


def test_a_worker_that_ends_while_the_processes_connect(tmp_path: Path) -> None:
    """Those that wait for it read in the store that the session is over."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ranks, store = Ranks(WORLD), HashStore()
    ranks._session = Session("", "", 2, 1, 1, [], os.getpid(), notes=str(tmp_path))
    ranks._store, ranks._session_key, ranks._processes = store, "a", {0: (os.uname().nodename, process.pid)}
    ranks._check()
    assert not store.check([over_key("a")])
    process.communicate(b"\n")
    with pytest.raises(WorkerLost, match=rf"stage 0, process {process.pid} \(rank 1\) on .*, has ended"):
        ranks._check()
    assert store.check([over_key("a")])


def within_the_users_session() -> None:
    with rpc_workers(0):
        for workers in (Ranks(WORLD), Workers(["stage 0"])):
            with pytest.raises(RuntimeError, match="already initialised in this process"):
                workers.start(timeout_seconds=1.0, threads=1)
            workers.stop(grace_seconds=0.0)
            assert rpc.get_worker_info().name == "worker0"


def test_the_users_rpc_session_is_neither_used_nor_ended() -> None:
    run(within_the_users_session)
