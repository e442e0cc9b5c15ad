"""The process of a rank that is no driver, ``python -m strategies.pipeline.worker.serve WORLD NUMBER``: one session.

Then it replaces itself and waits for the next one, so each session has a fresh process, under the same process id.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import rpc

from strategies.launch.ranks import World, appear, become_worker, call_key, gone_key, over_key, ready_key
from strategies.launch.session import Session, join_rpc
from strategies.launch.supervision import Watchdog

_FOREVER = timedelta(days=20)  # c10d counts milliseconds in 31 bits
_LOOK_SECONDS = 0.2
_ASK_SECONDS = 2.0


def main(world: World, number: int) -> None:
    """Waits for the driver's session ``number`` and serves it; the next one is another process's, or there is none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver ends its workers itself, with what it wants to keep
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # SLURM's notice, which Lightning answers on the driver
    store = world.store()
    call, session = _next_session(world, store, number)
    try:
        _serve(world, store, call, session)
    except RuntimeError as error:
        if not _is_over(store, call):
            session.forget()  # nobody else is left to do it
            sys.stderr.write(f"rank {world.rank} ends, because its driver, rank {world.driver}, is gone: {error}\n")
            os._exit(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _next_session(world, store, number + 1)  # waits here: a new process might find the store closed
    become_worker(world, number + 1)


def _next_session(world: World, store: dist.Store, number: int) -> tuple[str, Session]:
    """Waits for the key and the description of a session; if the driver ends instead, so does this process."""
    call = call_key(world.driver, number)
    try:
        store.wait([call], _FOREVER)
        if session := store.get(call).decode():
            return call, Session.from_json(session)
        store.set(gone_key(world.rank), "")
    except dist.DistNetworkError:
        pass  # whoever kept the store has ended, and how is its own affair: nothing is lost here
    os._exit(0)


def _serve(world: World, store: dist.Store, call: str, session: Session) -> None:
    """Returns when the session is over.

    Raises:
        RuntimeError: If the driver has died (one that is only slow does not break the connection).
    """
    torch.set_num_threads(session.threads)
    stage = world.rank - world.driver - 1
    store.set(ready_key(call, stage), json.dumps([socket.gethostname(), os.getpid()]))
    with _ending_with(world, call, session):
        join_rpc(session, stage)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from here on the driver needs what this process holds
    asked, asked_at = None, 0.0
    while not store.check([over_key(call)]):
        time.sleep(_LOOK_SECONDS)
        if asked is not None and asked.done():
            asked.wait()
            asked = None
        if asked is None and time.monotonic() > asked_at + _ASK_SECONDS:
            asked, asked_at = rpc.rpc_async(session.name(session.size - 1), os.getpid, timeout=0), time.monotonic()


@contextmanager
def _ending_with(world: World, call: str, session: Session) -> Iterator[None]:
    """Ends this process if the driver gives up the session, or is gone: joining waits in C++, deaf to everything."""
    done, store = threading.Event(), world.store()

    def has_ended() -> bool:
        while not done.wait(_LOOK_SECONDS):
            with suppress(dist.DistNetworkError):
                if not store.check([over_key(call)]):
                    continue
            return True
        return False

    message = f"rank {world.rank} ends, because its driver, rank {world.driver}, has ended"
    Watchdog("relay-join-watch", has_ended, message=message, clean_up=session.forget).start()
    try:
        yield
    finally:
        done.set()


def _is_over(store: dist.Store, call: str) -> bool:
    """Whether the driver has ended the session, or does within a moment: its connections close just before."""
    try:
        return appear(store, [over_key(call)], _ASK_SECONDS)
    except dist.DistNetworkError:
        return False


if __name__ == "__main__":
    main(World(**json.loads(sys.argv[1])), int(sys.argv[2]))
