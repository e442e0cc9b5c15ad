"""Two hosts in network namespaces, and a router between them that can be told to drop what they send. Needs root."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

NUM_LOCAL = 2
"""Number of ranks on each host."""

CAN_HAVE_HOSTS = sys.platform == "linux" and os.geteuid() == 0 and shutil.which("ip") and shutil.which("unshare")


class TwoHosts:
    """The hosts ``a`` (10.77.1.1) and ``b`` (10.77.2.1), which have no name server.

    Args:
        prefix: The names of the namespaces begin with this.
    """

    MASTER = "10.77.1.1"

    def __init__(self, prefix: str) -> None:
        self.router, self.hosts = f"{prefix}-router", [f"{prefix}-a", f"{prefix}-b"]

    def start(self) -> None:
        for name in (self.router, *self.hosts):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        for number, host in enumerate(self.hosts, 1):
            folder = Path("/etc/netns") / host
            folder.mkdir(parents=True)
            (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # refuses at once
            end, gateway = f"to{number}", f"10.77.{number}.254"
            _ip("-n", self.router, "link", "add", "name", end, "type", "veth", "peer", "name", "e0", "netns", host)
            _ip("-n", self.router, "addr", "add", f"{gateway}/24", "dev", end)
            _ip("-n", self.router, "link", "set", end, "up")
            _ip("-n", host, "addr", "add", f"10.77.{number}.1/24", "dev", "e0")
            _ip("-n", host, "link", "set", "e0", "up")
            _ip("-n", host, "route", "add", "default", "via", gateway)
        _ip("netns", "exec", self.router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")

    def end(self) -> None:
        for name in (*self.hosts, self.router):
            subprocess.run(["ip", "netns", "del", name], check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)

    def cut(self) -> None:
        """Drop everything that host ``a`` sends to host ``b``; both hosts still see their own link as up."""
        subprocess.run(self.cutting, shell=True, check=True)

    @property
    def cutting(self) -> str:
        """The command of :meth:`cut`, which processes of the hosts may run, too."""
        return f"ip -n {self.router} route add blackhole 10.77.2.1/32"

    def heal(self) -> None:
        _ip("-n", self.router, "route", "del", "blackhole", "10.77.2.1/32")

    def start_ranks(
        self,
        command: Sequence[str],
        port: int,
        folder: Path,
        num_local: int = NUM_LOCAL,
        env: Mapping[str, str] = os.environ,
    ) -> list[subprocess.Popen]:
        """Start ranks on each host as ``srun`` does. Each writes its output to ``out-RANK`` in the folder."""
        return [self._start_rank(rank, command, port, folder, num_local, env) for rank in range(2 * num_local)]

    def _start_rank(
        self, rank: int, command: Sequence[str], port: int, folder: Path, num_local: int, env: Mapping[str, str]
    ) -> subprocess.Popen:
        host, output = self.hosts[rank // num_local], folder / f"out-{rank}"
        named = ["unshare", "--uts", "sh", "-c", f'hostname {host[-1]}; exec "$@"', "sh"]
        variables = {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NAME": "relay",
            "SLURM_NTASKS": str(2 * num_local),
            "SLURM_NTASKS_PER_NODE": str(num_local),
            "SLURM_NNODES": "2",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % num_local),
            "SLURM_NODEID": str(rank // num_local),
            "SLURM_NODELIST": self.MASTER,
            "MASTER_ADDR": self.MASTER,
            "MASTER_PORT": str(port),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
        }
        with output.open("w") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", host, *named, *command],
                env={**env, **variables},
                stdout=file,
                stderr=subprocess.STDOUT,
            )


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Context with two hosts whose names no other test has."""
    hosts = TwoHosts(f"relay-{os.getpid()}")
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.end()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
