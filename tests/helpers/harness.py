"""The only way to run a test that starts processes: in a child process, with a time-out, and with nothing left behind.

pytest ── run(fn, *args) ──▶ child: harness_child.main(SCRATCH)   (own session, TMPDIR, working directory)
                               1. imports the test module and calls fn(*args)
                               2. looks for what fn left, waiting for what is just ending
                               3. writes the result, or the traceback, to SCRATCH/io
pytest ◀── the result, or an AssertionError with traceback and last output
           4. looks once more from outside, then kills whatever is left

def two_stages(seed):                      # at top level of a test module
    trainer = Trainer(devices=2, strategy="rpc_sequential"); ...
    return losses                          # plain types and tensors

def test_parity():
    assert run(two_stages, 0) == pytest.approx(run(one_process, 0))
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import procfs
from harness_child import Order, Report, data_planes, settled

from strategies.launch.fork_server import VARIABLE, ForkedProcess, OwnForkServer, traits_of
from strategies.launch.workers import WORKER_MODULES, WORKER_MODULES_LATER, environment_of_worker

LEAKS = ("process", "thread", "port", "tmp", "shm", "env", "process_group", "rpc")
OUTPUT_LINES = 200
_CONSTANT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONFAULTHANDLER": "1",  # every Python process of the tree shows its stacks when it is sent SIGABRT
    "PYTHONUNBUFFERED": "1",
}
"""The environment of every child, unless a test says otherwise."""
OWN_SERVER: dict[str, str | None] = {VARIABLE: None}
"""For ``env``: the workers of the test's process belong to its session, as those of a user's script do."""
_CHILD_MODULES = (
    *("harness_child", "pytorch_lightning", "torch._dynamo", "torch.distributed.rpc", "pytest"),
    *("strategies.rpc_sequential", "trainer.trainer"),
)

_WORKER_MODULES_OF_TESTS = ("pytest", "pytorch_lightning", "torch.distributed.checkpoint")
"""What a worker imports with a layer's class, because its test module does: it takes more than two seconds."""


def run(
    fn: Callable[..., Any],
    *args: Any,
    timeout_seconds: float = 120,
    env: Mapping[str, str | None] | None = None,
    allow: Collection[str] = (),
    settle_seconds: float = 10,
) -> Any:
    """Run ``fn(*args)`` in a separate process and return its result.

    The process is a fork of one that has imported torch, Lightning and the Trainer, and nothing else of consequence.
    Workers that it starts are forks of another one, unless ``env`` has ``OWN_SERVER``.

    Args:
        fn: a top-level function of a test module, or any function that cloudpickle can send.
        args: plain types and tensors.
        timeout_seconds: after this, the stacks of all its processes are shown and all of them are killed.
        env: environment variables for the child; ``None`` removes one. ``OMP_NUM_THREADS`` is 1 unless given here.
        allow: kinds of leaks (see ``LEAKS``) that ``fn`` may leave behind; for what Lightning itself leaves.
        settle_seconds: how long processes, threads and ports may take to end after ``fn`` has returned.

    Raises:
        AssertionError: ``fn`` raised, died, ran out of time, or left something behind.
        ValueError: ``allow`` names an unknown kind.
    """
    if unknown := set(allow) - set(LEAKS):
        raise ValueError(f"allow got {sorted(unknown)}; the kinds of leaks are {', '.join(LEAKS)}")
    with tempfile.TemporaryDirectory(prefix=procfs.PREFIX, ignore_cleanup_errors=True) as folder:
        scratch = Path(folder).resolve()
        for name in ("io", "tmp", "cwd"):
            (scratch / name).mkdir()
        order = Order(
            sys_path=[os.path.abspath(entry) for entry in sys.path],
            module_name=fn.__module__,
            module_file=getattr(sys.modules.get(fn.__module__), "__file__", None),
            call=cloudpickle.dumps((fn, args)),
            allow=frozenset(allow),
            settle_seconds=settle_seconds,
            fork_server=_servers().of_workers.pid,
        )
        (scratch / "io/order").write_bytes(pickle.dumps(order))
        segments_before = procfs.shm_segments(scratch.name)
        child = _start(scratch, env or {})
        try:
            report = _await_report(child, scratch, timeout_seconds)
            data_planes().update(report.data_planes)
            leaks = [*report.leaks, *_leaks_outside(child.pid, scratch, order, segments_before)]
            if leaks:
                raise AssertionError("left behind:\n  " + "\n  ".join(leaks))
        except AssertionError as error:
            raise AssertionError(f"{fn.__qualname__} {error}\n{_last_output(scratch)}") from None
        finally:
            _kill(child, scratch)
        return pickle.loads(report.result)


def _start(scratch: Path, env: Mapping[str, str | None]) -> subprocess.Popen[bytes] | ForkedProcess:
    servers = _servers()
    changed = {**os.environ, **_CONSTANT, VARIABLE: str(servers.directory), **env}
    changed |= {
        "TMPDIR": str(scratch / "tmp"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "io/inductor"),  # torch would choose one in TMPDIR and keep it
    }
    variables = {name: value for name, value in changed.items() if value is not None}
    with open(scratch / "io/output", "ab") as output:
        if servers.of_children.traits == traits_of(variables):
            return servers.of_children.fork(
                "harness_child:forked",
                [str(scratch)],
                environment=variables,
                paths=sys.path,
                directory=scratch / "cwd",
                output=output.fileno(),
            )
        return subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("harness_child.py")), str(scratch)],
            cwd=scratch / "cwd",
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@dataclass(frozen=True)
class _Servers:
    """The fork servers of this pytest process.

    Attributes:
        of_children: Of the processes in which tests run.
        of_workers: Of the workers which those processes start.
        directory: Where ``of_workers`` listens.
    """

    of_children: OwnForkServer
    of_workers: OwnForkServer
    directory: Path


@functools.cache
def _servers() -> _Servers:
    environment = {**os.environ, **_CONSTANT}
    folder = tempfile.TemporaryDirectory(prefix="relay-test-server-")
    atexit.register(folder.cleanup)
    directory = Path(folder.name)
    of_workers = environment_of_worker(sys.path, threads=int(_CONSTANT["OMP_NUM_THREADS"]), base=environment)
    return _Servers(
        OwnForkServer(_CHILD_MODULES, environment=environment, paths=sys.path),
        OwnForkServer(
            [*WORKER_MODULES, *WORKER_MODULES_LATER, *_WORKER_MODULES_OF_TESTS],
            environment=of_workers,
            paths=sys.path,
            directory=directory,
        ),
        directory,
    )


def _await_report(child: subprocess.Popen[bytes] | ForkedProcess, scratch: Path, timeout_seconds: float) -> Report:
    try:
        code = child.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        _show_stacks(child, scratch)
        raise AssertionError(f"was still running after {timeout_seconds} s; its stacks are below") from None
    if not (scratch / "io/report").exists():
        raise AssertionError(f"ended its process with exit code {code}")
    report: Report = pickle.loads((scratch / "io/report").read_bytes())
    if report.raised:
        raise AssertionError(f"raised in the child\n{report.raised}")
    if code != 0:
        raise AssertionError(f"returned, but its process then ended with exit code {code}")
    return report


def _leaks_outside(session: int, scratch: Path, order: Order, segments_before: set[str]) -> list[str]:
    """Orphans, and the files that are still there once every exit handler has run."""

    def find() -> list[str]:
        found = {
            "process": [procfs.describe(pid) for pid in procfs.family(session, scratch, order.fork_server)],
            "tmp": [str(path.relative_to(scratch / "tmp")) for path in sorted((scratch / "tmp").rglob("*"))],
            "shm": procfs.unowned(procfs.shm_segments(scratch.name) - segments_before),
        }
        return [f"{kind}: {what}" for kind, whats in found.items() if kind not in order.allow for what in whats]

    return settled(find, order.settle_seconds)


def _last_output(scratch: Path) -> str:
    lines = (scratch / "io/output").read_text(errors="replace").splitlines()[-OUTPUT_LINES:]
    return "\n".join(["--- last output of the child", *(lines or ["(none)"])])


def _show_stacks(child: subprocess.Popen[bytes] | ForkedProcess, scratch: Path) -> None:
    """Appends where each thread of each process stands to the output; frozen first, so that it is one picture."""
    pids = procfs.family(child.pid, scratch, _servers().of_workers.pid)
    for pid in pids:
        _send(pid, signal.SIGSTOP)
    for pid in pids:
        with open(scratch / "io/output", "a") as output:
            output.write(f"\n--- stacks of {procfs.describe(pid)}\n")
        _send(pid, signal.SIGABRT)
        _send(pid, signal.SIGCONT)
        deadline = time.monotonic() + 2
        while pid in procfs.family(child.pid, scratch, _servers().of_workers.pid) and time.monotonic() < deadline:
            time.sleep(0.02)


def _kill(child: subprocess.Popen[bytes] | ForkedProcess, scratch: Path) -> None:
    """Kills the child and whatever it started, until nothing is left."""
    deadline = time.monotonic() + 10
    while (pids := procfs.family(child.pid, scratch, _servers().of_workers.pid)) and time.monotonic() < deadline:
        for pid in pids:
            _send(pid, signal.SIGKILL)
        time.sleep(0.02)
    child.wait()


def _send(pid: int, signal_number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # ended meanwhile
        os.kill(pid, signal_number)
