"""A SLURM cluster of two hosts, which are namespaces of this machine: real daemons, no accounting. Needs root.

    router: munged, slurmctld, sbatch, scancel ...        a: slurmd -N node1        b: slurmd -N node2

Each host has its own network, name, processes, ``/dev/shm`` and folder for temporary files; the file system is shared.
"""

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from procfs import describe, is_alive, parent
from two_hosts import CAN_HAVE_HOSTS, TwoHosts, two_hosts

CAN_HAVE_CLUSTER = CAN_HAVE_HOSTS and all(map(shutil.which, ("munged", "slurmctld", "slurmd", "sbatch")))
NO_CLUSTER = "a cluster needs root, ip, unshare, munged, slurmctld, slurmd and sbatch"

NODES = ("node1", "node2")
HEAD = "10.77.1.254"
"""The address of the router on the side of the first host; the second host reaches it, too."""

START_SECONDS = 60.0
ENDED = ("CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")

CONFIG = """
ClusterName=relay
SlurmctldHost=head({head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={folder}/prolog
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
KillWait=5
MinJobAge=3600
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
NodeName=node1 NodeAddr=10.77.1.1 CPUs=16
NodeName=node2 NodeAddr=10.77.2.1 CPUs=16
PartitionName=all Nodes=ALL Default=YES State=UP
"""
"""``cred_expire`` is also how long a job that is put back into the queue waits there."""

PROLOG = """#!/bin/sh
echo export TMPDIR={folder}/tmp-$SLURMD_NODENAME
"""


class Cluster:
    """The running cluster.

    Args:
        folder: For the files of all daemons. Every host sees it.
        hosts: The namespaces.
    """

    def __init__(self, folder: Path, hosts: TwoHosts) -> None:
        self.folder, self._hosts, self._daemons = folder, hosts, ExitStack()
        self._environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._inits: dict[str, subprocess.Popen] = {}

    def start(self) -> None:
        """Start the daemons, and return when both nodes are idle.

        Raises:
            RuntimeError: If a daemon ends or the nodes are not idle in time; the message has the logs.
        """
        for name in ("munge", "state", *(f"{kind}-{node}" for kind in ("spool", "tmp") for node in NODES)):
            (self.folder / name).mkdir(mode=0o755)
        (self.folder / "slurm.conf").write_text(CONFIG.format(folder=self.folder, head=HEAD))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # or slurmd looks for one and fails
        (self.folder / "prolog").write_text(PROLOG.format(folder=self.folder))
        (self.folder / "prolog").chmod(0o755)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        names = f"127.0.0.1 localhost\n10.77.1.1 {NODES[0]}\n10.77.2.1 {NODES[1]}\n{HEAD} head\n"
        for host in (self._hosts.router, *self._hosts.hosts):
            (Path("/etc/netns") / host).mkdir(exist_ok=True)
            (Path("/etc/netns") / host / "hosts").write_text(names)
        munge = [f"--{name}={self.folder}/munge/{name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
        self._start("munged", "head", f"munged --foreground --force --key-file={key} {shlex.join(munge)}")
        self._wait(lambda: (self.folder / "munge" / "socket").exists(), "munged has opened its socket")
        self._start("slurmctld", "head", "slurmctld -D")
        for node in NODES:
            self._start(node, node, f"slurmd -D -N {node}")
        self._wait(lambda: self.nodes() == ["idle", "idle"], "both nodes are idle")

    def _start(self, daemon: str, host: str, command: str) -> None:
        """Start a daemon in a namespace of processes: when its first process is killed, all of them end."""
        namespace = dict(zip(("head", *NODES), (self._hosts.router, *self._hosts.hosts), strict=True))[host]
        kinds = ["--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        script = f"hostname {host} && mount -t tmpfs shm /dev/shm && {{ {command} & wait $!; }}"
        with (self.folder / f"{daemon}.log").open("w") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", namespace, "unshare", *kinds, "sh", "-c", script],
                env=self._environment,
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._inits[daemon] = process
        self._daemons.callback(process.wait)
        self._daemons.callback(process.kill)

    def _wait(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not is_so():
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in self._inits.values()):
                logs = [f"{name}:\n{(self.folder / f'{name}.log').read_text()}" for name in self._inits]
                why = f"timed out after {START_SECONDS:.0f} s, or a daemon has ended: {what}"
                raise RuntimeError("\n".join([why, *logs]))
            time.sleep(0.2)

    def end(self) -> None:
        self._daemons.close()

    def command(self, *command: str, check: bool = True) -> str:
        """Run a command of SLURM on the router, and return what it prints."""
        inside = ["ip", "netns", "exec", self._hosts.router, *command]
        done = subprocess.run(
            inside, env=self._environment, capture_output=True, text=True, timeout=60, cwd=self.folder
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def nodes(self) -> list[str]:
        """The states of the nodes."""
        return self.command("sinfo", "--noheader", "--Node", "--format=%T", check=False).split()

    def submit(self, script: str) -> "Job":
        """Put a batch script into the queue."""
        number = len(list(self.folder.glob("*.sbatch")))
        file = self.folder / f"{number}.sbatch"
        file.write_text(script)
        return Job(self, self.command("sbatch", "--parsable", str(file)).strip())

    def clear(self) -> None:
        """End all jobs, such as those of a failed test."""
        self.command("scancel", "--user=root")
        self._wait(lambda: self.nodes() == ["idle", "idle"] and not self.processes(), "all jobs have ended")

    def processes(self) -> list[int]:
        """The processes on both hosts, by their process ids outside of the namespaces, without the daemons."""
        return [pid for node in NODES for pid in self._below(node)]

    def left(self) -> list[str]:
        """What a job has left on the hosts: processes, segments of shared memory, temporary files."""
        memory = [Path("/proc", str(self._init(node)), "root", "dev", "shm") for node in NODES]
        temporary = [self.folder / f"tmp-{node}" for node in NODES]
        paths = [path for place in (*memory, *temporary) for path in place.rglob("*") if not _is_torchinductor(path)]
        return [*map(describe, self.processes()), *map(str, paths)]

    def _init(self, daemon: str) -> int:
        (pid,) = _children(self._inits[daemon].pid)
        return pid

    def _below(self, node: str) -> list[int]:
        """All processes of a node but the daemon and the first process."""
        found: list[int] = []
        new = _children(self._init(node))
        while new:
            found += new
            new = [child for pid in new for child in _children(pid)]
        return [pid for pid in found[1:] if is_alive(pid)]  # the daemon is the first child of the first process


class Job:
    """A job of a cluster.

    Args:
        cluster: The cluster.
        number: The job's number.
    """

    def __init__(self, cluster: Cluster, number: str) -> None:
        self.cluster, self.number = cluster, number

    def shown(self, name: str) -> str:
        """What ``scontrol show job`` says, such as of ``JobState`` or ``ExitCode``."""
        (value,) = re.findall(rf"\b{name}=(\S+)", self.cluster.command("scontrol", "show", "job", self.number))
        return str(value)

    @property
    def state(self) -> str:
        return self.shown("JobState")

    def said(self) -> str:
        """The output of all tasks."""
        file = self.cluster.folder / f"relay-{self.number}.out"
        return file.read_text() if file.exists() else ""

    def wait(self, seconds: float) -> str:
        """Wait until the job has ended, with all its processes, and return its state."""
        self.until(lambda: self.state in ENDED and not self.cluster.processes(), seconds)
        return self.state

    def until(self, is_so: Callable[[], bool], seconds: float) -> None:
        """Wait for something.

        Raises:
            AssertionError: If it is not so in time.
        """
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline, f"{self.state} after {seconds} s: {self.cluster.left()}\n{self.said()}"
            time.sleep(0.2)

    def task(self, rank: int) -> int:
        """The process of a rank, by its process id outside of the namespaces."""
        (pid,) = (pid for pid in self.cluster.processes() if _is_task(pid, self.number, rank))
        return pid

    def worker(self, rank: int) -> int:
        """The worker that a rank supervises, by its process id outside of the namespaces."""
        variable = f"SLURM_PROCID={rank}"
        workers = [pid for pid in self.cluster.processes() if "-m strategies.pipeline.worker.serve " in describe(pid)]
        (pid,) = (pid for pid in workers if variable in _variables(pid))
        return pid


def _is_torchinductor(path: Path) -> bool:
    """Whether a path is the empty folder of torch's cache, which importing parts of torch makes."""
    return path.is_dir() and path.name.startswith("torchinductor_")


def _is_task(pid: int, job: str, rank: int) -> bool:
    """Whether a process is what ``srun`` has started for a rank: not a child of that."""
    variables = {f"SLURM_JOB_ID={job}", f"SLURM_PROCID={rank}", "SLURM_STEP_ID=0"}
    return variables <= _variables(pid) and not variables <= _variables(parent(pid))


def _variables(pid: int) -> set[str]:
    with suppress(FileNotFoundError, ProcessLookupError):
        return set(Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0"))
    return set()


def _children(pid: int) -> list[int]:
    with suppress(FileNotFoundError, ProcessLookupError):
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    return []


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """Context with a cluster whose files are in a folder. Every process on it has ended afterwards."""
    with two_hosts() as hosts:
        cluster = Cluster(folder, hosts)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.end()
