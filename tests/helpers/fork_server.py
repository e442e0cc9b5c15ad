"""A process that has imported torch and Lightning, and forks a child for each test: imports are most of a test's time.

pytest ── request: scratch folder, environment, sys.path ──▶ fork server ── fork ──▶ child: harness_child.main(scratch)
pytest ◀── pid; later: the pid's exit code ─────────────────┘

The server stays single-threaded and computes nothing, so that its forks are as good as fresh processes. It ends when
pytest closes the pipe of requests, and the kernel ends it, and with it its children, should pytest be killed.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

_IMPORT_TIME = ("OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "MALLOC_", "LD_", "PYTHON", "TORCH_", "CUDA_")
"""Variables that libraries and Python read once, when they are loaded."""


def read_at_import(variables: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that a fork of a running process cannot change any more."""
    return {name: value for name, value in variables.items() if name.startswith(_IMPORT_TIME)}


class ForkServer:
    """pytest's end. ``variables`` is the environment that the server is started with."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.read_at_import = read_at_import(variables)
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(requests), str(answers)],
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            pass_fds=(requests, answers),
            start_new_session=True,
        )
        os.close(requests)
        os.close(answers)
        self._received = b""
        self._exit_codes: dict[int, int] = {}

    def fork(self, scratch: Path, variables: Mapping[str, str]) -> Forked:
        """Starts a child that runs what ``scratch`` orders, in a session of its own."""
        request = {"scratch": str(scratch), "variables": dict(variables), "sys_path": sys.path}
        os.write(self._requests, json.dumps(request).encode() + b"\n")
        while True:
            pid, exit_code = self._next_answer()
            if exit_code is None:
                return Forked(pid, self)

    def exit_code(self, pid: int, timeout_seconds: float | None) -> int | None:
        """The exit code of a child, as in :mod:`subprocess`; ``None`` if it is still running after the time-out."""
        while pid not in self._exit_codes:
            if b"\n" not in self._received and not select.select([self._answers], [], [], timeout_seconds)[0]:
                return None
            self._next_answer()
        return self._exit_codes[pid]

    def end(self) -> None:
        """Ends the server."""
        os.close(self._requests)
        os.close(self._answers)
        self._process.wait()

    def _next_answer(self) -> tuple[int, int | None]:
        while b"\n" not in self._received:
            if not (received := os.read(self._answers, 1 << 16)):
                raise RuntimeError(f"the fork server has ended with exit code {self._process.wait()}")
            self._received += received
        line, self._received = self._received.split(b"\n", 1)
        pid, exit_code = json.loads(line)
        if exit_code is not None:
            self._exit_codes[pid] = exit_code
        return pid, exit_code


class Forked:
    """A child of the fork server, with the part of :class:`subprocess.Popen` that the harness uses."""

    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid, self._server = pid, server

    def wait(self, timeout: float | None = None) -> int:
        code = self._server.exit_code(self.pid, timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout)
        return code


def serve(requests: int, answers: int) -> Path:
    """Forks a child for each request; returns in the child, with the scratch folder."""
    for name in ("pytorch_lightning", "torch.distributed.rpc"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    running: dict[int, int] = {}  # file descriptors of children, which become readable when those end
    buffer = b""
    while True:
        for ready in select.select([requests, *running], [], [])[0]:
            if ready != requests:
                pid, status = os.waitpid(running.pop(ready), 0)
                os.close(ready)
                os.write(answers, f"[{pid}, {os.waitstatus_to_exitcode(status)}]\n".encode())
                continue
            received = os.read(requests, 1 << 20)
            if not received:
                sys.exit(0)
            *lines, buffer = (buffer + received).split(b"\n")
            for line in lines:
                if (pid := os.fork()) == 0:
                    for descriptor in (requests, answers, *running):
                        os.close(descriptor)
                    return _become_child(json.loads(line))
                os.write(answers, f"[{pid}, null]\n".encode())
                running[os.pidfd_open(pid)] = pid


def _become_child(request: dict[str, object]) -> Path:
    os.setsid()
    scratch = Path(str(request["scratch"]))
    os.chdir(scratch / "cwd")
    output = os.open(scratch / "io/output", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["variables"])
    gc.unfreeze()
    tempfile.tempdir = None  # found anew, from the new TMPDIR
    child = Path(__file__).with_name("harness_child.py")
    sys.argv = [str(child), str(scratch)]  # Lightning's launcher runs this again for the other ranks
    sys.modules["__main__"].__file__ = str(child)  # and multiprocessing's spawn imports that
    return scratch


if __name__ == "__main__":
    from harness_child import main

    sys.exit(main(serve(int(sys.argv[1]), int(sys.argv[2]))))
