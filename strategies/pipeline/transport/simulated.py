"""Links by the rules of NCCL without a GPU: the code of the device plane runs on CPUs, and misuse is an error.

- A link buffers nothing: a send ends when its receive runs (gloo sends a message when its receive has been posted).
- Transfers of a link run in the order of posting, beside the computation: each link has a thread, in place of a stream.
- The tensors of a receive hold no values (NaN) until something has waited for the transfer.
- A tensor that is being sent must not change until something has waited for the transfer; this is checked then.
- With ``one_at_a_time``, a process runs one transfer or action at a time, in the order of posting: a device whose
  streams do not progress independently.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from strategies.common.torch_compat import cpu_backend, timeout_of
from strategies.common.trees import TensorLayout
from strategies.common.waiting import Wait
from strategies.pipeline.transport.channel import unrecorded
from strategies.pipeline.transport.device import Links, Route, Transfer, bytes_of, given_up

_FIRST_TAG = 1000
"""Payloads of a channel have its tag plus this number."""

_LOOK_SECONDS = 0.05
"""How often a wait for a transfer looks whether another process has failed, which then never posts its part."""


class _Stream:
    """Runs functions one after another, on a thread that starts with the first one."""

    def __init__(self) -> None:
        self._functions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, function: Callable[[], None]) -> None:
        """Run a function after those before it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="relay-simulated-stream", daemon=True)
            self._thread.start()
        self._functions.put(function)

    def end(self) -> None:
        """Let the thread end once its last function has returned, or the connection has been closed."""
        self._functions.put(None)

    def _work(self) -> None:
        function: Callable[[], None] | None
        while (function := self._functions.get()) is not None:
            function()
            function = None  # it refers to the data plane


class SimulatedTransfer:
    """Tensors on their way between two processes.

    Args:
        run: Moves the tensors; called on the thread of a stream.
        end: Called by the thread that waits for the transfer, when it has run.
        links: All links of this process.
    """

    def __init__(self, run: Callable[[], None], end: Callable[[], None], links: "SimulatedLinks") -> None:
        self._run, self._links = run, links
        self._end: Callable[[], None] | None = end
        self._has_run = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the transfer, on the thread of its link."""
        try:
            self._run()
        except BaseException as error:  # of the connection; whoever waits raises it
            self._error = self._error or error
        self._has_run.set()

    def abort(self) -> None:
        """End waits for the transfer, unless it has run."""
        if not self._has_run.is_set():
            self._error = given_up()
            self._has_run.set()

    @property
    def is_over(self) -> bool:
        """Whether the transfer has run, or has been given up."""
        return self._has_run.is_set()

    def let_run(self) -> None:
        """Wait until the transfer has run, but use none of its results."""
        if not self._has_run.is_set():
            self._links.wait(self._block)

    def _block(self) -> None:
        while not self._has_run.wait(_LOOK_SECONDS):
            if self._links.is_given_up():
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
        if end is not None:  # which refers to the tensors: links know a transfer for longer than its receiver does
            end()


class SimulatedLink:
    """One direction between two processes.

    Args:
        group: The data plane.
        route: From one process to the other.
        rank: This process.
        links: All links of this process.
    """

    def __init__(self, group: ProcessGroup, route: Route, rank: int, links: "SimulatedLinks") -> None:
        self._backend, self._timeout, self._route = cpu_backend(group), timeout_of(group), route
        self._peer = route.target if rank == route.source else route.source
        self._tag, self._links, self._stream = _FIRST_TAG + route.tag, links, links.stream()
        self._lock = threading.Lock()
        self._under_way: list[SimulatedTransfer] = []

    def send(self, tensors: Sequence[Tensor]) -> Transfer:
        sent = [bytes_of(tensor).clone() for tensor in tensors]
        run = partial(self._move, self._backend.send, sent)
        return self._posted(run, partial(self._check_unchanged, list(tensors), sent))

    def receive(self, layouts: Sequence[TensorLayout]) -> tuple[list[Tensor], Transfer]:
        tensors = [torch.empty(each.shape, dtype=each.dtype, device="cpu") for each in layouts]
        for tensor in tensors:
            bytes_of(tensor).fill_(0xFF)
        arrived = [torch.empty_like(bytes_of(tensor)) for tensor in tensors]
        run = partial(self._move, self._backend.recv, arrived)
        return tensors, self._posted(run, partial(_fill, tensors, arrived))

    def _posted(self, run: Callable[[], None], end: Callable[[], None]) -> Transfer:
        transfer = SimulatedTransfer(run, end, self._links)
        with self._lock:
            self._under_way = [*(each for each in self._under_way if not each.is_over), transfer]
        self._stream.run(transfer.run)
        if self._links.one_at_a_time:
            transfer.let_run()
        return transfer

    def abort(self) -> None:
        with self._lock:
            for transfer in self._under_way:
                transfer.abort()

    def _move(self, post: Callable[[list[Tensor], int, int], Any], messages: Sequence[Tensor]) -> None:
        for message in messages:
            unrecorded(post, [message], self._peer, self._tag).wait(self._timeout)

    def _check_unchanged(self, tensors: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        for tensor, bytes_sent in zip(tensors, sent, strict=True):
            if not torch.equal(bytes_of(tensor), bytes_sent):
                raise RuntimeError(
                    f"stage {self._route.source} changed a tensor of shape {list(tensor.shape)} that it was sending to "
                    f"stage {self._route.target}, which on a GPU would get some of the new values. A layer must not "
                    "change a tensor that it has returned: let it return a copy."
                )


class SimulatedLinks(Links):
    """The links of a process without a device of its own.

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
        self._streams: list[_Stream] = []
        for route in routes:
            if rank in (route.source, route.target):
                self.add(route, SimulatedLink(group, route, rank, self))

    def stream(self) -> _Stream:
        """Return the stream of a new link."""
        if not (self._streams and self.one_at_a_time):
            self._streams.append(_Stream())
        return self._streams[-1]

    def close(self) -> None:
        super().close()
        for stream in self._streams:
            stream.end()


@torch.no_grad()
def _fill(tensors: Sequence[Tensor], arrived: Sequence[Tensor]) -> None:
    for tensor, message in zip(tensors, arrived, strict=True):
        bytes_of(tensor).copy_(message)
