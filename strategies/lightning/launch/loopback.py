"""The process group of ranks that Lightning starts on this host: it listens on the loopback interface only.

    rank 0     binds 127.0.0.1:PORT, starts the other ranks, keeps the store at that port ──▶ process group
    rank > 0   watches whether its parent, rank 0, is there; connects to the store ──────────▶ process group

torch's own store listens on all interfaces. The port is held from the moment at which the system gives it, so two runs
that start at once cannot get the same one.
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

from strategies.launch.rendezvous import LOOPBACK, interface_to
from strategies.launch.session import environment_variables
from strategies.launch.supervision import Watchdog
from strategies.lightning.compat import (
    ClusterEnvironment,
    LightningEnvironment,
    ParallelStrategy,
    backend_of,
    destroy_dist_connection,
    distributed_log,
)

PARENT = "RELAY_RANK_0"
"""The variable that tells the other ranks the process id of rank 0, from their start; rank 0 has it during a fit."""

_LOOK_SECONDS = 0.5

_stores: WeakKeyDictionary[dist.ProcessGroup, dist.Store] = WeakKeyDictionary()
"""Kept, port and all, for as long as the process group is there, which knows only the C++ half of a store."""


class LoopbackEnvironment(LightningEnvironment):
    """Lightning's environment of one host; its port is chosen by binding it."""

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
            self._listener = socket.socket()
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((LOOPBACK, int(os.environ.get("MASTER_PORT", 0))))
            self._listener.listen()
            self._main_port = self._listener.getsockname()[1]
            os.environ[PARENT] = str(os.getpid())
        return super().main_port

    def store(self, timeout: timedelta) -> dist.TCPStore:
        """The store of the run; on rank 0 it takes over the port."""
        port, keeps = self.main_port, self._listener is not None
        descriptor = self._listener.detach() if self._listener is not None else None
        self._listener = None
        # The store does not wait for the other ranks: its wait in C++ could not be interrupted.
        return dist.TCPStore(
            LOOPBACK,
            port,
            is_master=keeps,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )

    def connected(self) -> None:
        """Stop this watch; from now on ``Rank0Watch`` ends this rank when rank 0 ends."""
        self._connected.set()

    def teardown(self) -> None:
        """Leaves the variables of the process as they were; ranks that have not connected may do so in the next run."""
        if self.local_rank() == 0:
            os.environ.pop(PARENT, None)  # the other ranks were started with it
        if self._listener is not None:
            self.renew()
        super().teardown()

    def renew(self) -> None:
        """The next run listens on another port."""
        if self._listener is not None:
            self._listener.close()
        self._listener, self._main_port = None, -1

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name not in ("_listener", "_connected")}
        return state if self._listener is None else {**state, "_main_port": -1}  # the copy finds a port of its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _listener=None, _connected=threading.Event())

    def _has_lost(self, parent: int) -> bool:
        while not self._connected.wait(_LOOK_SECONDS):
            if os.getppid() != parent:
                return True
        return False


def on_loopback(environment: ClusterEnvironment | None, num_nodes: int, start_method: str) -> ClusterEnvironment | None:
    """The environment to use instead of the given one, which is Lightning's for ranks that it starts on this host."""
    ours = type(environment) is LightningEnvironment and num_nodes == 1 and start_method == "popen"
    if not ours or environment is None or environment.main_address not in (LOOPBACK, "localhost"):
        return environment
    own = LoopbackEnvironment()
    own.set_world_size(environment.world_size())
    own.set_global_rank(environment.global_rank())
    return own


def connect(strategy: ParallelStrategy, timeout: timedelta) -> ExitStack:
    """Starts the process group, ahead of Lightning, which leaves alone what is there.

    Args:
        strategy: Its environment is a :class:`LoopbackEnvironment`.
        timeout: That of the group.

    Returns:
        What ends the run: until it is closed, groups that are made later listen on the loopback interface, too.
    """
    _, name = interface_to(LOOPBACK)
    wanted = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    variables = ExitStack()
    variables.enter_context(environment_variables(**{k: v for k, v in wanted.items() if k not in os.environ}))
    environment = cast(LoopbackEnvironment, strategy.cluster_environment)
    if not dist.is_initialized():
        cast(Any, strategy).set_world_ranks()
        device, size = strategy.root_device, strategy.world_size
        distributed_log.info(  # as Lightning does
            f"Initializing distributed: GLOBAL_RANK: {strategy.global_rank}, MEMBER: {strategy.global_rank + 1}/{size}"
        )
        backend = backend_of(strategy)
        plain = environment.store(timeout)
        store = getattr(strategy.launcher, "watched", lambda plain, _: plain)(plain, timeout.total_seconds())
        store.set(f"arrived/{strategy.global_rank}", "")
        store.wait([f"arrived/{rank}" for rank in range(size)])
        dist.init_process_group(
            backend,
            store=store if backend == "gloo" else plain,  # NCCL asks for more than a store in Python has
            rank=strategy.global_rank,
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
