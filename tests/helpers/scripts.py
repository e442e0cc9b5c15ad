"""A user's script in a fork of this process, which has imported torch, Lightning and the Trainer.

    test ── run(launch) ──▶ child of the harness ── Script(job.py, ...) ──▶ script, rank 0 ─┬─ Lightning's launcher
                                                                                │           ▼
                                                                                └─ fork ──▶ copy, which waits: rank 1

A new interpreter imports those for some seconds of processor time, and each rank that Lightning starts is one: it runs
the script once more. Such a rank has to be a child of rank 0, which can no longer be forked when it has threads. So the
script begins with forks of itself, its copies, of which one becomes a rank whenever the launcher starts one.

Tests of commands start new interpreters, and so does torchrun.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

from paths import environment

from strategies.launch.fork_server import _show_command

_copies: list[tuple[int, int]] = []
"""Process ids of this script's copies that wait, and the pipes over which they are told what to become."""


class Script(subprocess.Popen):
    """Runs a Python script in a fork of this process, if this process has one thread; else in a new interpreter.

    Args:
        file: The script.
        arguments: Its arguments.
        num_copies: How many ranks the script may have Lightning start. Others would be new interpreters.
        more_environment: Variables beside those of this process.
        options: Of :class:`subprocess.Popen`: standard streams and ``start_new_session``.
    """

    def __init__(
        self,
        file: str,
        *arguments: str,
        num_copies: int = 1,
        more_environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self._num_copies = num_copies
        command = [sys.executable, "-W", "ignore", file, *arguments]
        super().__init__(command, env={**environment(), **(more_environment or {})}, text=True, **options)

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:
        if len(os.listdir("/proc/self/task")) > 1:
            return super()._execute_child(args, *rest)
        # As in CPython: preexec_fn, close_fds, ..., then the ends of three pipes, of which -1 is none.
        env, pipes, start_new_session = rest[5], rest[9:15], rest[20]
        script = args[args.index("ignore") + 1 :]
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for number, descriptor in enumerate((pipes[0], pipes[3], pipes[5])):
                    if descriptor != -1:
                        os.dup2(descriptor, number)
                for descriptor in {*pipes} - {-1, 0, 1, 2}:
                    os.close(descriptor)
                if start_new_session:
                    os.setsid()
                _copies.clear()
                for _ in range(self._num_copies):
                    _fork_copy()
                _become(script, env)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        self._child_created = True
        self._close_pipe_fds(*pipes)
        return None


class _Rank(subprocess.Popen):
    """A rank that Lightning's launcher starts: one of the copies, or a new interpreter if there is none."""

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:
        if not _copies:
            return super()._execute_child(args, *rest)
        self.pid, pipe = _copies.pop(0)
        with os.fdopen(pipe, "w") as file:
            json.dump([args[1:], dict(rest[5])], file)
        self._child_created = True
        return None


def waiting_copies() -> set[int]:
    """The process ids of this script's copies that wait."""
    return {pid for pid, _ in _copies}


def _fork_copy() -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid != 0:
        os.close(reading)
        _copies.append((pid, writing))
        return
    os.close(writing)
    for _, pipe in _copies:
        os.close(pipe)
    _copies.clear()
    with os.fdopen(reading) as file:
        order = file.read()
    if not order:  # the script has ended
        os._exit(0)
    _become(*json.loads(order))


def _become(script: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Runs a script as a new interpreter does, and ends as that does."""
    from pytorch_lightning.strategies.launchers import subprocess_script

    subprocess_script.subprocess = SimpleNamespace(Popen=_Rank)
    _show_command([sys.executable, *script])
    weakref.finalize._registry.clear()  # folders of the process that has been forked
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    warnings.simplefilter("ignore")
    sys.argv = list(script)
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__file__ = script[0]
    status = 0
    try:
        exec(compile(Path(script[0]).read_bytes(), script[0], "exec"), vars(module))
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
