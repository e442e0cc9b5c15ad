"""Functions that ``test_basics.py`` runs in separate processes. Imports only modules that load quickly."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from paths import ROOT
from torch.multiprocessing import ProcessRaisedException

from examples import remote_embedding
from examples.distributed_basics.launch import launch


def command(*arguments: str) -> list[str]:
    """Runs a command from the checkout; returns the lines that it printed."""
    ended = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    return ended.stdout.splitlines()


def fails_on_one(rank: int, num_processes: int) -> None:
    if rank == 1:
        raise ZeroDivisionError("rank 1 divides")
    dist.barrier()  # which rank 1 never comes to


def a_failing_program() -> tuple[str, float]:
    begun = time.monotonic()
    try:
        launch(fails_on_one, 3)
    except ProcessRaisedException as error:
        return str(error), time.monotonic() - begun
    return "nothing was raised", 0.0


def listening(rank: int, num_processes: int, folder: str) -> None:
    sockets = [c for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"]
    torch.save([c.laddr.ip for c in sockets], f"{folder}/{rank}.pt")


def addresses() -> set[str]:
    with tempfile.TemporaryDirectory() as folder:
        launch(listening, 2, folder)
        found = [torch.load(file) for file in Path(folder).iterdir()]
    assert all(found) and len(found) == 2
    return {address for of_one in found for address in of_one}


def both_ways(
    text: torch.Tensor, settings: remote_embedding.Settings
) -> tuple[dict[str, torch.Tensor], list[float], float]:
    model, losses, difference = remote_embedding.compare(text, settings)
    return dict(model.state_dict()), losses, difference
