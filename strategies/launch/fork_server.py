"""A fork server: a process that has imported torch and forks a worker for each request.

    driver ── request: function, arguments, environment, file descriptors ──▶ fork server ── fork ──▶ worker
    driver ◀── process id and pidfd; at the worker's end: exit status ───────────────┘

Importing torch takes more than a second of CPU time per process. The server imports it once, for all workers of all
sessions of its driver. It has one thread and computes nothing, so its forks behave like new processes. When its driver
ends, for any reason, the server ends its remaining forks and itself.

The imports in the first step of a worker take about as long again. The first workers do not wait for them: a fork of
the server, its successor, imports these modules while the workers run, and then forks the workers of later sessions.
Until then the server forks them.

Each request has a separate connection, which closes when the process that it started has ended. A driver passes the
server's end of the connection over a socket that it shares with its server. A server may also listen in a directory,
for processes that its owner starts: ``RELAY_FORK_SERVER`` in their environment names this directory. (The test harness
does this, so that a test does not import torch for its workers.)

This requires ``fork`` and pidfds, and so Linux. On other systems, each worker is a new interpreter.
"""

import atexit
import ctypes
import errno
import gc
import importlib
import io
import json
import math
import os
import resource
import select
import selectors
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, cast

VARIABLE = "RELAY_FORK_SERVER"
"""The environment variable that names the directory in which a running server listens."""

_READ_AT_IMPORT = (
    *("ATEN_", "CUBLAS_", "CUDA_", "CUDNN_", "DNNL_", "GLIBC_", "GOMP_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_"),
    *("MKL_", "NPY_", "NUMPY_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH", "TZ"),
    *("AOT_INDUCTOR_", "AOT_PARTITIONER_", "CXX", "ENABLE_", "FAKE_ALLOW_META", "INDUCTOR_", "MPMATH_"),
    *("PARTITIONER_", "SYMPY_", "UNSAFE_SKIP_FSDP_MODULE_GUARDS"),  # those of torch's compiler, which a successor loads
)
"""Prefixes of the names of variables that Python or a library reads only once, when it is loaded."""

_READ_LATER = ("PYTHONPATH", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR")
"""Exceptions: the request contains ``sys.path``, and torch reads all other variables at each use."""

_WAIT_SLICE_SECONDS = 0.05
_END_SECONDS = 5.0
"""How long the forks of a server may take to end after its driver has ended, before they are killed."""

_END_SECONDS_WITH_SUCCESSOR = _END_SECONDS + 1.0
"""The same for a server with a successor, which waits for its own forks."""

_REPORT_SECONDS = 5.0
"""How long a server may take to report the end of a fork. After that, the server counts as lost."""

_READY = b"r"
"""The message of a successor that has imported its modules."""

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals to the process group of a driver that the server ignores, because it ends when its driver ends."""

_LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]

_NUM_STREAMS = 4
"""Standard input, output and error, and the working directory."""

_PROGRAM = ("-m", "strategies.launch")
"""The server runs ``__main__`` of the package: workers import this module, which would otherwise be loaded twice."""

_PR_SET_PDEATHSIG = 1
"""From ``linux/prctl.h``: the signal that a process gets when its parent ends."""


class ForkedProcess:
    """A process that a fork server started, with the methods of :class:`subprocess.Popen` that Relay needs.

    Attributes:
        pid: The process id.
        stdin: The write end of the standard input, if that is a pipe.
        returncode: The exit status, negative for a signal, when the process has ended.
        is_status_known: Whether ``returncode`` is the real status. Otherwise the server ended first or does not answer,
            and the process counts as killed.
    """

    def __init__(self, pid: int, pidfd: int, connection: socket.socket, stdin: IO[bytes] | None) -> None:
        self.pid, self.stdin = pid, stdin
        self.returncode: int | None = None
        self.is_status_known = True
        self._ended_at: float | None = None
        self._pidfd, self._lock = pidfd, threading.Lock()
        self._connection: socket.socket | None = connection

    def poll(self) -> int | None:
        """Return the exit status, or ``None`` while the process runs."""
        return self._receive(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process, and return its exit status.

        Raises:
            subprocess.TimeoutExpired: If the process still runs after ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _WAIT_SLICE_SECONDS if deadline is None else deadline - time.monotonic()
            status = self._receive(min(max(0.0, left), _WAIT_SLICE_SECONDS))
            if status is not None:
                return status
            if timeout is not None and left <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)

    def kill(self) -> None:
        """Kill the process."""
        with self._lock, suppress(ProcessLookupError):  # it has ended, and the server has not reported it yet
            if self.returncode is None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def send_signal(self, signum: int) -> None:
        """Send the process a signal. Takes no lock, so signal handlers may call this."""
        with suppress(OSError):  # it has just ended
            if self.returncode is None:
                signal.pidfd_send_signal(self._pidfd, signum)

    def _receive(self, seconds: float) -> int | None:
        with self._lock:
            if self.returncode is None and self._connection is not None:
                self._connection.settimeout(seconds)
                try:
                    message = self._connection.recv(64)
                except (BlockingIOError, TimeoutError):
                    if not self._is_unreported():
                        return None
                    message = b""
                except ConnectionError:
                    message = b""
                self._connection.close()
                self._connection = None
                if message:
                    self._ended(int(message))
            # If the server has been killed or stopped, only the kernel knows whether its fork runs.
            if self.returncode is None and self._has_ended(seconds):
                self.is_status_known = False
                self._ended(-signal.SIGKILL)  # probably by the same signal as the server
            return self.returncode

    def _has_ended(self, seconds: float) -> bool:
        selector = selectors.PollSelector()
        selector.register(self._pidfd, selectors.EVENT_READ)
        return bool(selector.select(seconds))

    def _is_unreported(self) -> bool:
        """Whether the process has ended, but the server has not reported it in time."""
        if self._ended_at is None and self._has_ended(0.0):
            self._ended_at = time.monotonic()
        return self._ended_at is not None and time.monotonic() > self._ended_at + _REPORT_SECONDS

    def _ended(self, status: int) -> None:
        self.returncode = status
        os.close(self._pidfd)


class ForkServer:
    """The client side of a running fork server.

    Args:
        traits: The common properties of all its forks; see :func:`traits_of`.
    """

    def __init__(self, traits: Mapping[str, Any]) -> None:
        self.traits = traits
        self._running: list[ForkedProcess] = []

    def fork(
        self,
        function: str,
        arguments: Sequence[Any],
        *,
        environment: Mapping[str, str],
        paths: Sequence[str],
        name: str = "",
        command: Sequence[str] = (),
        directory: str | Path = ".",
        stdin: int = subprocess.DEVNULL,
        output: int | None = None,
        outlives_server: bool = False,
        timeout_seconds: float | None = None,
    ) -> ForkedProcess:
        """Start a process that calls a function. Its exit status is the result of the function.

        The process inherits the working directory, standard streams, umask, resource limits, CPU affinity and niceness
        of this process.

        Args:
            function: ``module:function``.
            arguments: The arguments, of JSON types.
            environment: The environment variables.
            paths: ``sys.path``.
            name: The name of the process in tools such as ``top``.
            command: The command in tools such as ``ps``, as far as it fits into the memory of the server's command.
            directory: The working directory.
            stdin: ``subprocess.PIPE``, ``subprocess.DEVNULL``, or a file descriptor.
            output: The file descriptor for standard output and standard error; by default those of this process.
            outlives_server: Whether the process continues if the server is killed, because it watches the driver
                itself. Otherwise the kernel kills it.
            timeout_seconds: Time limit for the fork. The server may still be importing.

        Raises:
            TimeoutError: If the fork takes longer.
            OSError: If the server has ended.
        """
        with ExitStack() as open_here:
            writing = None
            if stdin == subprocess.PIPE:
                reading, writing = os.pipe()
            else:
                reading = os.open(os.devnull, os.O_RDONLY) if stdin == subprocess.DEVNULL else os.dup(stdin)
            folder = os.open(directory, os.O_PATH | os.O_DIRECTORY)
            for descriptor in (reading, folder):
                open_here.callback(os.close, descriptor)
            streams = [reading, *((1, 2) if output is None else (output, output)), folder]
            with ExitStack() as open_if_it_fails:
                pipe = open_if_it_fails.enter_context(os.fdopen(writing, "wb", 0)) if writing is not None else None
                connection = open_if_it_fails.enter_context(self._connect())
                connection.settimeout(timeout_seconds)
                _Request(
                    function=function,
                    arguments=list(arguments),
                    environment=dict(environment),
                    paths=list(paths),
                    name=name,
                    command=list(command),
                    streams=streams,
                    outlives_server=outlives_server,
                    state=_inherited(),
                ).send(connection)
                message, descriptors, _, _ = socket.recv_fds(connection, 64, 1)
                if not message:
                    raise ConnectionError("the fork server has ended or could not fork")
                if not descriptors:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                open_if_it_fails.pop_all()
        process = ForkedProcess(int(message), descriptors[0], connection, pipe)
        self._running = [*(other for other in self._running if other.poll() is None), process]
        return process

    def import_later(self) -> None:
        """Import in the background what later forks need, if this server has not imported it."""

    def _connect(self) -> socket.socket:
        raise NotImplementedError


class OwnForkServer(ForkServer):
    """A server that ends with this process.

    Args:
        modules: The modules that the server imports.
        modules_later: The modules that its successor imports; see :meth:`import_later`.
        environment: The environment variables of the server.
        paths: The ``sys.path`` of the server.
        directory: An empty directory that only this user can access, in which the server listens for other processes;
            ``None`` not to listen.
    """

    _of_this_process: ClassVar["OwnForkServer | None"] = None

    def __init__(
        self,
        modules: Sequence[str],
        *,
        modules_later: Sequence[str] = (),
        environment: Mapping[str, str],
        paths: Sequence[str],
        directory: Path | None = None,
    ) -> None:
        super().__init__(traits_of(environment))
        self._belongs = _belongings()
        self._modules, self._modules_later = ",".join(modules), ",".join(modules_later)
        self._environment, self._paths = dict(environment), list(paths)
        self._successor: _Successor | None = None
        self._control, theirs = socket.socketpair()
        listener = self._listen(directory) if directory is not None else None
        own = os.pidfd_open(os.getpid())
        passed = [theirs.fileno(), own, *([listener.fileno()] if listener is not None else [])]
        try:
            self._process = subprocess.Popen(
                [sys.executable, *_PROGRAM, "fork_server", self._modules, *map(str, passed)],
                env={**environment, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths))},
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
            )
        finally:
            os.close(own)
            theirs.close()
            if listener is not None:
                listener.close()
        self.pid = self._process.pid
        atexit.register(self.end)

    @classmethod
    def of_this_process(
        cls,
        modules: Sequence[str],
        modules_later: Sequence[str],
        environment: Mapping[str, str],
        paths: Sequence[str],
    ) -> ForkServer:
        """Return the server of this process, or its successor. Starts a server if there is none that fits."""
        server = cls._of_this_process
        if server is None or not server._fits(traits_of(environment)):
            if server is not None:
                server.end()
            server = cls(modules, modules_later=modules_later, environment=environment, paths=paths)
            cls._of_this_process = server
        successor = server._successor
        return successor if successor is not None and successor.is_ready() else server

    @classmethod
    def discard(cls) -> None:
        """Kill the server of this process, if any, with all its forks, because it does not answer."""
        if (server := cls._of_this_process) is not None:
            server._running.clear()
            if server._successor is not None:
                server._successor._running.clear()
            server.end()
            cls._of_this_process = None

    @classmethod
    def discard_if_ended(cls) -> None:
        """Forget the server of this process if it has ended. Its other forks keep running."""
        if (server := cls._of_this_process) is not None and server._process.poll() is not None:
            cls.discard()

    def end(self) -> None:
        """End the server now, or when its forks have ended. Can be called at any time, also in this process's forks."""
        if self._belongs["pid"] != os.getpid():
            return
        atexit.unregister(self.end)
        self._control.close()
        is_idle = all(process.poll() is not None for process in self._running)
        if self._successor is not None:
            is_idle = self._successor.end(is_idle)
        if is_idle:
            self._process.kill()
            self._process.wait()

    def import_later(self) -> None:
        """Make a fork of the server, its successor, import ``modules_later`` and then serve requests.

        No request waits for these imports: until then, and if the successor is lost, this server serves requests.
        """
        if not self._modules_later or (self._successor is not None and not self._successor.has_ended()):
            return
        self._successor = None
        control, theirs = socket.socketpair()
        try:
            with theirs:
                process = self.fork(
                    f"{__spec__.name}:serve_later",
                    [self._modules_later, os.getpid()],
                    environment=self._environment,
                    paths=self._paths,
                    command=[sys.executable, *_PROGRAM, "successor", self._modules],
                    stdin=theirs.fileno(),
                    outlives_server=True,
                    timeout_seconds=_END_SECONDS,
                )
        except OSError:  # the next session checks whether the server has ended
            control.close()
            return
        self._running.remove(process)  # the successor need not keep the server running
        self._successor = _Successor(self.traits, process, control)

    def _fits(self, traits: Mapping[str, Any]) -> bool:
        return self.traits == traits and self._belongs == _belongings() and self._process.poll() is None

    def _connect(self) -> socket.socket:
        return _connection_over(self._control)

    def _listen(self, directory: Path) -> socket.socket:
        (directory / "traits.json").write_text(json.dumps(self.traits))
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(directory / "socket"))
        listener.listen(64)
        return listener


class _Successor(ForkServer):
    """A fork of this process's server that imports more modules and then serves requests instead of the server.

    Args:
        traits: The traits of the server.
        process: The process.
        control: The socket that this process shares with the successor.
    """

    def __init__(self, traits: Mapping[str, Any], process: ForkedProcess, control: socket.socket) -> None:
        super().__init__(traits)
        self._process, self._control, self._has_imported = process, control, False

    def is_ready(self) -> bool:
        """Whether the successor has imported its modules and is running."""
        if not self._has_imported:
            with suppress(OSError):  # the successor has sent nothing, or has ended
                self._has_imported = self._control.recv(1, socket.MSG_DONTWAIT) == _READY
        return self._has_imported and not self.has_ended()

    def has_ended(self) -> bool:
        """Whether the successor has ended."""
        return self._process.poll() is not None

    def end(self, at_once: bool) -> bool:
        """End the successor now, or when its forks have ended. Returns whether it has ended."""
        self._control.close()
        if at_once := at_once and all(process.poll() is not None for process in self._running):
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # the server, which is its parent, is busy importing
                self._process.wait(_END_SECONDS)
        return at_once

    def _connect(self) -> socket.socket:
        return _connection_over(self._control)


class RunningForkServer(ForkServer):
    """A server of another process of this user.

    Args:
        directory: The directory in which the server listens.

    Raises:
        PermissionError: If another user could have created the server.
        OSError: If there is no server.
    """

    def __init__(self, directory: Path) -> None:
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{VARIABLE} names {directory}, which is not a private directory of this user")
        super().__init__(json.loads((directory / "traits.json").read_text()))
        self._directory = directory

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(self._directory / "socket"))
            if _user_of(connection) != os.geteuid():
                raise PermissionError(f"the fork server in {self._directory} belongs to another user")
        except OSError:
            connection.close()
            raise
        return connection


def _connection_over(control: socket.socket) -> socket.socket:
    """Return a new connection to the server at the other end of a socket."""
    connection, theirs = socket.socketpair()
    with theirs:
        try:
            socket.send_fds(control, [b"c"], [theirs.fileno()])
        except OSError:
            connection.close()
            raise
    return connection


def server_for(
    modules: Sequence[str], modules_later: Sequence[str], environment: Mapping[str, str], paths: Sequence[str]
) -> ForkServer | None:
    """Return a server whose forks behave like new processes with this environment; ``None`` if there is none.

    This is the server that ``RELAY_FORK_SERVER`` names, if it fits, or otherwise the server of this process.

    Args:
        modules: The modules that a new server imports; see :class:`OwnForkServer`.
        modules_later: The modules that its successor imports.
        environment: The environment variables of the forks.
        paths: The ``sys.path`` of the forks.
    """
    if sys.platform != "linux":
        return None
    if directory := os.environ.get(VARIABLE):
        with suppress(FileNotFoundError):  # the server has ended
            server = RunningForkServer(Path(directory))
            if server.traits == traits_of(environment):
                return server
    try:
        return OwnForkServer.of_this_process(modules, modules_later, environment, paths)
    except OSError:  # a kernel without pidfds, or a sandbox that refuses them
        return None


def traits_of(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what a fork of a process cannot change: the program, and the variables that are read at its start."""
    return {
        "executable": sys.executable,
        "file": __file__,
        "variables": {
            name: value
            for name, value in environment.items()
            if name.startswith(_READ_AT_IMPORT) and name not in _READ_LATER
        },
    }


def _belongings() -> dict[str, int]:
    """Return what a child inherits from its parent and a server of this process cannot adopt later."""
    return {"pid": os.getpid(), "session": os.getsid(0), "group": os.getpgid(0), "user": os.geteuid()}


def _inherited() -> dict[str, Any]:
    """Return what a child process inherits from its parent, besides its environment and its files."""
    status = Path("/proc/self/status").read_text()  # os.umask would change the umask of all threads temporarily
    return {
        "umask": next(int(line.split()[1], 8) for line in status.splitlines() if line.startswith("Umask:")),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in _LIMITS},
        "cores": sorted(os.sched_getaffinity(0)),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
    }


def _inherit(state: Mapping[str, Any]) -> None:
    """Apply the result of :func:`_inherited` in another process to this process."""
    os.umask(state["umask"])
    own = _inherited()
    for name, limit in state["limits"].items():
        if tuple(limit) != own["limits"][name]:
            with suppress(OSError, ValueError):  # only a privileged process may raise a hard limit
                resource.setrlimit(getattr(resource, name), tuple(limit))
    if state["cores"] != own["cores"]:
        os.sched_setaffinity(0, state["cores"])
    if state["niceness"] != own["niceness"]:
        with suppress(OSError):  # only a privileged process may lower its niceness
            os.setpriority(os.PRIO_PROCESS, 0, state["niceness"])


def _user_of(connection: socket.socket) -> int:
    """Return the user id of the process at the other end."""
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return user


@dataclass(frozen=True)
class _Request:
    """A request to start a process.

    Attributes:
        function: The function to call: ``module:function``.
        arguments: The arguments, of JSON types.
        environment: The environment variables of the process.
        paths: The ``sys.path`` of the process.
        name: The name of the process in tools such as ``top``.
        command: The command in tools such as ``ps``; the server's command if empty.
        streams: File descriptors of standard input, output and error, and of the working directory.
        outlives_server: Whether the process continues when the server ends.
        state: What the process inherits; see :func:`_inherited`.
    """

    function: str
    arguments: list[Any]
    environment: dict[str, str]
    paths: list[str]
    name: str
    command: list[str]
    streams: list[int]
    outlives_server: bool
    state: dict[str, Any]

    def send(self, connection: socket.socket) -> None:
        """Send the request over a connection."""
        fields = {name: value for name, value in vars(self).items() if name != "streams"}
        socket.send_fds(connection, [b"r"], self.streams)
        connection.sendall(json.dumps(fields).encode() + b"\n")

    @classmethod
    def received(cls, connection: socket.socket) -> "_Request":
        """Receive a request.

        Raises:
            ConnectionError: If the client ended before it sent the request.
        """
        _, streams, _, _ = socket.recv_fds(connection, 1, _NUM_STREAMS)
        with connection.makefile("rb") as file:
            line = file.readline()
        if not line.endswith(b"\n"):
            for descriptor in streams:
                os.close(descriptor)
            raise ConnectionError("the client has ended")
        if len(streams) != _NUM_STREAMS:
            for descriptor in streams:
                os.close(descriptor)
            raise OSError("not all file descriptors of the request arrived")
        return cls(streams=streams, **json.loads(line))

    def close(self) -> None:
        """Close the file descriptors, which only the fork uses."""
        for descriptor in self.streams:
            os.close(descriptor)

    def apply(self) -> None:
        """Apply the request to this process."""
        *streams, directory = self.streams
        os.fchdir(directory)
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        self.close()
        os.environ.clear()
        os.environ.update(self.environment)
        sys.path[:] = self.paths
        _inherit(self.state)
        if self.name:
            with suppress(OSError):  # a sandbox may refuse
                Path("/proc/self/comm").write_text(self.name)
        if self.command:
            _show_command(self.command)
        for stream in (sys.stdout, sys.stderr):
            cast(io.TextIOWrapper, stream).reconfigure(line_buffering=stream is sys.stderr or stream.isatty())
        importlib.invalidate_caches()
        tempfile.tempdir = None  # to be determined again from the new environment
        if (numpy_random := sys.modules.get("numpy.random")) is not None:
            numpy_random.seed()  # Python's generator reseeds itself in a fork, and torch's has a constant seed


def _show_command(command: Sequence[str]) -> None:
    """Write a command to the memory from which the kernel reads that of this process, as far as there is room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5), where the state is number 3
    if start:  # it is 0 where the kernel hides it
        text = os.fsencode(" ".join(command))[: end - start - 2]
        # The kernel shows what is there up to the first zero byte if the last byte is not zero.
        ctypes.memmove(start, text + bytes(end - start - 1 - len(text)) + b" ", end - start)


class _Server:
    """The server side.

    Args:
        control: The socket over which the driver passes connections.
        driver: The driver's pidfd.
        listener: The socket on which the server accepts other connections.
        end_seconds: How long forks may take to end after the driver has ended.
    """

    def __init__(self, control: socket.socket, driver: int, listener: socket.socket | None, end_seconds: float) -> None:
        self._control, self._driver, self._listener = control, driver, listener
        self._running: dict[int, tuple[int, socket.socket]] = {}  # pidfd: process id, connection
        self._ends_at: float | None = None
        self._end_seconds = end_seconds
        self._pid = os.getpid()
        self._handlers = {number: signal.getsignal(number) for number in _IGNORED}
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)

    def serve(self) -> "_Request | None":
        """Fork for each request. Returns the request in each fork, and ``None`` in the server at its end."""
        while self._ends_at is None or (self._running and time.monotonic() < self._ends_at):
            for file in self._ready():
                request = None
                if file == self._driver:
                    self._ends_at = time.monotonic() + self._end_seconds
                    # The driver may have sent requests just before its end. These processes remove its leftovers.
                    while request is None and (connection := self._passed()) is not None:
                        request = self._fork(connection)
                elif file is self._control:
                    if (connection := self._passed()) is not None:
                        request = self._fork(connection)
                elif file is self._listener:
                    if (connection := self._accepted()) is not None:
                        request = self._fork(connection)
                else:
                    self._report(cast(int, file))
                if request is not None:
                    return request
        for pid, _ in self._running.values():
            os.kill(pid, signal.SIGKILL)
        return None

    def become(self, request: "_Request") -> None:
        """Make this fork behave like a new process."""
        self._control.close()
        os.close(self._driver)
        if self._listener is not None:
            self._listener.close()
        for pidfd, (_, connection) in self._running.items():
            os.close(pidfd)
            connection.close()
        if not request.outlives_server:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._pid:  # the server has just ended
                os._exit(1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        request.apply()

    def _ready(self) -> list[Any]:
        """Return the readable sockets and pidfds. Waits for them, unless the server is ending."""
        selector = selectors.PollSelector()
        sources: list[Any] = [*self._running]
        if self._ends_at is None:
            sources += [self._control, *([self._listener] if self._listener is not None else [])]
        no_limit = self._ends_at in (None, math.inf)
        if no_limit:  # sockets of a killed driver close before its pidfd becomes readable
            sources.append(self._driver)
        for file in sources:
            selector.register(file, selectors.EVENT_READ)
        ready = [key.fileobj for key, _ in selector.select(None if no_limit else _WAIT_SLICE_SECONDS)]
        return sorted(ready, key=lambda file: file == self._driver)

    def _passed(self) -> socket.socket | None:
        """Return the connection that the driver passes; ``None`` if it passes none."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._control, 1, 1, socket.MSG_DONTWAIT)
        except OSError:  # there is none; a process that the driver has forked may hold the other end
            return None
        if not message:
            self._ends_at = self._ends_at or math.inf
            return None
        return socket.socket(fileno=descriptors[0]) if descriptors else None

    def _accepted(self) -> socket.socket | None:
        """Return the connection of a process of this user; ``None`` if it belongs to another user."""
        assert self._listener is not None
        connection, _ = self._listener.accept()
        if _user_of(connection) == os.geteuid():
            return connection
        connection.close()
        return None

    def _fork(self, connection: socket.socket) -> "_Request | None":
        """Fork for the request that arrives over a connection. Returns the request in the fork."""
        try:
            connection.settimeout(_END_SECONDS)
            request = _Request.received(connection)
            connection.settimeout(None)
        except OSError:  # the client has ended or does not answer, or there are no file descriptors left
            connection.close()
            return None
        try:
            pid = os.fork()
        except OSError:  # no more processes are available; running processes must continue
            request.close()
            connection.close()
            return None
        if pid == 0:
            connection.close()
            return request
        request.close()
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            connection.close()
            return None
        self._running[pidfd] = pid, connection
        with suppress(OSError):  # the client has ended, and so the requested process will end
            socket.send_fds(connection, [b"%d" % pid], [pidfd])
        return None

    def _report(self, pidfd: int) -> None:
        """Report to the client how a fork has ended."""
        pid, connection = self._running.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        with connection, suppress(OSError):  # the client has ended
            connection.sendall(b"%d" % os.waitstatus_to_exitcode(status))


class _EndsWithDriver:
    """A module finder that finds nothing, but ends this process if the driver has ended.

    Args:
        driver: The driver's pidfd.
    """

    def __init__(self, driver: int) -> None:
        self._poll = select.poll()
        self._poll.register(driver, select.POLLIN)

    def find_spec(self, *_: Any) -> None:
        """Called for each import of a module that has not been imported."""
        if self._poll.poll(0):
            os._exit(0)


def _import(modules: str, driver: int) -> None:
    """Import modules, whose memory pages the forks share.

    Their objects are frozen without a garbage collection. A collection takes 0.1 s, for which the first worker would
    wait, and in each fork it would copy the pages. The objects include 1 MiB of garbage.
    """
    finder: Any = _EndsWithDriver(driver)
    gc.disable()
    sys.meta_path.insert(0, finder)
    try:
        for module in modules.split(","):
            importlib.import_module(module)
    finally:
        sys.meta_path.remove(finder)
        gc.enable()
    gc.freeze()


def _serve(server: _Server) -> Any:
    """Serve requests; in a fork, call the requested function."""
    with open(os.devnull, "r+b", 0) as null:  # do not keep files of the driver open; each fork gets separate streams
        for number in range(3):
            os.dup2(null.fileno(), number)
    os.chdir("/")
    request = server.serve()
    if request is None:
        os._exit(0)
    server.become(request)
    module, _, name = request.function.partition(":")
    return getattr(importlib.import_module(module), name)(*request.arguments)


def main(modules: str, control: str, driver: str, listener: str = "") -> Any:
    """Run a fork server.

    Args:
        modules: What to import, separated by commas.
        control: File descriptor of the socket that is shared with the driver.
        driver: The driver's pidfd.
        listener: File descriptor of the listening socket, if there is one.
    """
    accepting = socket.socket(fileno=int(listener)) if listener else None
    server = _Server(socket.socket(fileno=int(control)), int(driver), accepting, _END_SECONDS_WITH_SUCCESSOR)
    _import(modules, int(driver))
    return _serve(server)


def serve_later(modules: str, driver: int) -> Any:
    """Run the successor of a fork server, in a fork of that server.

    Args:
        modules: What to import, separated by commas.
        driver: The driver's process id.
    """
    control = socket.socket(fileno=os.dup(0))
    try:
        pidfd = os.pidfd_open(driver)
    except ProcessLookupError:
        os._exit(0)
    server = _Server(control, pidfd, None, _END_SECONDS)
    with suppress(Exception):  # a fork that needs the module raises the error
        _import(modules, pidfd)
    with suppress(OSError):  # the driver has ended, which the server detects immediately
        control.send(_READY)
    return _serve(server)
