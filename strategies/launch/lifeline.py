"""Ranks that end with rank 0. Lightning starts them as its children, and they would survive a SIGKILL of rank 0.

rank 0 ── hosts the TCPStore ─────────────── teardown: sets the key ── or dies, and the store with it
             ▲                                      │                              │
rank > 0 ── a thread waits for the key ──▶ returns: the run is over     fails: this process ends, status 1
"""

import os
import sys
import threading
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from strategies.common.torch_compat import default_store
from strategies.launch.rendezvous import WatchedTCPStore

_FOREVER = timedelta(days=20)  # c10d counts milliseconds in 31 bits


class Lifeline:
    """One per run and rank, between the start of the process group and the teardown of the strategy.

    A user who starts the process group on another store than TCP's has none; nor has a single process.

    Args:
        key: a name that only this run uses, the same on all ranks.
    """

    def __init__(self, key: str) -> None:
        self._key, self._rank, self._ended = key, dist.get_rank(), threading.Event()
        store = default_store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        self._store: dist.TCPStore | None = None
        if isinstance(store, dist.TCPStore | WatchedTCPStore) and dist.get_world_size() > 1:
            # A connection of its own: a waiting client is closed to every other call.
            self._store = dist.TCPStore(store.host, store.port, is_master=False)
            if self._rank != 0:
                threading.Thread(target=self._watch, args=(self._store,), name="relay-lifeline", daemon=True).start()

    def end(self) -> None:
        """The run is over on this rank, in whatever way; rank 0 tells the others."""
        self._ended.set()
        if self._rank == 0 and self._store is not None:
            with suppress(dist.DistNetworkError):  # after a failure its store is gone, and so are the others
                self._store.set(self._key, "ended")

    def _watch(self, store: dist.TCPStore) -> None:
        try:
            store.wait([self._key], _FOREVER)
        except dist.DistNetworkError:
            if not self._ended.is_set():
                sys.stderr.write(f"rank {self._rank}: rank 0 is gone, so this process ends as well\n")
                os._exit(1)
