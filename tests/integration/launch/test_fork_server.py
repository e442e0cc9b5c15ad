"""Forks of the fork server are as good as fresh processes, and none of them, nor the server, outlives its driver."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import procfs
import psutil
import pytest
from harness import OWN_SERVER, run
from paths import PYTHONPATH
from undisturbed import until_undisturbed

from strategies.launch.fork_server import VARIABLE, ForkedProcess, OwnForkServer, RunningForkServer, server_for
from strategies.launch.process_ends import end_of
from strategies.launch.workers import Workers, fork_server


def describe_process(file: str) -> None:
    """Called in a fork: notes what it has, on the file and on standard output."""
    import resource
    import threading

    import numpy as np

    seen = {
        "environment": {name: value for name, value in os.environ.items() if name.startswith("RELAY_TEST_")},
        "path": sys.path,
        "directory": os.getcwd(),
        "umask": os.umask(0),
        "limit": resource.getrlimit(resource.RLIMIT_CORE),
        "cores": sorted(os.sched_getaffinity(0)),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "threads": threading.active_count(),
        "random": np.random.rand(),
        "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
        "input": sys.stdin.read(),
    }
    Path(file).write_text(json.dumps(seen))
    print("printed")


def exit_with(how: str) -> int:
    if how == "raise":
        raise LookupError("no such thing")
    if how.startswith("signal"):
        os.kill(os.getpid(), int(how.split()[1]))
    if how == "sleep":
        time.sleep(60)
    return int(how)


def fork(server: Any, function: str, *arguments: Any, **more: Any) -> ForkedProcess:
    environment = {**os.environ, "RELAY_TEST_NOW": "1"}
    options = {"environment": environment, "paths": sys.path, "timeout_seconds": 100, **more}
    process: ForkedProcess = server.fork(f"{__name__}:{function}", arguments, **options)
    return process


def own_server() -> OwnForkServer:
    return OwnForkServer(["numpy"], environment=dict(os.environ), paths=sys.path)


def what_a_fork_has() -> dict[str, Any]:
    import resource

    server = own_server()
    first = fork(server, "describe_process", str(Path("before").resolve()))
    assert first.wait(60) == 0
    os.mkdir("elsewhere")
    os.chdir("elsewhere")
    os.umask(0o077)
    os.nice(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with open("output", "wb") as output:
        second = fork(
            server, "describe_process", "after", stdin=subprocess.PIPE, output=output.fileno(), name="relay-test"
        )
        assert second.stdin is not None
        while (name := psutil.Process(second.pid).name()) != "relay-test":  # which it gets a little later
            time.sleep(0.01)
        second.stdin.write(b"sent")
        second.stdin.close()
        assert second.wait(60) == 0 and second.poll() == 0 and second.returncode == 0
    before, after = json.loads(Path("../before").read_text()), json.loads(Path("after").read_text())
    own = {
        "environment": {"RELAY_TEST_NOW": "1"},
        "path": sys.path,
        "directory": os.getcwd(),
        "umask": 0o077,
        "limit": [0, 0],
        "cores": sorted(os.sched_getaffinity(0)),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "interrupt": True,
        "threads": 1,
        "descriptors": [0, 1, 2],
        "input": "sent",
    }
    differs = {key: (after[key], value) for key, value in own.items() if after[key] != value}
    drawn = (before["random"], after["random"])
    server.end()
    return {"differs": differs, "drawn": drawn, "printed": Path("output").read_text(), "name": name}


def test_a_fork_is_as_good_as_a_fresh_process() -> None:
    seen = run(what_a_fork_has, env=OWN_SERVER)
    assert not seen["differs"]
    assert seen["drawn"][0] != seen["drawn"][1]
    assert seen["printed"] == "printed\n" and seen["name"] == "relay-test"


def how_forks_end() -> dict[str, Any]:
    server = own_server()
    statuses = {how: fork(server, "exit_with", how).wait(60) for how in ("0", "3", "raise", "signal 11")}
    sleeping = fork(server, "exit_with", "sleep")
    with pytest.raises(subprocess.TimeoutExpired):
        sleeping.wait(0.1)
    assert sleeping.poll() is None
    sleeping.kill()
    statuses["killed"] = sleeping.wait(60)
    sleeping.kill()
    assert sleeping.is_status_known and end_of(sleeping) == "was killed by signal 9"
    late = fork(server, "exit_with", "sleep")
    os.kill(server.pid, signal.SIGSTOP)  # like a server that is busy
    late.kill()
    with pytest.raises(subprocess.TimeoutExpired):
        late.wait(1.0)
    os.kill(server.pid, signal.SIGCONT)
    statuses["reported late"] = late.wait(60)
    assert late.is_status_known
    orphan = fork(server, "exit_with", "sleep")
    survivor = fork(server, "exit_with", "sleep", outlives_server=True)
    os.kill(server.pid, signal.SIGKILL)
    statuses["with its server"] = orphan.wait(60)
    with pytest.raises(OSError):
        fork(server, "exit_with", "0")
    with pytest.raises(subprocess.TimeoutExpired):
        survivor.wait(0.1)
    assert survivor.poll() is None and procfs.is_alive(survivor.pid)
    survivor.kill()
    statuses["without its server"] = survivor.wait(60)
    assert not survivor.is_status_known and end_of(survivor).startswith("has ended in an unknown way (its fork server")
    server.end()
    return {"statuses": statuses, "left": [pid for pid in (orphan.pid, survivor.pid) if procfs.is_alive(pid)]}


def test_the_exit_status_is_known() -> None:
    seen = run(how_forks_end, env=OWN_SERVER)
    assert seen["statuses"] == {
        **{"0": 0, "3": 3, "raise": 1, "signal 11": -signal.SIGSEGV},
        **dict.fromkeys(("killed", "reported late", "with its server", "without its server"), -signal.SIGKILL),
    }
    assert not seen["left"]


def session() -> int:
    """Starts and ends the workers of a session; returns the process id of their parent."""
    workers = Workers(["stage 0"])
    workers.start(timeout_seconds=60.0, threads=1)
    parent = psutil.Process(workers._processes[0].pid).ppid()
    workers.stop(grace_seconds=5.0)
    return parent


def await_successor() -> OwnForkServer:
    """The server of this process, once its successor forks."""
    server = OwnForkServer._of_this_process
    assert server is not None
    deadline = time.monotonic() + 60
    while fork_server(1) is server:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return server


def sessions(changes: list[Mapping[str, str]]) -> list[int]:
    """The process ids of the servers of this process in successive sessions."""
    servers = []
    for change in changes:
        os.environ.update(change)
        server = session()
        assert psutil.Process(server).ppid() == os.getpid()
        servers.append(server)
        await_successor()
        successor = session()
        assert psutil.Process(successor).ppid() == server
    return servers


@pytest.mark.slow
def test_a_driver_keeps_its_server() -> None:
    """Unless a variable has changed that is read when a program is loaded; its successor serves later sessions."""
    one, other = run(sessions, [{}, {"MKL_VERBOSE": "0"}], env=OWN_SERVER, allow=["env"])
    assert one != other


def modules_of_a_fork() -> int:
    return "torch._dynamo" in sys.modules


def sessions_without_waiting() -> tuple[list[int], list[int]]:
    """Successive servers, where the second session begins before there is a successor, and what they have imported."""
    servers, imported = [], []
    for _ in range(2):
        used, server = session(), fork_server(1)
        if isinstance(server, OwnForkServer):  # on a slow machine there may be a successor already
            servers.append(used)
            imported.append(fork(server, "modules_of_a_fork").wait(60))
    os.environ["RELAY_TEST_ANY"] = "1"
    await_successor()
    server = fork_server(1)
    imported.append(fork(server, "modules_of_a_fork").wait(60))
    servers.append(session())
    return servers, imported


def test_no_session_waits_for_what_workers_import_later() -> None:
    (*before, after), imported = run(sessions_without_waiting, env=OWN_SERVER, allow=["env"])
    assert len(set(before)) <= 1 and after not in before
    assert imported == [*[0] * len(before), 1]


def lost_servers() -> list[str]:
    """Kills what waits, between sessions and in one; returns whether the next sessions were served by a new server."""
    session()
    served = []
    for kills_server, waits in ((False, False), (True, False), (False, True), (True, True)):
        server = await_successor()
        assert server._successor is not None
        victim = server.pid if kills_server else server._successor._process.pid
        os.kill(victim, signal.SIGKILL)
        if waits:
            await_end(victim, server)
            served.append("the same" if session() == server.pid else "a new one")
        else:
            session()  # it may find out in the middle of its start
            session()
    workers = Workers(["stage 0"])
    workers.start(timeout_seconds=60.0, threads=1)
    server = await_successor()
    assert server._successor is not None
    os.kill(server.pid, signal.SIGKILL)
    os.kill(server._successor._process.pid, signal.SIGKILL)
    await_end(server.pid, server)
    assert workers.ended(0, wait_seconds=0.5) is None
    workers.stop(grace_seconds=5.0)
    served.append("the same" if session() == server.pid else "a new one")
    return served


def await_end(pid: int, server: OwnForkServer) -> None:
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid):
        server._process.poll()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_losing_a_server_is_no_error() -> None:
    assert run(lost_servers, env=OWN_SERVER) == ["the same", "a new one", "a new one"]


def server_directory() -> str:
    return os.environ[VARIABLE]


def with_the_servers_of_others(directory: str) -> list[str]:
    """What happens where ``RELAY_FORK_SERVER`` names directories that are not right."""
    seen = []
    for folder, mode in ((directory, None), ("open", 0o755), ("absent", None)):
        if mode is not None:
            os.mkdir(folder)
            os.chmod(folder, mode)
        os.environ[VARIABLE] = folder
        try:
            seen.append(type(server_for(["os"], [], dict(os.environ), sys.path)).__name__)
        except PermissionError as error:
            seen.append(str(error))
    del os.environ[VARIABLE]
    return seen


def test_a_server_of_others_must_be_of_this_user_only() -> None:
    named = run(server_directory)
    seen = run(with_the_servers_of_others, named, env=OWN_SERVER)
    assert seen[0] in (RunningForkServer.__name__, OwnForkServer.__name__)
    assert seen[1:] == [f"{VARIABLE} names open, which is not a private directory of this user", OwnForkServer.__name__]


DRIVER = """
import os, sys, time
from strategies.launch.workers import Workers
workers = Workers(["stage 0"])
workers.start(timeout_seconds=60.0, threads=1)
if os.fork() == 0:  # as a data loader's process, which holds the driver's pipes and sockets open
    time.sleep(3)
    os._exit(0)
print(workers._processes[0].pid, os.getppid(), flush=True)
time.sleep(60)
"""


def kill_the_driver() -> tuple[float, list[str]]:
    """For how long the worker and the server outlive it, and what they leave."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], env=environment, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    worker = int(driver.stdout.readline().split()[0])
    server = psutil.Process(worker).ppid()
    assert psutil.Process(server).ppid() == driver.pid
    driver.kill()
    killed = time.monotonic()
    driver.wait()
    while procfs.is_alive(worker) or procfs.is_alive(server):
        assert time.monotonic() < killed + 20
        time.sleep(0.01)
    seconds = time.monotonic() - killed
    driver.stdout.close()
    return seconds, os.listdir(os.environ["TMPDIR"])


@pytest.mark.slow
def test_nothing_outlives_a_driver_that_is_killed() -> None:

    def ended_soon(found: tuple[float, list[str]]) -> None:
        assert found[0] < 5.0  # the limit for workers; the forked process sleeps for less

    _, left = until_undisturbed(lambda: run(kill_the_driver, env=OWN_SERVER), ended_soon)
    assert not left


def driver_of_a_stuck_fork(file: str) -> None:
    server = own_server()
    process = fork(server, "exit_with", "sleep")
    Path(file).with_suffix(".part").write_text(f"{server.pid} {process.pid}")
    Path(file).with_suffix(".part").rename(file)
    time.sleep(60)


def kill_drivers_of_stuck_forks() -> list[int]:
    drivers = []
    for number in range(3):
        code = f"import {__name__} as m; m.driver_of_a_stuck_fork('pids-{number}')"
        drivers.append(
            subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": ":".join(sys.path)})
        )
    pids = []
    for number, driver in enumerate(drivers):
        while not Path(f"pids-{number}").exists():
            assert driver.poll() is None
            time.sleep(0.05)
        pids += map(int, Path(f"pids-{number}").read_text().split())
        driver.kill()
        driver.wait()
    deadline = time.monotonic() + 60
    while (left := [pid for pid in pids if procfs.is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@pytest.mark.slow
def test_a_killed_driver_leaves_no_server_and_no_stuck_fork() -> None:
    assert run(kill_drivers_of_stuck_forks, env=OWN_SERVER) == []


def refuse(pid: int) -> int:
    raise PermissionError(1, "a sandbox refuses pidfd_open")


def commands_of_a_session(*, forks: bool) -> tuple[list[str], list[str]]:
    """The commands, as ``ps`` shows them, of all processes that this one has started, in a session and after it."""

    def shown() -> list[str]:
        return sorted(" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True))

    if not forks:
        os.pidfd_open = refuse
    assert not shown()
    workers = Workers(["stage 0", "stage 1"])
    workers.start(timeout_seconds=60.0, threads=1)
    within = [command.replace(str(os.getpid()), "DRIVER").replace(workers._directory, "FOLDER") for command in shown()]
    workers.stop(grace_seconds=5.0)
    deadline = time.monotonic() + 60
    while len(set(shown())) < len(shown()) and time.monotonic() < deadline:
        time.sleep(0.05)  # a fork has the name of its server at first
    return within, shown()


ROLES = ("fork_server", "successor")


def test_a_list_of_processes_shows_their_roles() -> None:
    within, after = run(functools.partial(commands_of_a_session, forks=True), env=OWN_SERVER)
    python = f"{sys.executable} -m "
    assert len(within) == 4 and len(after) == 2
    assert [command.split()[2:4] for command in after] == [["strategies.launch", role] for role in ROLES]
    assert within[-2:] == [f"{python}strategies.pipeline worker {rank} DRIVER FOLDER" for rank in range(2)]
    assert all("strategies.pipeline" in command for command in [*within, *after])


IMPORTS = """
import psutil
import strategies, strategies.pipeline, trainer
from strategies import DDPStrategy, RPCSequentialStrategy, ZeROStrategy
from strategies.pipeline import Pipe
from trainer import Trainer
print([process.cmdline() for process in psutil.Process().children(recursive=True)])
"""


@pytest.mark.slow
def test_an_import_starts_no_process() -> None:
    """The fork server starts with the first run that has workers."""
    command = [sys.executable, "-W", "ignore", "-c", IMPORTS]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_workers_start_without_a_fork_server() -> None:
    """As on other systems than Linux."""
    within, after = run(functools.partial(commands_of_a_session, forks=False), env=OWN_SERVER)
    python = f"{sys.executable} -m "
    assert within == [f"{python}strategies.pipeline worker {rank} DRIVER FOLDER" for rank in range(2)]
    assert after == []


def load_into_a_part(file: str) -> int:
    """Called in a fork: loads the states of an optimizer as a worker does; whether that imported the compiler."""
    import pickle

    import torch

    from strategies.optim.restricted import load_states, put_together

    parts, states = pickle.loads(Path(file).read_bytes())
    optimizer = put_together(*parts)
    load_states(optimizer, states)
    (state,) = optimizer.state.values()
    assert torch.equal(state["exp_avg"], states[0]["exp_avg"]) and state["exp_avg"].dtype == torch.float64
    assert optimizer.param_groups[0]["lr"] == 0.5
    return "torch._dynamo" in sys.modules


def import_of_a_worker() -> int:
    import pickle

    import torch

    from strategies.optim.restricted import taken_apart

    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2, dtype=torch.float64))], lr=0.5)
    moments = {"exp_avg": torch.tensor([1.0, 2.0]), "exp_avg_sq": torch.tensor([3.0, 4.0]), "step": torch.tensor(7.0)}
    Path("optimizer").write_bytes(pickle.dumps((taken_apart(optimizer), {0: moments})))
    server = OwnForkServer(["torch"], environment=dict(os.environ), paths=sys.path)
    status = fork(server, "load_into_a_part", str(Path("optimizer").resolve())).wait(100)
    server.end()
    return status


def test_a_worker_loads_optimizer_states_without_importing_the_compiler() -> None:
    """A worker that takes over from a lost one does that before the first batch."""
    assert run(import_of_a_worker, env=OWN_SERVER) == 0
