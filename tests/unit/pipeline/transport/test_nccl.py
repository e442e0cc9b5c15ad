"""``nccl.py`` on CPUs: of NCCL, only torch's ``ProcessGroupNCCL`` is replaced; of CUDA, streams and the current device.

What the library itself does, such as its kernels, its progress on streams and its aborts, is not tested here;
``docs/gpu.md`` says how to run that.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, ProcessGroup

from strategies.common.errors import PeerFailed
from strategies.common.trees import TensorLayout
from strategies.common.waiting import wait_here
from strategies.pipeline.transport import device as device_module
from strategies.pipeline.transport.device import DeviceReceiver, DeviceSender, DeviceTransport, Route
from strategies.pipeline.transport.link import FIRST_EDGE, Links
from strategies.pipeline.transport.nccl import NcclCommunicators
from strategies.pipeline.transport.planes import NCCL, open_transport

CPU = torch.device("cpu")
ROUTES = [Route(0, 1, FIRST_EDGE), Route(1, 0, FIRST_EDGE), Route(2, 3, 4), Route(0, 1, 4)]
OF_TWO = [ROUTES[0], ROUTES[1], ROUTES[3]]
"""Those between ranks 0 and 1."""


class Work:
    """A send or receive; it has run once its counterpart has been posted, after those before it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.done, self.num_waits = tensor, threading.Event(), 0

    def wait(self) -> None:
        assert self.done.wait(10)
        self.num_waits += 1

    def is_completed(self) -> bool:
        return self.done.is_set()


@dataclass
class Communicator:
    """What two ranks share: their sends and receives that have not run, and how many ranks have connected."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    posted: dict[tuple[str, int], list[Work]] = field(default_factory=dict)
    both: threading.Barrier = field(default_factory=lambda: threading.Barrier(2))

    def post(self, way: str, source: int, work: Work) -> Work:
        with self.lock:
            self.posted.setdefault((way, source), []).append(work)
            sends, receives = (self.posted.setdefault((each, source), []) for each in ("send", "receive"))
            while sends and receives:
                send, receive = sends.pop(0), receives.pop(0)
                assert send.tensor.shape == receive.tensor.shape and send.tensor.dtype == torch.uint8
                receive.tensor.copy_(send.tensor)
                send.done.set()
                receive.done.set()
        return work


class Library:
    """A double of ``ProcessGroupNCCL``, by what torch documents of it: it creates, sends, receives and aborts."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        """What was called, with the rank within the communicator."""
        self.communicators: dict[bytes, Communicator] = {}
        self.aborts: Callable[[int], None] = lambda own: None
        """What an abort does besides, given how many there were before."""
        self.connects: Callable[[], None] = lambda: None
        self.timeouts: set[timedelta] = set()
        self.streams_of: list[tuple[Tensor, Any]] = []
        """The tensors and streams of ``record_stream``."""
        self._lock, self._current, self._num_aborts = threading.Lock(), threading.local(), 0
        self._ids = itertools.count()

    def stream(self) -> Any:
        """The current stream of this thread."""
        return getattr(self._current, "stream", f"compute stream of {threading.current_thread().name}")

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        before, self._current.stream = self.stream(), stream
        yield
        self._current.stream = before

    Options = SimpleNamespace

    def __call__(self, store: Any, rank: int, size: int, options: Any) -> "Backend":
        assert size == 2
        self.timeouts.add(options._timeout)
        if rank == 0:
            store.set("id", str(next(self._ids)))
        return Backend(self, store, rank)

    def communicator(self, unique_id: bytes) -> Communicator:
        with self._lock:
            return self.communicators.setdefault(unique_id, Communicator())

    def abort(self) -> None:
        with self._lock:
            before, self._num_aborts = self._num_aborts, self._num_aborts + 1
        self.aborts(before)


class Backend:
    def __init__(self, library: Library, store: Any, rank: int) -> None:
        self._library, self._store, self._rank = library, store, rank

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._library.connects()
        self._communicator = self._library.communicator(self._store.get("id"))
        self._communicator.both.wait(10)
        self._library.calls.append(("connect", self._rank))

    def _post(self, way: str, tensors: list[Tensor], source: int) -> Work:
        (tensor,) = tensors
        self._library.calls.append((way, self._rank, tensor.numel(), self._library.stream()))
        return self._communicator.post(way, source, Work(tensor))

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        assert peer == 1 - self._rank
        return self._post("send", tensors, self._rank)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        assert peer == 1 - self._rank
        return self._post("receive", tensors, peer)

    def abort(self) -> None:
        self._library.calls.append(("abort", self._rank))
        self._library.abort()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", made, raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream of a communicator, {time.monotonic_ns()}")
    monkeypatch.setattr(torch.cuda, "stream", made.on_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.stream())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: made.streams_of.append((tensor, stream)))
    return made


def connected(ranks: tuple[int, ...] = (0, 1)) -> list[NcclCommunicators]:
    store, both = HashStore(), [NcclCommunicators(rank, CPU) for rank in ranks]
    with ThreadPoolExecutor(len(both)) as pool:
        list(pool.map(lambda communicators: communicators.connect(OF_TWO, store), both))
    return both


def layouts(*tensors: Tensor) -> list[TensorLayout]:
    return [TensorLayout(tuple(tensor.shape), tensor.dtype, False) for tensor in tensors]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_communicators_are_created_and_used_in_the_order_of_routes(library: Library) -> None:
    store = HashStore()
    both = [NcclCommunicators(rank, CPU) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda communicators: communicators.connect(ROUTES, store), both))
    for communicators in both:
        assert list(communicators.by_route) == OF_TWO  # not those of other ranks
    sources = [call[:3] for call in library.calls if call[0] == "send"]
    assert sources == [("send", 0, 1)] * 3  # a communicator's rank 0 is the source, which sends one byte
    kinds = [call[0] for call in library.calls]
    for k in range(3):  # both ends of one are connected and used before the next one is
        assert sorted(kinds[4 * k : 4 * k + 4]) == ["connect", "connect", "receive", "send"]
    assert library.timeouts == {timedelta(days=20)}


def test_tensors_arrive_and_are_recorded_on_the_stream_that_uses_them(library: Library) -> None:
    first, second = connected()
    library.streams_of.clear()
    sent = [torch.randn(2, 3), torch.tensor(True), torch.randn(2).bfloat16(), torch.randn(2) * 1j]
    sending = first.by_route[ROUTES[0]].send(sent)
    assert not sending.is_over
    received, transfer = second.by_route[ROUTES[0]].receive(layouts(*sent))
    assert sending.is_over and not library.streams_of
    transfer.wait()
    sending.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(received, sent, strict=True))
    assert [id(tensor) for tensor, _ in library.streams_of] == [id(tensor) for tensor in received]  # none that was sent
    assert {stream for _, stream in library.streams_of} == {library.stream()}
    ways = {call[0]: call[3] for call in library.calls[-2 * len(sent) :]}
    assert ways["send"] == library.stream() and ways["receive"].startswith("stream of a communicator")


def test_values_of_a_pass_go_over_the_communicators(
    library: Library, groups: tuple[ProcessGroup, ProcessGroup]
) -> None:
    """Through :func:`open_transport`, and the channels that the simulated plane uses as well."""
    store, routes = HashStore(), OF_TWO
    open_ = partial(open_transport, NCCL, device=CPU, routes=routes, wait=wait_here, store=lambda: store)
    with ThreadPoolExecutor(2) as pool:
        transports = list(pool.map(lambda rank: open_(links=Links(groups[rank]), rank=rank), range(2)))
    assert all(isinstance(transport, DeviceTransport) for transport in transports)
    sender, receiver = transports[0].sender(1, FIRST_EDGE), transports[1].receiver(0, FIRST_EDGE)
    assert isinstance(sender, DeviceSender) and isinstance(receiver, DeviceReceiver)
    values = [(torch.randn(3, 2, requires_grad=True), {}), ("word", torch.arange(4), torch.empty(0, 2))]
    arriving = []
    for m, value in enumerate(values):
        sender.send(value, 0, m)
        arriving.append(receiver.begin(0, m))
    for m, value in enumerate(values):
        arrived = arriving[m].value()
        assert torch.equal(arrived[m], value[m]) and arrived[m].requires_grad == value[m].requires_grad
    transports[0].release_sent()
    assert [getattr(sent, "transfer", None) for sent in sender._under_way] == [None, None]
    for transport in transports:
        transport.close()
    assert [call[0] for call in library.calls[-6:]] == ["abort"] * 6


def test_tensors_that_have_arrived_are_let_go_without_a_wait(
    library: Library, groups: tuple[ProcessGroup, ProcessGroup]
) -> None:
    communicators = connected()
    sender = DeviceTransport(Links(groups[0]), 0, CPU, communicators[0], wait_here).sender(1, FIRST_EDGE)
    receiver = DeviceTransport(Links(groups[1]), 1, CPU, communicators[1], wait_here).receiver(0, FIRST_EDGE)
    assert isinstance(sender, DeviceSender) and isinstance(receiver, DeviceReceiver)
    for m in range(3):
        sender.send(torch.ones(2), 0, m)
    for m in range(2):
        receiver.begin(0, m)
    sender.release_sent()
    assert [getattr(sent, "transfer", None) is None for sent in sender._under_way] == [True, True, False]


@pytest.mark.parametrize("fails", ["peer", "abort"])
def test_a_blocked_process_gives_up_when_another_one_has_failed(library: Library, fails: str) -> None:
    first, _ = connected()
    waiting = first.by_route[ROUTES[0]].send([torch.ones(1)])
    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(waiting.synchronize)
        time.sleep(0.05)
        assert not blocked.done()
        if fails == "peer":
            first.has_failed_peer = lambda: True
        else:
            first.abort()
        with pytest.raises(PeerFailed, match="abandoned"):
            blocked.result(10)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_an_aborted_transfer_is_given_up_although_torch_calls_it_completed(
    library: Library, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """It is not asked after the abort: torch would wait for the abort with the interpreter locked."""
    first, _ = connected()
    sending = first.by_route[ROUTES[0]].send([torch.ones(1)])
    num_asked = [0]

    def is_completed(_: Work) -> bool:
        num_asked[0] += 1
        first.abort()
        return True

    monkeypatch.setattr(Work, "is_completed", is_completed)
    if when == "before":
        first.abort()
    with pytest.raises(PeerFailed, match="abandoned"):
        sending.synchronize()
    assert sending.is_over and num_asked == [int(when == "meanwhile")]


def test_aborts_wait_for_nobody_and_each_is_made(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first abort blocks, as long as another communicator's kernel spins; the second one throws."""
    monkeypatch.setattr(device_module, "_ABORT_SECONDS_AFTER_FAILURE", 0.2)
    may_go_on, has_gone_on = threading.Event(), []

    def aborts(number: int) -> None:
        if number == 0:
            has_gone_on.append(may_go_on.wait(60))
        if number == 1:
            raise RuntimeError("NCCL error")

    first, _ = connected()
    library.aborts = aborts
    first.abort()
    first.abort()
    until(lambda: sorted(library.calls[-3:]) == [("abort", 0), ("abort", 0), ("abort", 1)])
    with pytest.raises(PeerFailed):
        first.by_route[ROUTES[0]].send([torch.ones(1)]).synchronize()
    first.close()
    assert not has_gone_on
    may_go_on.set()


def test_abort_while_a_communicator_is_being_created(library: Library) -> None:
    """It is aborted as soon as it exists, and no further one is created."""
    may_connect = threading.Event()
    created = [0]

    def connects() -> None:
        created[0] += 1
        if created[0] > 2:  # the second communicator
            may_connect.wait(60)

    library.connects = connects
    store, both = HashStore(), [NcclCommunicators(rank, CPU) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        connecting: list[Future[None]] = [pool.submit(communicators.connect, OF_TWO, store) for communicators in both]
        until(lambda: created[0] == 4)
        for communicators in both:
            communicators.abort()
        until(lambda: sum(call[0] == "abort" for call in library.calls) == 4)
        may_connect.set()
        for each in connecting:
            with pytest.raises(PeerFailed, match="abandoned"):
                each.result(60)
    until(lambda: sum(call[0] == "abort" for call in library.calls) == 6)  # once more, now that there is something
    assert created[0] == 4
    with pytest.raises(PeerFailed):
        both[0].connect(OF_TWO, store)


def _ignoring(wait: Callable[[], Any]) -> None:
    with suppress(Exception):  # of the communicators, which have been aborted
        wait()


def test_a_failure_during_connect_aborts(library: Library, groups: tuple[ProcessGroup, ProcessGroup]) -> None:
    """The driver's wait ends with the failure of a worker, while another thread goes on waiting within NCCL."""
    library.connects = lambda: None

    def interrupted(wait: Callable[[], Any]) -> Any:
        threading.Thread(target=partial(_ignoring, wait), daemon=True).start()
        time.sleep(0.05)
        raise KeyError("cause")

    with pytest.raises(KeyError, match="cause"):
        open_transport(NCCL, groups[0], 0, CPU, OF_TWO, interrupted, HashStore)
    until(lambda: ("abort", 0) in library.calls)
