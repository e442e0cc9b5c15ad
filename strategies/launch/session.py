"""The processes of one run and their connections: RPC for results and failures, a gloo group for commands and values.

A session lasts from the start of the workers to their end. A process may have many sessions, one after another.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from threading import TIMEOUT_MAX, Event
from typing import Any, ClassVar

from torch import distributed as dist
from torch.distributed import rpc

from strategies.common.torch_compat import (
    add_gloo_backend,
    gloo_options,
    group_without_backend,
    rpc_is_initialized,
    rpc_options,
    set_autograd_number,
    set_rpc_agent,
)
from strategies.launch.rendezvous import LOOPBACK, InterruptibleStore, interface_to, store_at

BUSY_FACTOR = 10
"""A process may be busy with one action, or wait for a busy process, for this many times ``rpc_timeout_sec``."""

_CONNECT_SECONDS = 7.5
"""How long processes may take to connect once all have arrived. gloo waits this long for a process that is killed while
they connect: less than the ten seconds within which all processes of a failed run end."""

_OF_GLOO = 5
"""gloo waits for a connection for this many times its time-out."""

_LOOK_SECONDS = 0.01

_VARIABLES_OF_NCCL = {
    # torch warns that the sends and receives of a communicator run one after another, which Relay relies on.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
    # torch's watchdog would end a process after an error of NCCL or CUDA, which Relay reports or recovers from.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""The variables that torch reads when it creates a communicator."""


@dataclass(frozen=True)
class Session:
    """The description of a session that each of its processes has.

    Attributes:
        rendezvous: The URL of the rendezvous; see :mod:`~strategies.launch.rendezvous`.
        token: Part of the RPC names of this session, so that they differ from those of other sessions.
        size: Number of processes, one per stage. A rank is the number of a stage; the driver has the last rank.
        timeout_seconds: Time-out of waits for another process.
        threads: Number of threads with which each process computes.
        paths: The driver's ``sys.path``.
        driver_pid: The process id of the driver. Workers that the driver started end with that process.
        reachable_address: An address that all processes can reach; each listens on the interface that leads to it.
        notes: A directory on the host of the driver, where the processes of that host note their activity.
    """

    rendezvous: str
    token: str
    size: int
    timeout_seconds: float
    threads: int
    paths: list[str]
    driver_pid: int
    reachable_address: str = LOOPBACK
    notes: str = ""

    has_been: ClassVar[bool] = False
    """Whether this process is or was part of a session."""

    @property
    def patience_seconds(self) -> float:
        """How long a process of the session waits for another process that is not known to hang."""
        return BUSY_FACTOR * self.timeout_seconds

    def note(self, rank: int) -> Path | None:
        """The file in which a process notes its activity; ``None`` unless it is on the driver's host."""
        return Path(self.notes) / f"doing-{rank}" if os.path.isdir(self.notes) else None

    def forget(self) -> None:
        """Remove the files that the processes have written for each other."""
        shutil.rmtree(self.notes, ignore_errors=True)

    def name(self, rank: int) -> str:
        """The RPC name of a process."""
        return f"relay-{self.token}-{rank}"

    def to_json(self) -> str:
        """The description as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Session":
        """Return the description that :meth:`to_json` wrote."""
        return cls(**json.loads(text))


def check_timeout(seconds: float) -> None:
    """Check the value of ``rpc_timeout_sec``.

    Raises:
        ValueError: If it is not a finite number above 0.
    """
    if not isinstance(seconds, int | float) or not 0 < seconds < TIMEOUT_MAX:
        raise ValueError(f"rpc_timeout_sec must be a finite number of seconds above 0, got {seconds!r}.")


def refuse_other_rpc() -> None:
    """Check that this process is not part of an RPC session.

    Raises:
        RuntimeError: If it is part of one.
    """
    if rpc_is_initialized():
        raise RuntimeError(
            "torch.distributed.rpc is already initialised in this process, which can only take part in one RPC session "
            "at a time; end the other session (rpc.shutdown, or the teardown of the other pipeline) first"
        )


def join_rpc(session: Session, rank: int, check: Callable[[], None] = lambda: None) -> None:
    """Join RPC, and return when every process of the session has joined.

    This is the part of ``init_rpc`` that Relay needs. The rest of ``init_rpc`` creates a process group. There, it would
    wait 24 days for a process that has been killed, and could not be interrupted.

    Args:
        session: The session.
        rank: The rank of this process.
        check: Called repeatedly during the wait. Ends the wait by raising an exception.

    Raises:
        RuntimeError: If a process does not appear within the session's time-out.
    """
    # Within RPC the driver has number 0, because torch's autograd context, which RPC sets up, accepts only one number
    # per process.
    number = (rank + 1) % session.size
    options = rpc_options(num_threads=4, timeout_seconds=session.timeout_seconds)
    store = InterruptibleStore(store_at(f"{session.rendezvous}/rpc", session.size), check, session.timeout_seconds)
    set_autograd_number(number)
    _, name = interface_to(session.reachable_address)
    with environment_variables(**{"TP_SOCKET_IFNAME": name} if name else {}):
        agent = rpc.TensorPipeAgent(store, session.name(rank), number, session.size, options, {}, [])
        set_rpc_agent(agent)  # starts to listen; without the variable, where the name of the host resolves to
    Session.has_been = True


def leave_rpc() -> None:
    """Leave RPC without waiting for other processes."""
    if rpc_is_initialized():
        with _without_lines(b"RPC agent for relay-"):
            rpc.shutdown(graceful=False)


def join_data_plane(session: Session, rank: int, check: Callable[[], None] = lambda: None) -> dist.ProcessGroup:
    """Connect the data plane, and return when every process has connected; see :func:`join_rpc`."""
    url, seconds = f"{session.rendezvous}/data", session.patience_seconds
    group = join_group(url, rank, session.size, seconds, session.reachable_address, check)
    _let_computing_go_first("gloo_tcp_loop")
    return group


def join_group(
    url: str,
    rank: int,
    size: int,
    timeout_seconds: float,
    reachable_address: str = LOOPBACK,
    check: Callable[[], None] = lambda: None,
) -> dist.ProcessGroup:
    """Connect ``size`` processes through the store at ``url``, and return when all have connected.

    The group is private: torch's default group, which metrics and loggers use, does not change.
    """
    gloo: Any = dist.ProcessGroupGloo  # the stubs of torch 2.13 lack parameters of its constructor
    address, name = interface_to(reachable_address)
    device = gloo.create_device(hostname=address) if address else gloo.create_device(interface=name)
    options = gloo_options(device, timedelta(seconds=min(timeout_seconds, _CONNECT_SECONDS) / _OF_GLOO))
    place = store_at(url, size)
    store = InterruptibleStore(place, check, timeout_seconds)
    store.set(f"arrived/{rank}", "")
    store.wait([f"arrived/{other}" for other in range(size)])
    group = group_without_backend(store, rank, size)

    def connect(check_caller: Callable[[], None]) -> Any:
        addresses = InterruptibleStore(place, check_caller, timeout_seconds)  # kept: C++ does not
        return gloo(dist.PrefixStore("gloo/", addresses), rank, size, options)

    backend = _beside(connect, check)
    add_gloo_backend(group, backend, timedelta(seconds=timeout_seconds))
    return group


@dataclass(frozen=True)
class Peers:
    """The place of one pipeline among several whose stages communicate: each stage with the same stage of the others.

    Attributes:
        number: Number of this pipeline.
        count: Number of pipelines.
        rendezvous: URL of the store at which the processes of one stage connect, the same for all pipelines; see
            :mod:`~strategies.launch.rendezvous`.
        timeout_seconds: Time-out for waiting for another pipeline.
        reachable_address: An address that every process can reach.
        name: Distinguishes these pipelines from others that use the same store.
        round: How often the pipelines have returned to a snapshot, each time with new workers.
    """

    number: int
    count: int
    rendezvous: str
    timeout_seconds: float
    reachable_address: str = LOOPBACK
    name: str = "stage"
    round: int = 0

    def join(self, stage: int, check: Callable[[], None] = lambda: None) -> dist.ProcessGroup:
        """Connect the processes of one stage. Returns their group when all have joined.

        Args:
            stage: Number of the stage.
            check: Called while waiting. Ends the wait by raising an exception.
        """
        url = f"{self.rendezvous}/{self.name}-{stage}" + (f"-{self.round}" if self.round else "")
        return join_group(url, self.number, self.count, self.timeout_seconds, self.reachable_address, check)


def _beside(connect: Callable[[Callable[[], None]], Any], check: Callable[[], None]) -> Any:
    """Call a function that waits in C++ and cannot be interrupted, on another thread.

    Args:
        connect: The function. Its argument is a function that raises an error when the caller has stopped waiting.
        check: Called repeatedly during the wait. Ends the wait by raising an exception.
    """
    given_up = Event()

    def check_caller() -> None:
        if given_up.is_set():
            raise RuntimeError("the process has stopped waiting for this connection")

    executor = ThreadPoolExecutor(1, thread_name_prefix="relay-connect")
    connected = executor.submit(connect, check_caller)
    executor.shutdown(wait=False)
    try:
        while not wait([connected], _LOOK_SECONDS).done:
            check()
    except BaseException:  # including Ctrl-C
        given_up.set()
        raise
    return connected.result()


def _let_computing_go_first(thread_name: str) -> None:
    """Keep gloo's event loop from interrupting the thread that computes.

    If data arrives while the compute thread is in the middle of a send, the event loop wakes up, takes the core of the
    compute thread, and spins until the send continues. With batch scheduling (Linux), the event loop runs on free cores
    and interrupts no thread.
    """
    if sys.platform != "linux":
        return
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread may end, or a sandbox may refuse; this only costs speed
            if (task / "comm").read_text().strip() == thread_name:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


@contextmanager
def _without_lines(part: bytes) -> Iterator[None]:
    """Remove lines that contain ``part`` from standard error, from any library.

    RPC warns about each connection that closes, and the level of its C++ logger cannot be set at run time.
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


def variables_of_nccl(session: Session, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables with which a process of a session creates its NCCL communicators.

    Args:
        session: The session. If its processes use the loopback interface, NCCL also uses it.
        base: The current variables. The user's settings are kept.
    """
    wanted = dict(_VARIABLES_OF_NCCL)
    if session.reachable_address == LOOPBACK:
        wanted["NCCL_SOCKET_IFNAME"] = interface_to(LOOPBACK)[1]
    return {name: value for name, value in wanted.items() if name not in base}


@contextmanager
def environment_variables(**variables: str) -> Iterator[None]:
    """Context in which environment variables are set."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        set_variables(before)


def set_variables(variables: Mapping[str, str | None]) -> None:
    """Set environment variables; ``None`` removes a variable."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
