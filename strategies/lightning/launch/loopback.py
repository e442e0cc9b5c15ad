"""The process group of the ranks that Lightning starts on this host. It listens on the loopback interface only.

    rank 0     binds 127.0.0.1:PORT, starts the other ranks, keeps the store at that port ──▶ process group
    rank > 0   watches whether its parent, rank 0, is there; connects to the store ──────────▶ process group

torch's own store listens on all interfaces. Rank 0 holds the port from the moment the system assigns it, so two runs
that start at the same time cannot get the same port.
"""

import atexit
import os
import socket
import threading
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist

from strategies.launch.process_ends import Watchdog
from strategies.launch.rendezvous import LOOPBACK, check_loopback, interface_to
from strategies.launch.session import environment_variables
from strategies.lightning.compat import (
    ClusterEnvironment,
    LightningEnvironment,
    ParallelStrategy,
    backend_of,
    destroy_dist_connection,
    distributed_log,
)

PARENT = "RELAY_RANK_0"
"""The environment variable with the process id of rank 0. The other ranks inherit it; rank 0 sets it during a fit."""

_LOOK_SECONDS = 0.5

_stores: WeakKeyDictionary[dist.ProcessGroup, dist.Store] = WeakKeyDictionary()
"""The stores, and so their ports, of live process groups. A process group refers only to the C++ half of a store."""


class LoopbackEnvironment(LightningEnvironment):
    """Lightning's environment for one host, which chooses its port by binding it."""

    def __init__(self) -> None:
        super().__init__()
        self._listener: socket.socket | None = None
        self._connected = threading.Event()
        if PARENT in os.environ and self.local_rank() > 0:
            message = f"rank {self.local_rank()}: rank 0 is gone, so this process ends as well"
            Watchdog("relay-parent-watch", partial(self._has_lost, int(os.environ[PARENT])), message=message).start()

    @property
    def main_port(self) -> int:
        """The port on which rank 0 listens; the first read on rank 0 starts listening."""
        if self._main_port == -1 and self.local_rank() == 0:
            check_loopback()
            self._listener = socket.socket()
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((LOOPBACK, int(os.environ.get("MASTER_PORT", 0))))
            self._listener.listen()
            self._main_port = self._listener.getsockname()[1]
            os.environ[PARENT] = str(os.getpid())
        return super().main_port

    def store(self, timeout: timedelta) -> dist.TCPStore:
        """Return the store of the run; on rank 0 it takes over the port."""
        port, keeps = self.main_port, self._listener is not None
        descriptor = self._listener.detach() if self._listener is not None else None
        self._listener = None
        # The store does not wait for the other ranks, because Python could not interrupt its wait in C++.
        return dist.TCPStore(
            LOOPBACK,
            port,
            is_master=keeps,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )

    def connected(self) -> None:
        """Stop watching the parent process; from now on ``Rank0Watch`` ends this rank when rank 0 ends."""
        self._connected.set()

    def teardown(self) -> None:
        """Restore the environment variables; ranks that have not connected may connect in the next run."""
        if self.local_rank() == 0:
            os.environ.pop(PARENT, None)  # the other ranks have inherited it
        if self._listener is not None:
            self.renew()
        super().teardown()

    def renew(self) -> None:
        """Make the next run listen on a new port."""
        if self._listener is not None:
            self._listener.close()
        self._listener, self._main_port = None, -1

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name not in ("_listener", "_connected")}
        return state if self._listener is None else {**state, "_main_port": -1}  # the copy finds a new port

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _listener=None, _connected=threading.Event())

    def _has_lost(self, parent: int) -> bool:
        while not self._connected.wait(_LOOK_SECONDS):
            if os.getppid() != parent:
                return True
        return False


def on_loopback(environment: ClusterEnvironment | None, num_nodes: int, start_method: str) -> ClusterEnvironment | None:
    """Return a loopback environment in place of Lightning's for ranks on this host; return any other unchanged."""
    ours = type(environment) is LightningEnvironment and num_nodes == 1 and start_method == "popen"
    if not ours or environment is None or environment.main_address not in (LOOPBACK, "localhost"):
        return environment
    own = LoopbackEnvironment()
    own.set_world_size(environment.world_size())
    own.set_global_rank(environment.global_rank())
    return own


def place_in_group(strategy: ParallelStrategy) -> tuple[int, int]:
    """Return the rank of this process in the process group, and the number of its ranks."""
    place: tuple[int, int] = getattr(strategy, "group_place", (strategy.global_rank, strategy.world_size))
    return place


def connect(strategy: ParallelStrategy, timeout: timedelta) -> ExitStack:
    """Start the process group before Lightning does, which then uses the existing group.

    Args:
        strategy: The strategy, whose environment is a :class:`LoopbackEnvironment`.
        timeout: The time-out of the group.

    Returns:
        A context to close when the run ends. Until then, new groups also listen on the loopback interface only.
    """
    _, name = interface_to(LOOPBACK)
    wanted = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    variables = ExitStack()
    variables.enter_context(environment_variables(**{k: v for k, v in wanted.items() if k not in os.environ}))
    environment = cast(LoopbackEnvironment, strategy.cluster_environment)
    if not dist.is_initialized():
        cast(Any, strategy).set_world_ranks()
        device, (own_rank, size) = strategy.root_device, place_in_group(strategy)
        distributed_log.info(  # as Lightning does
            f"Initializing distributed: GLOBAL_RANK: {own_rank}, MEMBER: {own_rank + 1}/{size}"
        )
        backend = backend_of(strategy)
        plain = environment.store(timeout)
        store = getattr(strategy.launcher, "watched", lambda plain, _: plain)(plain, timeout.total_seconds())
        store.set(f"arrived/{own_rank}", "")
        store.wait([f"arrived/{rank}" for rank in range(size)])
        dist.init_process_group(
            backend,
            store=store if backend == "gloo" else plain,  # NCCL needs more methods than a store in Python has
            rank=own_rank,
            world_size=size,
            timeout=timeout,
            device_id=device if device.type != "cpu" and backend != "gloo" else None,
        )
        assert dist.group.WORLD is not None
        _stores[dist.group.WORLD] = store
        if backend == "nccl":  # as Lightning does
            atexit.register(destroy_dist_connection)
    environment.connected()
    return variables


def listening_towards(address: str) -> ExitStack:
    """Make gloo's groups listen on the interface that leads to ``address``.

    Otherwise gloo takes the interface to which the name of the host resolves, or the loopback interface if it does not
    resolve, and ranks on other hosts wait for the group's time-out.

    Returns:
        A context to close when the run ends.
    """
    variables = ExitStack()
    if (name := interface_to(address)[1]) and "GLOO_SOCKET_IFNAME" not in os.environ:
        variables.enter_context(environment_variables(GLOO_SOCKET_IFNAME=name))
    return variables
