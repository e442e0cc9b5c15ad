"""Starts the processes of each program on this machine and connects them.

``launch(program, 4)`` starts four fresh Python processes, each of which calls ``program(rank, 4)`` within a process
group. The rendezvous is a file, so no port has to be chosen, and the processes listen on the loopback interface only.
"""

import os
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.multiprocessing import start_processes


def launch(program: Callable[..., None], num_processes: int, *args: Any) -> None:
    """Run ``program(rank, num_processes, *args)`` in ``num_processes`` processes and wait for them.

    Args:
        program: A top-level function; an exception in one process ends all of them.
        num_processes: Number of processes; their ranks are 0, 1, ...
        args: Further arguments of ``program``.

    Raises:
        torch.multiprocessing.ProcessRaisedException: If a process fails; contains the traceback of the first failure.
    """
    with tempfile.TemporaryDirectory(prefix="relay-basics-") as folder:
        arguments = (program, num_processes, folder, args)
        context = start_processes(_run, arguments, num_processes, join=False, start_method="spawn")
        try:
            while not context.join():  # also returns when only one process has ended
                pass
        finally:
            for file in context.error_files:  # torch does not remove them after an error
                Path(file).unlink(missing_ok=True)


def _run(rank: int, program: Callable[..., None], num_processes: int, folder: str, args: tuple[Any, ...]) -> None:
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ |= {"GLOO_SOCKET_IFNAME": loopback, "TP_SOCKET_IFNAME": loopback}
    torch.set_num_threads(1)  # otherwise each process uses all cores
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=num_processes)
    os.environ["RENDEZVOUS_FOLDER"] = folder
    program(rank, num_processes, *args)
    dist.barrier()  # no process ends while another process may still need it
    dist.destroy_process_group()


@contextmanager
def remote_procedure_calls(name: str, rank: int, num_processes: int) -> Iterator[None]:
    """Let processes call each other's functions by name; the context ends when all processes have left it."""
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{os.environ['RENDEZVOUS_FOLDER']}/rpc",
        _transports=["uv"],  # the default on one machine polls without pause and occupies a core per process
        _channels=["basic"],
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are using a Backend")  # init_rpc itself uses gloo
        rpc.init_rpc(name, rank=rank, world_size=num_processes, rpc_backend_options=options)
    yield
    rpc.shutdown()  # not after an error: it would wait for processes that have failed


def say(rank: int, text: str) -> None:
    """Print one line in one call, so that lines of several processes do not mix."""
    print(f"[rank {rank}] {text}\n", end="", flush=True)
