"""One run's processes and how they find each other: RPC for control, a gloo group for activations and gradients.

A session lasts from the start of the workers to their end; a process may have many, one after another.
"""

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import rpc

from strategies.pipeline.meeting import LOOPBACK, interface_towards, store_at


@dataclass(frozen=True)
class Session:
    """What every process of a session knows.

    Attributes:
        meeting: Where the processes meet; see :mod:`~strategies.pipeline.meeting`.
        token: Makes the RPC names of this session unlike those of any other.
        size: Number of processes, which is that of stages; a rank is a stage's number, the driver's is the last.
        timeout_seconds: How long to wait for another process.
        rpc_sessions: How many times the driver has initialised RPC before; torch puts it into the keys under which
            processes meet, so every process must agree on it.
        threads: Number of threads that each process computes with.
        paths: The driver's ``sys.path``.
        driver_pid: The driver's process id; workers that it has started itself end when it has gone.
        towards: An address that all can reach; each process listens on the interface that leads there.
    """

    meeting: str
    token: str
    size: int
    timeout_seconds: float
    rpc_sessions: int
    threads: int
    paths: list[str]
    driver_pid: int
    towards: str = LOOPBACK

    def name(self, rank: int) -> str:
        """The RPC name of a process."""
        return f"relay-{self.token}-{rank}"

    def to_json(self) -> str:
        """The description as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Session":
        """Reads what :meth:`to_json` wrote."""
        return cls(**json.loads(text))


def refuse_other_rpc() -> None:
    """Checks that this process takes part in no RPC session.

    Raises:
        RuntimeError: If it does.
    """
    if rpc.api._is_current_rpc_agent_set():
        raise RuntimeError(
            "torch.distributed.rpc is already initialised in this process, which can only take part in one RPC session "
            "at a time; end the other one (rpc.shutdown, or the teardown of the other pipeline) first"
        )


def join_rpc(session: Session, rank: int) -> None:
    """Initialises RPC and returns when every process of the session has.

    Raises:
        RuntimeError: If a process does not appear within the session's time-out.
    """
    # Unique names and equal counters are two of the three things that a second RPC session in one process needs; the
    # third is a shutdown that waits for nobody, after both sides have agreed to end.
    rpc._init_counter = session.rpc_sessions
    # Within RPC the driver is number 0: torch's autograd context, which RPC sets up, takes one number for the whole
    # life of a process.
    number = (rank + 1) % session.size
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=4,
        _transports=["uv"],  # the default on one machine, "shm", polls without pause: a core a process, for nothing
        _channels=["basic"],  # others open dozens of listening sockets, for tensors that do not travel this way
        rpc_timeout=session.timeout_seconds,
        init_method=f"{session.meeting}/rpc",
    )
    _, name = interface_towards(session.towards)
    interface = {"TP_SOCKET_IFNAME": name, "GLOO_SOCKET_IFNAME": name} if name else {}
    with environment_variables(**interface), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are using a Backend")  # init_rpc's own use of gloo
        rpc.init_rpc(session.name(rank), rank=number, world_size=session.size, rpc_backend_options=options)


def leave_rpc() -> None:
    """Ends this process's part in RPC, without waiting for anybody."""
    if rpc.api._is_current_rpc_agent_set():
        with _without_lines(b"RPC agent for relay-"):
            rpc.shutdown(graceful=False)


def join_data_plane(session: Session, rank: int) -> dist.ProcessGroup:
    """Connects the data plane and returns when every process of the session has."""
    group = join_group(f"{session.meeting}/data", rank, session.size, session.timeout_seconds, session.towards)
    _let_computing_go_first("gloo_tcp_loop")
    return group


def join_group(url: str, rank: int, size: int, timeout_seconds: float, towards: str = LOOPBACK) -> dist.ProcessGroup:
    """Connects ``size`` processes that meet at ``url``, and returns when all are there.

    The group is private: torch's default group, which metrics and loggers look at, stays what it was.
    """
    gloo: Any = dist.ProcessGroupGloo  # the stubs of torch 2.13 lack what its constructor takes
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_seconds)
    address, name = interface_towards(towards)
    options._devices = [gloo.create_device(hostname=address) if address else gloo.create_device(interface=name)]
    store = store_at(url, size)
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = gloo(dist.PrefixStore("gloo/", store), rank, size, options)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def _let_computing_go_first(thread_name: str) -> None:
    """Keeps gloo's event loop from interrupting the thread that computes.

    A loop woken by arriving data while that thread is in the middle of a send spins, waiting for it, on the core that
    it has just taken from it. Batch scheduling (Linux) lets it run wherever a core is free, but interrupt nothing.
    """
    if sys.platform != "linux":
        return
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread may end, and a sandbox may refuse; it is only slower then
            if (task / "comm").read_text().strip() == thread_name:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


def rpc_sessions() -> int:
    """How many times this process has initialised RPC."""
    return rpc._init_counter


@contextmanager
def _without_lines(part: bytes) -> Iterator[None]:
    """Keeps lines that contain ``part`` from standard error, whichever library writes them.

    RPC warns of each connection that closes, and its C++ logger has no level that could be set at run time.
    """
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            os.write(2, b"".join(line for line in file if part not in line))


@contextmanager
def environment_variables(**variables: str) -> Iterator[None]:
    """Sets variables for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
