"""Simulated communicators with the rules of NCCL: run the code of the device plane on CPUs, where misuse is an error.

- A communicator does not buffer: a send ends when its receive runs (gloo sends a message when its receive has been
  posted).
- Transfers of a communicator run in the order of posting, in parallel with computation: each communicator has a thread
  in place of a stream.
- The tensors of a receive have no values until the process has waited for the transfer: they contain NaN, ``True``, or
  the largest integer, which is not an index. Changing them before that is an error, because the transfer overwrites
  the change.
- A tensor that is being sent must not change until the process has waited for the transfer, which checks this. No
  receive may be writing it.
- A tensor that is sent is contiguous and on the device.
- Dropping a transfer before the process has waited for it is an error: its memory could be reused.
- With ``one_at_a_time``, a process runs one transfer or action at a time, in the order of posting: a device whose
  streams do not progress independently.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from strategies.common.torch_compat import cpu_backend, storage_key, timeout_of
from strategies.common.trees import TensorLayout
from strategies.common.waiting import Wait
from strategies.pipeline.transport.device import Communicators, Route, bytes_of, given_up
from strategies.pipeline.transport.link import Transfer, unprofiled

_FIRST_TAG = 1000
"""Payloads of a channel have this tag plus its number."""

_LOOK_SECONDS = 0.05
"""How often a wait for a transfer checks whether another process has failed and so never posts its part."""

_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


class _Stream:
    """Runs functions one after another, on a thread that starts with the first function."""

    def __init__(self) -> None:
        self._functions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, function: Callable[[], None]) -> None:
        """Run a function after all previous functions."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="relay-simulated-stream", daemon=True)
            self._thread.start()
        self._functions.put(function)

    def end(self) -> None:
        """End the thread when its last function has returned or the connection has been closed."""
        self._functions.put(None)

    def _work(self) -> None:
        function: Callable[[], None] | None
        while (function := self._functions.get()) is not None:
            function()
            function = None  # it refers to the data plane


class SimulatedTransfer:
    """A transfer of tensors between two processes.

    Args:
        run: Moves the tensors. Called on the thread of a stream.
        end: Called by the thread that waits for the transfer, when the transfer has run.
        communicators: All communicators of this process.
        name: A description of the transfer for messages.
    """

    def __init__(
        self, run: Callable[[], None], end: Callable[[], None], communicators: "SimulatedCommunicators", name: str
    ) -> None:
        self._run, self._communicators, self._name = run, communicators, name
        self._end: Callable[[], None] | None = end
        self._has_run = threading.Event()
        self._error: BaseException | None = None

    def __del__(self) -> None:
        if self._end is not None and self._error is None:
            self._communicators.dropped.append(self._name)

    def run(self) -> None:
        """Run the transfer, on the thread of its communicator."""
        try:
            self._run()
        except BaseException as error:  # an error of the connection; the waiting thread raises it
            self._error = self._error or error
        self._has_run.set()

    def abort(self) -> None:
        """End waits for the transfer, unless it has run."""
        if not self._has_run.is_set():
            self._error = given_up()
            self._has_run.set()

    @property
    def is_over(self) -> bool:
        """Whether the transfer has run or has been abandoned."""
        return self._has_run.is_set()

    def let_run(self) -> None:
        """Wait until the transfer has run, without using its results."""
        if not self._has_run.is_set():
            self._communicators.wait(self._block)

    def _block(self) -> None:
        while not self._has_run.wait(_LOOK_SECONDS):
            if self._communicators.is_given_up():
                self.abort()

    def wait(self) -> None:
        self.let_run()
        self._finish()

    def synchronize(self) -> None:
        self._block()
        self._finish()

    def _finish(self) -> None:
        if self._error is not None:
            raise self._error
        end, self._end = self._end, None
        if end is not None:  # it refers to the tensors, and communicators keep a transfer longer than its receiver does
            end()


class SimulatedCommunicator:
    """One direction between two processes.

    Args:
        group: The data plane.
        route: From one process to the other.
        rank: This process.
        communicators: All communicators of this process.
    """

    def __init__(self, group: ProcessGroup, route: Route, rank: int, communicators: "SimulatedCommunicators") -> None:
        self._backend, self._timeout, self._route = cpu_backend(group), timeout_of(group), route
        self._peer = route.target if rank == route.source else route.source
        self._tag, self._communicators, self._stream = _FIRST_TAG + route.channel, communicators, communicators.stream()
        self._lock = threading.Lock()
        self._under_way = WeakSet[SimulatedTransfer]()  # a stream refers to a transfer until it has run

    def send(self, tensors: Sequence[Tensor]) -> Transfer:
        for tensor in tensors:
            self._check_payload(tensor)
        sent = [bytes_of(tensor).clone() for tensor in tensors]
        run = partial(self._move, self._backend.send, sent)
        return self._posted(run, partial(self._check_unchanged, list(tensors), sent), "send")

    def receive(self, layouts: Sequence[TensorLayout]) -> tuple[list[Tensor], Transfer]:
        tensors = [torch.empty(each.shape, dtype=each.dtype, device="cpu") for each in layouts]
        for tensor in tensors:
            _fill_without_values(tensor)
        arrived = [torch.empty_like(bytes_of(tensor)) for tensor in tensors]
        run = partial(self._move, self._backend.recv, arrived)
        places = [storage_key(tensor) for tensor in tensors]
        self._communicators.arriving.update(places)
        return tensors, self._posted(run, partial(self._arrive, tensors, arrived, places), "receive")

    def _posted(self, run: Callable[[], None], end: Callable[[], None], way: str) -> Transfer:
        if self._communicators.dropped and not self._communicators.is_given_up():
            raise RuntimeError(
                f"{', '.join(self._communicators.dropped)}: dropped without a wait, so the memory of its tensors could "
                "be reused while the transfer runs. Call wait() or synchronize() of each transfer."
            )
        name = f"{way} of stage {self._route.source} to stage {self._route.target}"
        transfer = SimulatedTransfer(run, end, self._communicators, name)
        with self._lock:
            self._under_way.add(transfer)
        self._stream.run(transfer.run)
        if self._communicators.one_at_a_time:
            transfer.let_run()
        return transfer

    def abort(self) -> None:
        with self._lock:
            for transfer in list(self._under_way):
                transfer.abort()

    def _move(self, post: Callable[[list[Tensor], int, int], Any], messages: Sequence[Tensor]) -> None:
        for message in messages:
            unprofiled(post, [message], self._peer, self._tag).wait(self._timeout)

    def _check_payload(self, tensor: Tensor) -> None:
        """Check that a tensor can be sent."""
        what = f"stage {self._route.source} sends stage {self._route.target} a tensor of shape {list(tensor.shape)}"
        if tensor.device.type != "cpu":
            raise ValueError(f"{what} that is on {tensor.device}, but the stage computes on cpu.")
        if tensor.layout != torch.strided or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise ValueError(f"{what} whose values are not contiguous in memory. Send tensor.contiguous().")
        if not tensor.numel():
            raise ValueError(f"{what} that has no elements: both ends must leave such a transfer out.")
        if storage_key(tensor) in self._communicators.arriving:
            raise RuntimeError(
                f"{what} that a receive still writes: wait for the receive first, or stage {self._route.target} gets "
                "wrong values."
            )

    def _arrive(self, tensors: Sequence[Tensor], arrived: Sequence[Tensor], places: Sequence[int]) -> None:
        """Set the values of received tensors."""
        for tensor in tensors:
            if not torch.equal(bytes_of(tensor), bytes_of(_fill_without_values(torch.empty_like(tensor)))):
                raise RuntimeError(
                    f"a tensor of shape {list(tensor.shape)} that stage {self._route.target} receives from stage "
                    f"{self._route.source} was changed before the wait for it; the transfer overwrites the change."
                )
        _fill(tensors, arrived)
        self._communicators.arriving.difference_update(places)

    def _check_unchanged(self, tensors: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        for tensor, bytes_sent in zip(tensors, sent, strict=True):
            if not torch.equal(bytes_of(tensor), bytes_sent):
                raise RuntimeError(
                    f"stage {self._route.source} changed a tensor of shape {list(tensor.shape)} that it was sending to "
                    f"stage {self._route.target}, which on a GPU would get some of the new values. A layer must not "
                    "change a tensor that it has returned: let it return a copy."
                )


class SimulatedCommunicators(Communicators):
    """The communicators of a process without a GPU.

    Args:
        group: The data plane.
        rank: This process.
        routes: The routes of the pipeline.
        wait: Runs a function that blocks until a transfer has run.
        one_at_a_time: Whether the process runs one transfer or action at a time.
    """

    def __init__(
        self, group: ProcessGroup, rank: int, routes: Iterable[Route], wait: Wait, *, one_at_a_time: bool
    ) -> None:
        super().__init__()
        self.wait, self.one_at_a_time = wait, one_at_a_time
        self.dropped: list[str] = []
        """Transfers that were dropped without a wait."""
        self.arriving: set[int] = set()
        """The storages of tensors that are being received, until the process has waited for their transfer."""
        self._streams: list[_Stream] = []
        for route in routes:
            if rank in (route.source, route.target):
                self.add(route, SimulatedCommunicator(group, route, rank, self))

    def stream(self) -> _Stream:
        """Return the stream of a new communicator."""
        if not (self._streams and self.one_at_a_time):
            self._streams.append(_Stream())
        return self._streams[-1]

    def close(self) -> None:
        super().close()
        for stream in self._streams:
            stream.end()


@torch.no_grad()
def _fill_without_values(tensor: Tensor) -> Tensor:
    """Fill a tensor with a marker for missing values: NaN, ``True``, or the largest integer."""
    if tensor.dtype is torch.bool:
        return tensor.fill_(True)
    if tensor.dtype in _SIGNED:
        return tensor.fill_(torch.iinfo(tensor.dtype).max)
    bytes_of(tensor).fill_(0xFF)
    return tensor


@torch.no_grad()
def _fill(tensors: Sequence[Tensor], arrived: Sequence[Tensor]) -> None:
    for tensor, message in zip(tensors, arrived, strict=True):
        bytes_of(tensor).copy_(message)
