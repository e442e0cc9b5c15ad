"""A run whose ranks a launcher starts: torchrun, or SLURM on two hosts.

Each rank runs ``python -m tests.faults.simulator.launched FOLDER``, which finds the case in that folder.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paths import environment
from two_hosts import two_hosts

from tests.faults.simulator.cases import TWO_HOSTS, Shape
from tests.faults.simulator.oracle import BOUND_SECONDS, Results
from tests.faults.simulator.traps import CUTS_LINK, STAGE_OF_RANK

RUN_SECONDS = 90.0
"""For a run, whose ranks import torch first."""


def train_in_ranks(folder: Path, shape: Shape, arguments: dict[str, Any]) -> tuple[Results | None, list[str]]:
    """Run :func:`~tests.faults.simulator.subject.train` in ranks.

    Args:
        folder: The folder of the run.
        shape: What it is like.
        arguments: The arguments of ``train``, with ``faults``.

    Returns:
        The results of the driver, or ``None`` if its launcher has ended it; and which processes have not ended.
    """
    (folder / "arguments").write_bytes(pickle.dumps((shape, arguments)))
    script = [sys.executable, "-m", "tests.faults.simulator.launched", str(folder)]
    if shape.launcher == TWO_HOSTS:
        with two_hosts() as hosts:
            variables = {**environment(), CUTS_LINK: hosts.cutting}
            wrong = _ended(hosts.start_ranks(script, _free_port(), folder, num_local=1, env=variables), folder)
    else:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={shape.stages}", "-m"]
        command = [sys.executable, *torchrun, *script[2:]]
        with (folder / "out-0").open("w") as output:
            process = subprocess.Popen(command, env=environment(), stdout=output, stderr=subprocess.STDOUT)
            wrong = _ended([process], folder)
    with suppress(FileNotFoundError):
        results: Results = pickle.loads((folder / "results").read_bytes())
        return results, wrong
    return None, wrong


def _ended(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> list[str]:
    """Wait for processes: the first one runs its time, the others end soon after it."""
    wrong, deadline = [], time.monotonic() + RUN_SECONDS
    for number, process in enumerate(processes):
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            said = (folder / f"out-{number}").read_text()[-2000:]
            wrong.append(f"process {number} of the launcher did not end: {said}")
            process.kill()
            process.wait()
        deadline = min(deadline, time.monotonic() + BOUND_SECONDS)
    return wrong


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    from tests.faults.simulator.subject import train

    folder, rank = Path(sys.argv[1]), os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    if rank != "0":  # rank 0 is the driver
        os.environ[STAGE_OF_RANK] = str(int(rank) - 1)
    shape, arguments = pickle.loads((folder / "arguments").read_bytes())
    results = train(shape, folder, "saved", **arguments)  # of the driver; workers end in it
    (folder / "results.part").write_bytes(pickle.dumps(results))
    (folder / "results.part").replace(folder / "results")
    if results.error is not None:
        raise RuntimeError(results.error.traceback)  # as a script that does not catch the error


if __name__ == "__main__":
    main()
