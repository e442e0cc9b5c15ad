"""The child's half of the test harness: calls the function, looks for what it left, reports to `harness.run`."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import procfs


def _end_at_once() -> None:
    """The last of a fork's exit handlers: ends it without taking the interpreter apart, if it has no other thread.

    That takes 0.4 s, most of it for copies of the server's memory, and what can go wrong then are threads.
    Those of torch's pool only wait for work. What a test starts as a new interpreter ends as any other.
    """
    if _returned and _names_of_other_threads() <= {"pt_thread_pool"}:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)


def _names_of_other_threads() -> set[str]:
    names = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError):  # it has ended
            if int(thread) != os.getpid():
                names.add(Path(f"/proc/self/task/{thread}/comm").read_text().strip())
    return names


atexit.register(_end_at_once)  # before the server imports what registers handlers; the first one is called last
_returned = False
"""Whether this is a fork whose function has returned."""

# Set by libraries when they are imported or seeded, not by what is under test.
LIBRARY_VARIABLES = {
    "CUDA_DEVICE_ORDER",  # Lightning's accelerator
    "KMP_DUPLICATE_LIB_OK",  # scikit-learn
    "KMP_INIT_AT_FORK",
    "PL_GLOBAL_SEED",  # Lightning's seed_everything
    "PL_SEED_WORKERS",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # Lightning's look for GPUs
}


DATA_PLANE = "RELAY_TESTS_DATA_PLANE"
"""The environment variable in which pytest's option ``--data-plane`` reaches the child."""
ACCELERATOR = "RELAY_TESTS_ACCELERATOR"
"""The environment variable in which pytest's option ``--accelerator`` reaches the child."""
VALUES = "values"
"""The key of :func:`data_planes` for values that the driver has received from device to device."""


@dataclass(frozen=True)
class Order:
    """What the parent asks of the child."""

    sys_path: list[str]
    module_name: str
    module_file: str | None
    call: bytes  # pickled (fn, args)
    allow: frozenset[str]
    settle_seconds: float
    fork_server: int  # process id of the fork server that this process uses for workers


@dataclass(frozen=True)
class Report:
    """What the child answers."""

    raised: str | None = None  # the traceback
    result: bytes = b""
    leaks: tuple[str, ...] = ()
    data_planes: Counter[str] = field(default_factory=Counter)  # see `data_planes`


def settled(find: Callable[[], list[str]], settle_seconds: float) -> list[str]:
    """What ``find`` still returns after waiting for it to become empty."""
    deadline = time.monotonic() + settle_seconds
    while (leaks := find()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return leaks


def forked(scratch: str) -> int:
    """The same as running this file, in a fork of a process that has imported it."""
    os.setsid()
    sys.argv = [__file__, scratch]  # Lightning's launcher runs this again for the other ranks
    sys.modules["__main__"].__file__ = __file__  # and multiprocessing's spawn imports that
    sys.modules["__main__"].__spec__ = None
    code = main(Path(scratch))
    global _returned
    _returned = True
    return code


def main(scratch: Path) -> int:
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the parent asks for stacks with SIGABRT
    _end_with_parent()
    # Semaphores of multiprocessing carry the name of this test, for which the parent looks.
    multiprocessing.current_process()._config["semprefix"] = f"/{scratch.name}"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    order: Order = pickle.loads((scratch / "io/order").read_bytes())
    sys.path[:] = order.sys_path
    reports = _claim(scratch / "io/claimed")
    try:
        _import_module(order)
        fn, args = pickle.loads(order.call)
        if plane := os.environ.get(DATA_PLANE):
            _use_data_plane(plane)
        before = _Surroundings.now()
        result = fn(*args)
        if not reports:
            return 0
        leaks = settled(lambda: _leaks(before, scratch, order), order.settle_seconds)
        report = Report(result=pickle.dumps(result), leaks=tuple(leaks), data_planes=data_planes())
    except BaseException:
        if not reports:
            raise
        report = Report(raised=traceback.format_exc())
    (scratch / "io/report.part").write_bytes(pickle.dumps(report))
    os.rename(scratch / "io/report.part", scratch / "io/report")
    if report.raised or report.leaks:
        sys.stdout.flush()
        os._exit(0)  # the verdict is known; a forgotten thread must not keep the process until the time-out
    return 0


@functools.cache
def data_planes() -> Counter[str]:
    """Which data planes have been used with ``--data-plane``: in this process, or by the children of pytest.

    For each plane, the number of pipelines with several stages that have chosen it; under ``VALUES``, the number of
    values that drivers have received from device to device.
    """
    return Counter()


def _use_data_plane(plane: str) -> None:
    """Has pipelines use a data plane, if the test leaves the choice to them.

    Where they cannot use it, the test fails: it must not pass over another plane. ``pipelined_backward=False`` is
    refused on planes of devices by name, so such pipelines stay on gloo.
    """
    from strategies.pipeline.executor.settings import Settings
    from strategies.pipeline.transport.device import DeviceReceiver
    from strategies.pipeline.transport.link import Arriving
    from strategies.pipeline.transport.planes import AUTO, chosen_plane

    choose, begin, used = Settings.plane, DeviceReceiver.begin, data_planes()

    def chosen(own: Settings, devices: Any, hosts: Any) -> str:
        is_ours = own.data_plane == AUTO and own.pipelined_backward
        name = chosen_plane(plane, devices, hosts) if is_ours else choose(own, devices, hosts)
        if len(devices) > 1:
            used[name] += 1
        return name

    def counted(own: DeviceReceiver, pass_number: int, microbatch: int) -> Arriving:
        used[VALUES] += 1
        return begin(own, pass_number, microbatch)

    Settings.plane, DeviceReceiver.begin = chosen, counted


def _end_with_parent() -> None:
    """The kernel kills this process when pytest ends, however it ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _claim(file: Path) -> bool:
    """Whether this process is the first here: Lightning's DDP launcher starts ranks by running `sys.argv` again."""
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _import_module(order: Order) -> None:
    """Makes the function's module importable by its name, also where pytest loaded it from a file off the path."""
    name, file = order.module_name, order.module_file
    if name == "__main__" or name in sys.modules or file is None:
        return
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise
        spec = spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


@dataclass(frozen=True)
class _Surroundings:
    """What a function could change without saying so."""

    env: dict[str, str]
    threads: frozenset[threading.Thread]
    ports: frozenset[int]

    @staticmethod
    def now() -> _Surroundings:
        threads = frozenset(thread for thread in threading.enumerate() if not thread.daemon)
        return _Surroundings(dict(os.environ), threads, frozenset(procfs.listening_ports()))


def _leaks(before: _Surroundings, scratch: Path, order: Order) -> list[str]:
    gc.collect()  # stores and RPC agents close their sockets when they are collected
    now = _Surroundings.now()
    names = {name for name, _ in now.env.items() ^ before.env.items()} - LIBRARY_VARIABLES
    pids = [pid for pid in procfs.family(os.getsid(0), scratch, order.fork_server) if pid != os.getpid()]
    found = {
        "process": [procfs.describe(pid) for pid in pids if not _lives_as_long_as_this(pid)],
        "thread": [repr(thread) for thread in now.threads - before.threads],
        "port": [str(port) for port in sorted(now.ports - before.ports)],
        "env": [f"{name}={now.env.get(name)!r}, was {before.env.get(name)!r}" for name in sorted(names)],
        **_torch_leaks(),
    }
    return [f"{kind}: {what}" for kind, whats in found.items() if kind not in order.allow for what in whats]


def _lives_as_long_as_this(pid: int) -> bool:
    """Whether it is Python's resource tracker, Relay's fork server or the successor of that; the parent sees whether it
    is gone then.

    What a fork server has forked may have the same command, but another parent.
    """
    command = procfs.describe(pid)
    if "-m strategies.launch " in command:
        parent = procfs.parent(pid)
        if "strategies.launch successor" not in command:
            return os.getpid() == parent
        is_orphan = "-m strategies.launch fork_server " not in procfs.describe(parent)  # the test has killed the server
        return is_orphan or os.getpid() == procfs.parent(parent)
    return "multiprocessing.resource_tracker" in command


def _torch_leaks() -> dict[str, list[str]]:
    if "torch" not in sys.modules:
        return {}
    import torch.distributed as dist

    leaks = {}
    if dist.is_available() and dist.is_initialized():
        leaks["process_group"] = ["torch's default process group is initialised"]
    if dist.is_available() and dist.rpc.is_available() and dist.rpc.api._is_current_rpc_agent_set():
        leaks["rpc"] = ["torch.distributed.rpc is initialised"]
    return leaks


if __name__ == "__main__":
    from harness_child import main as child_main  # by its name, under which the parent's pickle knows Order and Report

    sys.exit(child_main(Path(sys.argv[1])))
