"""A worker process of a rank. It serves one session.

``python -m strategies.pipeline.worker.serve WORLD session NUMBER`` is the process of the rank. After the session it
replaces itself with a new process with the same process id, which serves the next session. With ``WORLD supervised
NUMBER PID SLOTS`` it is a child of :mod:`~strategies.launch.rank_supervisor`, which starts a new child after it.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import rpc

from strategies.launch.host_links import HostLinks
from strategies.launch.process_ends import Watchdog
from strategies.launch.rank_supervisor import NEXT_SESSION, end_with_supervisor, memory_files, note_session
from strategies.launch.ranks import (
    World,
    appear,
    become_worker,
    gone_key,
    over_key,
    ready_key,
    session_key,
    supervisor_key,
)
from strategies.launch.session import Session, join_rpc

_FOREVER = timedelta(days=20)  # c10d counts milliseconds in 31 bits
_LOOK_SECONDS = 0.2
_ASK_SECONDS = 2.0


def main(world: World, number: int, supervisor: int = 0, slots: str = "") -> None:
    """Wait for session ``number`` of the driver and serve it, then let the process of the next session start.

    Args:
        world: All ranks, and which of them this process is.
        number: The number of the session.
        supervisor: The process id of the supervisor, if there is one.
        slots: The slots of the supervisor, as JSON.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver ends its workers, after it has fetched their state
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a notice of SLURM, which Lightning handles on the driver
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    store = world.store()
    key, session = _next_session(world, store, number)
    leave = partial(_leave, world, store, number, supervisor)
    links = world.links(number, session.timeout_seconds)
    if links is not None:
        links.wait_until_connected()
    try:
        held = json.loads(slots) if supervisor else memory_files(f"relay-snapshot-{world.rank}")
        _serve(world, store, key, session, leave, supervisor, held)
    except RuntimeError as error:
        if not _is_over(store, key):
            session.forget()  # because the driver can no longer do this
            why = HostLinks.wait_for_lost() or f"its driver, rank {world.driver}, is gone: {error}"
            sys.stderr.write(f"rank {world.rank} ends, because {why}\n")
            os._exit(1)
    if links is not None:
        links.end()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    leave()


def supervised(world: str, number: int, supervisor: int, slots: str) -> None:
    """Serve a session in a process that a supervisor started. Both processes end together.

    Args:
        world: All ranks, and which of them this process is, as JSON.
        number: The number of the session.
        supervisor: The process id of the supervisor.
        slots: The slots that the supervisor holds, as JSON.
    """
    end_with_supervisor(supervisor)
    main(World(**json.loads(world)), number, supervisor, slots)


def _leave(world: World, store: dist.Store, number: int, supervisor: int) -> NoReturn:
    """Wait until the next session begins, then end. Otherwise a new process might find the store closed."""
    _next_session(world, store, number + 1)
    if not supervisor:
        become_worker(world, number + 1)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(NEXT_SESSION)


def _next_session(world: World, store: dist.Store, number: int) -> tuple[str, Session]:
    """Wait for the key and the description of a session. If the driver ends instead, end this process."""
    key = session_key(world.driver, number)
    try:
        store.wait([key], _FOREVER)
        if session := store.get(key).decode():
            return key, Session.from_json(session)
        store.set(gone_key(world.rank), "")
    except dist.DistNetworkError:
        pass  # the process with the store has ended and reports its errors; this process has no state to save
    os._exit(0)


def _serve(
    world: World,
    store: dist.Store,
    key: str,
    session: Session,
    leave: Callable[[], NoReturn],
    supervisor: int,
    slots: list[tuple[str, int]],
) -> None:
    """Serve the session, and return when it is over.

    Raises:
        RuntimeError: If the driver has died. A slow driver does not break the connection.
    """
    torch.set_num_threads(session.threads)
    stage = world.place_of(world.rank) - 1
    if supervisor:
        store.set(supervisor_key(world.rank), json.dumps([socket.gethostname(), supervisor]))
    store.set(ready_key(key, stage), json.dumps([socket.gethostname(), os.getpid(), slots]))
    if supervisor:
        note_session(session.driver_pid if world.is_on_host_of_driver else 0)
    with _ending_with(world, key, session, leave if supervisor else None):
        join_rpc(session, stage)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from here on the driver needs the state in this process
    asked, asked_at = None, 0.0
    while not store.check([over_key(key)]):
        time.sleep(_LOOK_SECONDS)
        if asked is not None and asked.done():
            asked.wait()
            asked = None
        if asked is None and time.monotonic() > asked_at + _ASK_SECONDS:
            asked, asked_at = rpc.rpc_async(session.name(session.size - 1), os.getpid, timeout=0), time.monotonic()


@contextmanager
def _ending_with(world: World, key: str, session: Session, leave: Callable[[], NoReturn] | None) -> Iterator[None]:
    """Context that ends this process if the driver ends the session, or dies, while this process joins RPC.

    Args:
        world: All ranks, and which of them this process is.
        key: The key of the session.
        session: The session.
        leave: Called instead if the driver has ended the session because another worker was lost.
    """
    done, store = threading.Event(), world.store()

    def has_ended() -> bool:
        while not done.wait(_LOOK_SECONDS):
            with suppress(dist.DistNetworkError):
                if not store.check([over_key(key)]):
                    continue
                if leave is not None:
                    leave()
            return True
        return False

    message = f"rank {world.rank} ends, because its driver, rank {world.driver}, has ended"
    Watchdog("relay-join-watch", has_ended, message=message, clean_up=session.forget).start()
    try:
        yield
    finally:
        done.set()


def _is_over(store: dist.Store, key: str) -> bool:
    """Whether the driver ends the session within 2 s. The driver closes its connections before it sets the key."""
    try:
        return appear(store, [over_key(key)], _ASK_SECONDS)
    except dist.DistNetworkError:
        return False


if __name__ == "__main__":
    if sys.argv[2] == "supervised":
        supervised(sys.argv[1], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    main(World(**json.loads(sys.argv[1])), int(sys.argv[3]))
