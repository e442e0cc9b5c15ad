"""What every program here begins with: processes on this machine that know each other.

``launch(program, 4)`` starts four fresh Python processes, each of which calls ``program(rank, 4)`` within a process
group. They meet in a file, so there is no port to agree on, and listen on the loopback interface only.
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
    """Runs ``program(rank, num_processes, *args)`` in so many processes and waits for them.

    Args:
        program: A top-level function; what it raises in one process ends all of them.
        num_processes: How many; ranks are 0, 1, ...
        args: Whatever else it takes.

    Raises:
        torch.multiprocessing.ProcessRaisedException: With the traceback of the process that failed first.
    """
    with tempfile.TemporaryDirectory(prefix="relay-basics-") as folder:
        arguments = (program, num_processes, folder, args)
        context = start_processes(_run, arguments, num_processes, join=False, start_method="spawn")
        try:
            while not context.join():  # returns when one has ended, too
                pass
        finally:
            for file in context.error_files:  # torch leaves them after an error
                Path(file).unlink(missing_ok=True)


def _run(rank: int, program: Callable[..., None], num_processes: int, folder: str, args: tuple[Any, ...]) -> None:
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ |= {"GLOO_SOCKET_IFNAME": loopback, "TP_SOCKET_IFNAME": loopback}
    torch.set_num_threads(1)  # or each process takes all cores
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=num_processes)
    os.environ["MEETING_PLACE"] = folder
    program(rank, num_processes, *args)
    dist.barrier()  # nobody leaves while another one may still ask it for something
    dist.destroy_process_group()


@contextmanager
def remote_procedure_calls(name: str, rank: int, num_processes: int) -> Iterator[None]:
    """Within it, processes can call functions of each other by name; it ends when all have come to its end."""
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{os.environ['MEETING_PLACE']}/rpc",
        _transports=["uv"],  # the default on one machine polls without pause: a core a process, for nothing
        _channels=["basic"],
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are using a Backend")  # init_rpc's own use of gloo
        rpc.init_rpc(name, rank=rank, world_size=num_processes, rpc_backend_options=options)
    yield
    rpc.shutdown()  # not after an error, when the others would not come


def say(rank: int, text: str) -> None:
    """Prints a line of one process; lines of several do not mix."""
    print(f"[rank {rank}] {text}\n", end="", flush=True)
