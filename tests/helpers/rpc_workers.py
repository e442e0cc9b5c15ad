"""RPC workers for tests: processes that do nothing but serve the one which runs the test's function."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed import rpc


@contextmanager
def rpc_workers(
    number: int, *, rank: int = 0, graceful: bool = True
) -> Iterator[list[multiprocessing.process.BaseProcess]]:
    """Starts ``number`` of ``worker0``, ``worker1``, ...; the calling process is that of ``rank``. Ends them, too."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=_serve, args=(rank, number + 1, f"file://{folder}/rpc"), daemon=True)
            for rank in range(1, number + 1)
        ]
        for process in processes:
            process.start()
        variables = {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            _join(0, number + 1, f"file://{folder}/rpc")
            yield processes
            rpc.shutdown(graceful=graceful)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
            for process in processes:
                process.join(10 if graceful else 0)
                process.kill()


def _serve(rank: int, size: int, url: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    _join(rank, size, url)
    rpc.shutdown()


def _join(rank: int, size: int, url: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=url, _transports=["uv"], _channels=["basic"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
