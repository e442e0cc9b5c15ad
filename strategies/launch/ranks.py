"""Pipelines over processes that torchrun, SLURM or a similar launcher started, on one or more hosts.

    rank 0: driver, last stage    1: stage 0    2: stage 1  ┆  3: driver, last stage    4: stage 0    5: stage 1
    ──────────────────────── replica 0 ─────────────────────┆───────────────────── replica 1 ───────────────────

With ``tensor_parallel_size``, each rank above stands for ``tensor_parallel_size`` consecutive ranks, which divide its
layers.

Every rank starts by running the same script. At its first ``fit``, a rank that is not a driver replaces itself with a
worker, with ``exec``: the process id that the launcher watches stays, and the memory of the script is released. Driver
and workers communicate through the TCP store of the run:

    driver:  sessions/3/1 = a session      sessions/3/1/over      sessions/3/2 = next session     ...  sessions/3/N = ""
    worker:  joins it                      leaves it              execs itself, joins it               ends, status 0
"""

import json
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from strategies.common.activity import noted
from strategies.common.errors import WorkerLost
from strategies.launch import rank_supervisor
from strategies.launch.host_links import HostLinks
from strategies.launch.process_ends import is_alive
from strategies.launch.session import Session, environment_variables, join_rpc, leave_rpc, refuse_other_rpc
from strategies.launch.workers import environment_of_worker, share_of_threads

_ARRIVAL_SECONDS = 1800.0
"""How long a rank may take to reach its first ``fit``. torch waits equally long for ranks that do not appear."""

_ARRIVAL_SECONDS_LATER = 300.0
"""How long a rank may take to join a later session. It waits for this session, or starts Python and imports torch."""

_POLL_SECONDS = 0.005
_POLLS_PER_CHECK = 100
_FAREWELL_SECONDS = 30.0
"""How long a driver waits, at the end of its process, until the other ranks have read this in the store."""

_FAREWELL_SECONDS_AFTER_ERROR = 2.0
"""The same after an error: ranks that have died do not answer."""


@dataclass(frozen=True)
class World:
    """This rank and the other ranks of the run.

    Attributes:
        address: The address of the host with the store.
        port: The port of the store.
        rank: The rank of this process.
        size: Number of ranks.
        num_stages: Number of stages of each pipeline.
        num_local: Number of ranks on this host.
        num_parts: Number of pipelines of each replica, which divide its layers. The ranks of a stage follow each other.
        call: The number of this call of a Trainer, if the ranks return from each call; 0 if workers do not return.
    """

    address: str
    port: int
    rank: int
    size: int
    num_stages: int
    num_local: int
    num_parts: int = 1
    call: int = 0

    @property
    def driver(self) -> int:
        """The rank of the driver of this pipeline."""
        return self.rank - self.place_of(self.rank) * self.num_parts

    def place_of(self, rank: int) -> int:
        """The place of a rank in its pipeline: 0 for the driver, and ``i + 1`` for the worker of stage ``i``."""
        return rank // self.num_parts % self.num_stages

    def pipeline_of(self, rank: int) -> int:
        """The number of a rank's pipeline."""
        return rank // (self.num_parts * self.num_stages) * self.num_parts + rank % self.num_parts

    @property
    def is_driver(self) -> bool:
        """Whether this rank runs the script to its end."""
        return self.rank == self.driver

    @property
    def workers(self) -> list[int]:
        """The ranks of this pipeline's workers, in the order of their stages."""
        return [self.driver + stage * self.num_parts for stage in range(1, self.num_stages)]

    @property
    def keeps_store(self) -> bool:
        """Whether this process hosts the store. With torchrun, torchrun hosts it."""
        return self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    @property
    def hosts(self) -> list[int]:
        """The number of the host of each stage. The last entry is the driver's host."""
        return [rank // self.num_local for rank in (*self.workers, self.driver)]

    @property
    def is_on_host_of_driver(self) -> bool:
        """Whether this rank and its driver are on one host, so that process ids of the driver are valid here."""
        return self.rank // self.num_local == self.driver // self.num_local

    @property
    def num_threads(self) -> int:
        """The number of threads of each rank. ``OMP_NUM_THREADS`` takes precedence (torchrun sets it to 1)."""
        return torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else share_of_threads(self.num_local)

    def links(self, number: int, timeout_seconds: float) -> HostLinks | None:
        """Watch the other hosts during session ``number``; ``None`` if there is one host."""
        if self.size == self.num_local:
            return None
        return HostLinks(self.store, f"links/{number}", self.rank, self.size, self.address, timeout_seconds)

    def rendezvous(self) -> str:
        """The URL of a new rendezvous."""
        return f"relay://{self.address}:{self.port}/relay-{secrets.token_hex(8)}"

    def store(self) -> dist.Store:
        """Connect to the store, or create it on the rank that hosts it. Waits until the store exists."""
        keeps, timeout = self.keeps_store, timedelta(seconds=_ARRIVAL_SECONDS)
        store = dist.TCPStore(
            self.address, self.port, is_master=keeps, timeout=timeout, wait_for_workers=False, multi_tenant=keeps
        )
        # The store of torchrun stays when torchrun restarts the ranks.
        return dist.PrefixStore(f"relay-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{self.call}", store)

    def divided_into(self, store: dist.Store) -> tuple[int, int]:
        """The number of stages per pipeline and of parts of each layer, as set by the first rank that calls this."""
        own = f"{self.num_stages} {self.num_parts}"
        stages, parts = store.compare_set("division", "", own).split()
        return int(stages), int(parts)

    def next_number(self, store: dist.Store) -> int:
        """The number of the next session of this driver, for which its workers wait."""
        return store.add(f"sessions/{self.driver}", 1)


def session_key(driver: int, number: int) -> str:
    """The key of a driver's session ``number``, from 1."""
    return f"sessions/{driver}/{number}"


class Ranks:
    """The workers of one session, in processes that already run: the counterpart of
    :class:`~strategies.launch.workers.Workers`.

    Args:
        world: All ranks, and which of them this process is.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._session: Session | None = None
        self._store: dist.Store | None = None
        self._session_key = ""
        self._processes: dict[int, tuple[str, int]] = {}
        self.slots: list[list[tuple[str, int]]] = []
        """The slots for snapshots of each worker, on its host: path and inode of each."""
        self._joined = False
        self._links: HostLinks | None = None

    def start(self, *, timeout_seconds: float, threads: int) -> Session:
        """Start a session, and return when all workers have joined it; see ``Workers.start``.

        Raises:
            RuntimeError: If this process is already part of an RPC session, or if a worker does not appear in time.
        """
        refuse_other_rpc()
        world, store = self._world, self._world.store()
        session = Session(
            rendezvous=world.rendezvous(),
            token=secrets.token_hex(4),
            size=world.num_stages,
            timeout_seconds=timeout_seconds,
            threads=threads,
            paths=[],  # each rank has its own
            driver_pid=os.getpid(),
            reachable_address=world.address,
            notes=tempfile.mkdtemp(prefix="relay-"),
        )
        number = world.next_number(store)
        self._session, self._store, self._session_key = session, store, session_key(world.rank, number)
        self._links = world.links(number, timeout_seconds)
        store.set(self._session_key, session.to_json())
        ready = [ready_key(self._session_key, stage) for stage in range(len(world.workers))]
        seconds = _ARRIVAL_SECONDS if self._session_key.endswith("/1") else _ARRIVAL_SECONDS_LATER
        if not appear(store, ready, seconds, self._check_arrival):
            late = [rank for rank, key in zip(world.workers, ready, strict=True) if not store.check([key])]
            raise RuntimeError(
                f"rank {world.rank} has called fit, validate, test or predict, but ranks {late} have not within "
                f"{seconds:.0f} s; every rank must make the same calls of the Trainer, and its process must answer"
            )
        for stage, key in enumerate(ready):
            host, pid, slots = json.loads(store.get(key))
            self._processes[stage] = host, pid
            self.slots.append([(path, inode) for path, inode in slots])
        self._joined = True
        join_rpc(session, len(world.workers), self._check)
        if self._links is not None:
            self._links.wait_until_connected()
        return session

    @property
    def are_supervised(self) -> bool:
        """Whether a worker that is lost is replaced."""
        return len(self._supervisors()) == len(self._world.workers)

    def _supervisors(self) -> dict[int, tuple[str, int]]:
        """Host and process id of each rank that supervises its worker."""
        store = self._store
        assert store is not None
        keys = {rank: supervisor_key(rank) for rank in self._world.workers}
        return {rank: tuple(json.loads(store.get(key))) for rank, key in keys.items() if store.check([key])}

    def _check_arrival(self) -> None:
        """Raise an error if a worker cannot appear: its host is lost, or the rank that supervises it has ended."""
        if HostLinks.lost is not None:  # in the session before, whose workers are to be replaced
            raise RuntimeError(HostLinks.lost)
        for rank, (host, pid) in self._supervisors().items():
            if host == os.uname().nodename and not is_alive(pid):
                raise RuntimeError(
                    f"rank {rank}, process {pid}, which supervised its worker, has ended: the launcher must start the "
                    "run again, such as with torchrun --max-restarts=1, from the last checkpoint"
                )

    def describe(self, stage: int) -> str:
        """Describe a worker's process."""
        host, pid = self._processes[stage]
        return f"process {pid} (rank {self._world.workers[stage]}) on {host}"

    def ended(self, stage: int, *, wait_seconds: float = 0.0) -> str | None:
        """Describe the end of a worker's process; ``None`` if the process runs or is on another host."""
        host, pid = self._processes[stage]
        deadline = time.monotonic() + wait_seconds
        while host == os.uname().nodename:
            if not is_alive(pid):
                return f"has ended {self.doing(stage)}"
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_SECONDS)
        return None

    def doing(self, stage: int) -> str:
        """Describe the current or most recent activity of a worker; empty if it is on another host."""
        assert self._session is not None
        return noted(self._session.note(stage)) if self._processes[stage][0] == os.uname().nodename else ""

    def kill(self, stage: int) -> None:
        """Kill a worker's process if it runs on this host."""
        host, pid = self._processes[stage]
        if host == os.uname().nodename:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _check(self) -> None:
        """If a worker has ended while other processes wait for it, end the session of all workers and raise."""
        for stage in self._processes:
            if (how := self.ended(stage)) is not None:
                assert self._store is not None
                self._store.set(over_key(self._session_key), "")
                raise WorkerLost(f"stage {stage}, {self.describe(stage)}, {how}")

    def stop(self, *, grace_seconds: float) -> None:
        """End the session. The workers then wait for the next session. Can be called at any time."""
        if self._links is not None:
            self._links.end()
            self._links = None
        if self._store is not None:
            with suppress_of_lost_store():
                self._store.set(over_key(self._session_key), "")
            self._store = None
        if self._joined:
            leave_rpc()
        self._joined = False
        if self._session is not None:
            self._session.forget()


def ready_key(key: str, stage: int) -> str:
    """The key under which a worker confirms that it has read the session, with its host, process id and slots."""
    return f"{key}/ready/{stage}"


def supervisor_key(rank: int) -> str:
    """The key under which a worker names its supervisor, by host and process id."""
    return f"supervisor/{rank}"


def over_key(key: str) -> str:
    """The key that a driver sets at the end of a session."""
    return f"{key}/over"


def gone_key(rank: int) -> str:
    """The key that a rank sets when it no longer needs the store."""
    return f"gone/{rank}"


def dismiss(world: World, store: dist.Store, *, has_failed: bool = False) -> None:
    """End the workers of a driver, at the end of the driver's process, or of its call if all ranks return from it."""
    listeners = range(world.size) if world.keeps_store else world.workers
    failed = has_failed or hasattr(sys, "last_value") or HostLinks.lost is not None  # an uncaught exception
    seconds = _FAREWELL_SECONDS_AFTER_ERROR if failed else _FAREWELL_SECONDS
    with suppress(dist.DistNetworkError) if has_failed else suppress_of_lost_store():
        store.set(session_key(world.rank, world.next_number(store)), "")
        store.set(gone_key(world.rank), "")
        appear(store, [gone_key(rank) for rank in listeners], seconds)


def suppress_of_lost_store() -> AbstractContextManager[None]:
    """Context that suppresses errors of the store if this process has lost a host, which may be that of the store."""
    return nullcontext() if HostLinks.lost is None else suppress(dist.DistNetworkError)


def become_worker(world: World, number: int = 1, *, replace: bool = False) -> NoReturn:
    """Replace this process with a worker that serves the sessions of its driver, starting with ``number``.

    A rank of MPI starts the worker as a child process instead.

    Args:
        world: All ranks, and which of them this process is.
        number: The number of the first session.
        replace: Whether this process becomes a supervisor instead, which replaces a worker that is killed.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if (mpi := initialized_mpi()) is not None:
        # The worker must not become a second process with the number of this rank.
        with environment_variables(MPI4PY_RC_INITIALIZE="0"):
            status = serve_in_child(world, number, replaces=replace)
        _leave_mpi(mpi, status)
    for descriptor in Path("/dev/fd").iterdir():  # the connections of the script must close
        if int(descriptor.name) > 2:
            _close_on_exec(int(descriptor.name))
    description = json.dumps(asdict(world))
    if replace:
        command = [rank_supervisor.__name__, description, str(number)]
    else:
        command = [rank_supervisor.SERVE, description, "session", str(number)]
    os.execve(sys.executable, [sys.executable, "-m", *command], environment_of_worker(sys.path))


def initialized_mpi() -> Any:
    """Return the module ``mpi4py.MPI`` if this process takes part in MPI."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None


def serve_in_child(world: World, number: int = 1, *, replaces: bool) -> int:
    """Run the worker as a child of this process, which belongs to MPI or Ray, until the driver dismisses its workers.

    Args:
        world: All ranks, and which of them this process is.
        number: The number of the first session.
        replaces: Whether a new worker replaces a worker that is killed.

    Returns:
        The exit status of the last worker, negative if a signal ended it.
    """
    start = rank_supervisor.Starts(json.dumps(asdict(world)))
    try:
        supervisor = rank_supervisor.RankSupervisor(world.rank, start, prepare=start.prepare, replaces=replaces)
        with environment_variables(**environment_of_worker(sys.path)):
            return supervisor.run(number)
    finally:
        start.close()


def _leave_mpi(mpi: Any, status: int) -> NoReturn:
    """End this process as a rank of MPI, with the exit status of its worker.

    ``mpirun`` reports a run as failed if a rank does not finalize MPI, and ``exec`` leaves MPI without that. The rank
    finalizes MPI after its worker, at the same time as the driver, because the ranks wait for each other there.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if status == 0:
        mpi.Finalize()
    os._exit(status if status >= 0 else 128 - status)


def _close_on_exec(descriptor: int) -> None:
    try:
        os.set_inheritable(descriptor, False)
    except OSError:  # the descriptor of the directory itself
        return


def appear(store: dist.Store, keys: Sequence[str], seconds: float, check: Callable[[], None] = lambda: None) -> bool:
    """Wait for keys, and return whether all exist. Ctrl-C and errors of ``check`` interrupt the wait."""
    deadline = time.monotonic() + seconds
    for number in count(1):
        if store.check(list(keys)):
            break
        if number % _POLLS_PER_CHECK == 0:
            check()
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
