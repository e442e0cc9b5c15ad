"""Verification in ranks that torchrun has started: rank 0 decides which runs are needed; all run the strategy.

    rank 0   one process   call 1: the strategy   (another reference)   prints the verdict   gives it to all
    rank 1   waits         call 1: the strategy   waits                                      returns the same

In each call, every rank starts a process, which has the rank's environment and another port. The ranks
communicate through the store of the launcher.
"""

import json
import os
import pickle
import socket
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from torch import distributed as dist

from strategies.launch.ranks import World
from strategies.lightning.compat import ClusterEnvironment
from strategies.lightning.launch.environment import is_external
from trainer.verification.process import started

_POLL_SECONDS = 0.05
GRACE_SECONDS = 10.0
"""How long the processes of the other ranks may take to end after the process of one rank has ended."""

_SET_BY_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "SLURM_")

_numbers = count(1)
"""Numbers of the verifications in this process; every rank makes the same ones."""


class LaunchedRanks:
    """This rank among all ranks that a launcher has started on this host.

    Args:
        environment: Knows the number of ranks and the number of this rank.
    """

    def __init__(self, environment: ClusterEnvironment) -> None:
        self.rank, self._size = environment.global_rank(), environment.world_size()
        world = World(environment.main_address, environment.main_port, self.rank, self._size, 1, self._size)
        self._store = dist.PrefixStore(f"verify-{next(_numbers)}", world.store())
        self._call = 0

    @classmethod
    def of(cls, environment: ClusterEnvironment | None) -> "LaunchedRanks | None":
        """Return the ranks; ``None`` if no launcher has started several."""
        return cls(environment) if environment is not None and is_external(environment) else None

    # Rank 0

    def begin(self, folder: Path, names: Sequence[str]) -> dict[str, str]:
        """Make all ranks run executions of a job, and return the environment of this rank's process."""
        self._call += 1
        port = _free_port()
        self._store.set(f"call/{self._call}", json.dumps([str(folder), list(names), port]))
        return _environment(port)

    def failed(self) -> str | None:
        """Return what the first rank has printed whose process has failed; ``None`` if none has."""
        for rank in range(1, self._size):
            if self._store.check([key := self._ended(rank)]):
                status, output = json.loads(self._store.get(key))
                if status:
                    return f"the process of rank {rank} has ended with status {status}\n{output}"
        return None

    def end(self) -> str | None:
        """Wait until the processes of all ranks have ended; return what :meth:`failed` returns."""
        self._store.set(f"over/{self._call}", "")
        self._wait([self._ended(rank) for rank in range(1, self._size)], 3 * GRACE_SECONDS)
        return self.failed()

    def publish(self, result: Any) -> None:
        """Give the result, a certificate or an error, to all ranks, and wait until they have it."""
        self._store.set(f"call/{self._call + 1}", json.dumps(None))
        self._store.set("result", pickle.dumps(result).hex())
        self._wait([f"has result/{rank}" for rank in range(1, self._size)], GRACE_SECONDS)

    # Other ranks

    def follow(self) -> Any:
        """Run what rank 0 requests until it has a result, and return the result, or raise it if it is an error."""
        for self._call in count(1):
            self._wait([f"call/{self._call}"])
            if (call := json.loads(self._store.get(f"call/{self._call}"))) is None:
                break
            folder, names, port = call
            output = Path(folder, f"output-{self.rank}")
            status = self._run(Path(folder), names, output, _environment(port))
            told = output.read_text(errors="replace")[-2000:] if status else ""
            self._store.set(self._ended(self.rank), json.dumps([status, told]))
        self._wait(["result"])
        result = pickle.loads(bytes.fromhex(self._store.get("result").decode()))
        self._store.set(f"has result/{self.rank}", "")
        if isinstance(result, Exception):
            raise result
        return result

    def _run(self, folder: Path, names: Sequence[str], path: Path, environment: Mapping[str, str]) -> int:
        over = f"over/{self._call}"
        with open(path, "ab") as output, started(folder, names, output, environment) as child:
            deadline = None
            while child.poll() is None and (deadline is None or time.monotonic() < deadline):
                if deadline is None and self._store.check([over]):
                    deadline = time.monotonic() + GRACE_SECONDS
                time.sleep(_POLL_SECONDS)
        status: int = child.returncode
        return status

    def _ended(self, rank: int) -> str:
        return f"ended/{self._call}/{rank}"

    def _wait(self, keys: Sequence[str], seconds: float = float("inf")) -> None:
        deadline = time.monotonic() + seconds
        while not self._store.check(list(keys)) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


def without_launch(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables without those by which a launcher tells a process that it is a rank."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _SET_BY_LAUNCHERS and not name.startswith(_PREFIXES)
    }


def _environment(port: int) -> dict[str, str]:
    """Return the environment of a process that is this rank and whose rank 0 hosts the store."""
    return {**os.environ, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
