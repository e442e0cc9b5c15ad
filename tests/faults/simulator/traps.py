"""Traps: places of a model, in every process of a run, where a fault strikes.

The driver of each replica writes to a file which batch and phase it is in; every process reads it. A trap springs once:
the process that finds no file ``struck-<number of the fault>`` creates it, and does to itself (or to the fork server)
what the fault says. This module imports no Lightning, because workers import it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from tests.faults.simulator.cases import DRIVER, LINK_DOWN, LINK_SLOW, RECOVERY, SANITY, SERVER, WORKER, Fault

WIDTH = 6
PAUSE_SECONDS = 0.7
LINK_SECONDS = 1.5
"""How long a slow link drops packets. They are sent again, later and later."""
STAGE_OF_RANK = "RELAY_STAGE_OF_RANK"
"""The variable with the stage of a rank that a launcher has started, which may become a worker itself."""
CUTS_LINK = "RELAY_CUTS_LINK"
"""The variable with the command that drops the packets between two hosts; ``del`` in place of ``add`` undoes it."""
FAULT = "a fault of the simulator"
"""What every exception of a fault says."""

_passed: Counter[tuple[int, str]] = Counter()
"""How often a fault has been skipped in this process."""


@dataclass(frozen=True)
class Position:
    """Where the driver of a replica is, for all processes of the replica: a file of fixed size.

    Attributes:
        folder: The folder of the run.
        replica: The replica.
    """

    folder: str
    replica: int

    def set(self, batch: int, phase: str) -> None:
        """Note a batch, or -1 before the first one, and a phase."""
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT)
        try:
            os.pwrite(descriptor, f"{batch:4d} {phase:<12}".encode(), 0)
        finally:
            os.close(descriptor)

    def get(self) -> tuple[int, str]:
        """The batch and the phase."""
        batch, phase = self._file.read_text().split()
        return int(batch), phase

    @property
    def _file(self) -> Path:
        return Path(self.folder) / f"position-{self.replica}"


@dataclass(frozen=True)
class Traps:
    """The faults of a run, as every process of a replica knows them.

    Attributes:
        faults: The faults.
        position: Where the driver is.
        driver: Process id of the driver.
        timeout_seconds: The strategy's ``rpc_timeout_sec``.
    """

    faults: tuple[Fault, ...]
    position: Position
    driver: int
    timeout_seconds: float

    def spring(self, phase: str) -> bool:
        """Let the faults of this phase and process strike; returns whether one makes a value NaN."""
        makes_nan = False
        for number, fault in enumerate(self.faults):
            if fault.phase != phase or not self._is_here(fault):
                continue
            if phase not in ("start", SANITY, RECOVERY) and self.position.get()[0] < fault.batch:
                continue
            _passed[number, phase] += 1
            if _passed[number, phase] > fault.skip and self._strikes_first(number):
                makes_nan = makes_nan or fault.kind == "nan"
                self._strike(fault)
        return makes_nan

    def strike_later(self, seconds: float) -> threading.Thread:
        """A thread of the driver in which the first fault strikes after a time."""

        def work() -> None:
            time.sleep(seconds)
            (fault,) = self.faults
            if (pid := self._pid_of(fault)) is not None and self._strikes_first(0):
                os.kill(pid, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}[fault.kind])

        thread = threading.Thread(target=work, name="simulator-of-faults", daemon=True)
        thread.start()
        return thread

    def _is_here(self, fault: Fault) -> bool:
        if fault.replica != self.position.replica:
            return False
        if fault.role == WORKER:
            return _own_stage() == str(fault.stage)
        return os.getpid() == self.driver

    def _strikes_first(self, number: int) -> bool:
        try:
            file = os.open(Path(self.position.folder) / f"struck-{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        os.write(file, str(time.time()).encode())
        os.close(file)
        return True

    def _pid_of(self, fault: Fault) -> int | None:
        if fault.role == DRIVER:
            return self.driver
        file = self._file_of_worker(str(fault.stage))
        return int(file.read_text()) if file.exists() else None

    def _file_of_worker(self, stage: str) -> Path:
        return Path(self.position.folder) / f"worker-{self.position.replica}-{stage}"

    def note_worker(self) -> None:
        """Note this process as the worker of its stage."""
        stage = _own_stage()
        if stage is not None and os.getpid() != self.driver:
            file = self._file_of_worker(stage)
            file.with_suffix(".part").write_text(str(os.getpid()))
            file.with_suffix(".part").replace(file)

    def _strike(self, fault: Fault) -> None:
        pid = _fork_server_of(self.driver) if fault.role == SERVER else os.getpid()
        if fault.kind == "kill":
            os.kill(pid, signal.SIGKILL)
        elif fault.kind == "terminate":
            os.kill(pid, signal.SIGTERM)
        elif fault.kind == "stop":
            os.kill(pid, signal.SIGSTOP)
            time.sleep(2)  # another thread may be the one that gets the signal
        elif fault.kind == "pause":
            subprocess.Popen(["sh", "-c", f"sleep {PAUSE_SECONDS}; kill -CONT {pid}"])
            os.kill(pid, signal.SIGSTOP)
        elif fault.kind == "hang":
            time.sleep(1000)
        elif fault.kind == "slow":
            time.sleep(0.6 * self.timeout_seconds)
        elif fault.kind == "busy":
            end = time.monotonic() + 1.5 * self.timeout_seconds
            while time.monotonic() < end:
                pass
        elif fault.kind == "exception":
            raise exception(fault.detail)
        elif fault.kind in ("disk full", "cut off"):
            if fault.kind == "cut off":  # Python ignores the signal; its default kills the process
                ctypes.CDLL(None).signal(signal.SIGXFSZ, 0)
            resource.setrlimit(resource.RLIMIT_FSIZE, (fault.detail, resource.RLIM_INFINITY))
        elif fault.kind in (LINK_DOWN, LINK_SLOW):
            cut = os.environ[CUTS_LINK]
            subprocess.run(cut, shell=True, check=True)
            if fault.kind == LINK_SLOW:
                subprocess.Popen(f"sleep {LINK_SECONDS}; {cut.replace(' add ', ' del ')}", shell=True)
        elif fault.kind == "connection lost":
            found = connections()
            found[int(fault.detail * len(found))].shutdown(socket.SHUT_RDWR)


def _own_stage() -> str | None:
    """The stage of the worker that this process is; ``None`` if it is none."""
    name = Path("/proc/self/comm").read_text().strip()
    return name.rpartition("-")[2] if name.startswith("relay-worker-") else os.environ.get(STAGE_OF_RANK)


def disk_is_free_again() -> None:
    """Undo "disk full" in this process."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _fork_server_of(driver: int) -> int:
    command = ["-m", "strategies.launch", "fork_server"]
    return next(child.pid for child in psutil.Process(driver).children() if child.cmdline()[1:4] == command)


def connections() -> list[socket.socket]:
    """The TCP connections of this process, as other sockets that share them."""
    found = []
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            shared = socket.socket(fileno=os.dup(number))
        except OSError:  # closed meanwhile
            continue
        try:
            if shared.family in (socket.AF_INET, socket.AF_INET6) and shared.getpeername():
                found.append(shared)
        except OSError:  # it is not connected
            shared.close()
    return found


class TwoArguments(Exception):
    """An exception that pickle cannot create anew."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


class Unpicklable(Exception):
    """An exception with an attribute that pickle refuses."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.lock = threading.Lock()


def exception(name: str) -> BaseException:
    """The exception of a name from ``cases.EXCEPTIONS``."""
    if name == "OSError":
        return OSError(28, FAULT)
    if name == "ConnectionResetError":
        return ConnectionResetError(104, f"{FAULT}: Connection reset by peer")
    if name == "OutOfMemoryError":
        return torch.OutOfMemoryError(FAULT)
    if name == "TwoArguments":
        return TwoArguments(FAULT, "a layer")
    if name == "Unpicklable":
        return Unpicklable(FAULT)
    kinds = (ValueError, KeyError, ZeroDivisionError, StopIteration, AssertionError, MemoryError, RuntimeError)
    return {kind.__name__: kind for kind in kinds}[name](FAULT)


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, traps: Traps) -> Tensor:
        ctx.traps = traps
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.traps.spring("backward")
        return grad, None


class Trapped(nn.Module):
    """A layer with parameters, a buffer and dropout, in which faults of its process strike."""

    def __init__(self, traps: Traps) -> None:
        super().__init__()
        self.linear, self.dropout, self.traps = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), traps
        self.register_buffer("num_passes", torch.zeros((), dtype=torch.int64))

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.traps.note_worker()
        self.traps.spring("start" if self.traps.position.get()[0] < 0 else RECOVERY)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input, changed a little: ``[batch, WIDTH]``."""
        makes_nan = self.traps.spring("forward" if self.training else self._validation())
        if self.training and not torch.is_inference_mode_enabled():
            x = _InBackward.apply(x, self.traps)
        y = x + self.dropout(self.linear(x)).tanh()
        return y * torch.nan if makes_nan else y

    def _validation(self) -> str:
        return SANITY if self.traps.position.get()[1] == "sanity" else "validation"

    def get_extra_state(self) -> Tensor:
        """Asked of every stage for a checkpoint, and at the end of a run."""
        self.traps.spring(self.traps.position.get()[1])
        return torch.zeros(1)

    def set_extra_state(self, state: Any) -> None:
        """Nothing is kept."""


class TrappedAdam(torch.optim.AdamW):
    """AdamW whose step is a trap."""

    def __init__(self, parameters: Any, traps: Traps) -> None:
        super().__init__(parameters, lr=0.05)
        self.traps = traps

    def step(self, closure: Any = None) -> Any:
        """As AdamW's."""
        loss = super().step(closure)
        self.traps.spring("step")
        return loss
