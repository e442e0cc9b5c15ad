"""Values over the device plane: headers on gloo, payloads on communicators, in the order of posting."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup

from strategies.common.errors import PeerFailed
from strategies.common.waiting import wait_here
from strategies.pipeline.schedule.operations import Post
from strategies.pipeline.stage.edges import Edges
from strategies.pipeline.stage.layers import PassContext
from strategies.pipeline.stage.passes import Pass
from strategies.pipeline.transport.device import DeviceReceiver, DeviceSender, DeviceTransport, Route, routes_of
from strategies.pipeline.transport.link import FIRST_EDGE, TIED_GRADIENTS, TIED_VALUES, Links
from strategies.pipeline.transport.simulated import SimulatedCommunicators
from strategies.pipeline.transport.ties import Tie, TiedParameters

CPU = torch.device("cpu")
TIE = Tie(1, {0: ("weight",), 1: ("weight",)})
Two = tuple[DeviceTransport, DeviceTransport]


def device_transport(group: ProcessGroup, rank: int) -> DeviceTransport:
    routes = routes_of([0, 1], [TIE])
    communicators = SimulatedCommunicators(group, rank, routes, wait_here, one_at_a_time=False)
    return DeviceTransport(Links(group), rank, CPU, communicators, wait_here)


@pytest.fixture
def transports(groups: tuple[ProcessGroup, ProcessGroup]) -> Iterator[Two]:
    both = [device_transport(group, rank) for rank, group in enumerate(groups)]
    yield both[0], both[1]
    for transport in both:
        transport.close()


@pytest.fixture
def ends(transports: Two) -> tuple[DeviceSender, DeviceReceiver]:
    sender, receiver = transports[0].sender(1, FIRST_EDGE + 1), transports[1].receiver(0, FIRST_EDGE + 1)
    assert isinstance(sender, DeviceSender) and isinstance(receiver, DeviceReceiver)
    return sender, receiver


def test_routes_are_the_same_list_for_all_processes() -> None:
    edges = [Route(2, 0, 3), Route(0, 2, 3), Route(0, 1, 4), Route(1, 0, 4), Route(1, 2, 5), Route(2, 1, 5)]
    assert routes_of([0, 1, 2], []) == edges
    two = [Tie(2, {1: ("a",), 2: ("b",)}), Tie(0, {0: ("c",), 1: ("d",)}), Tie(2, {0: ("e",), 2: ("b",)})]
    tied = [(0, 1), (2, 0), (2, 1)]
    exchanges = [
        route for owner, copy in tied for route in (Route(copy, owner, TIED_GRADIENTS), Route(owner, copy, TIED_VALUES))
    ]
    assert routes_of([0, 1, 2], two) == [*edges, *exchanges]
    # chunks under the placement V: the driver, rank 1, has the first and the last one
    assert routes_of([1, 0, 0, 1], []) == [Route(1, 0, 4), Route(0, 1, 4), Route(0, 1, 6), Route(1, 0, 6)]


VALUES: list[Any] = [
    (torch.randn(3, 2), {}),
    {"x": (torch.randn(2, 2, dtype=torch.float64), None), "y": [torch.arange(3), "word", 1.5]},
    [torch.rand(3) > 0.5, torch.randn(2).bfloat16(), torch.randn(2, dtype=torch.complex64).conj(), torch.tensor(7)],
    (torch.randn(2, requires_grad=True), torch.empty(0, 3), torch.arange(12.0).view(3, 4).t()),
    ("word", torch.empty(0, 2)),
    [None, None],
    (torch.randn(3, 2), {}),
]


def assert_equal(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected) and actual.dtype == expected.dtype
        assert actual.requires_grad == expected.requires_grad
    elif isinstance(expected, dict):
        assert_equal(list(actual.items()), list(expected.items()))
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_equal(one, other)
    else:
        assert actual == expected


def test_values_arrive_as_they_were(ends: tuple[DeviceSender, DeviceReceiver]) -> None:
    sender, receiver = ends
    for number in range(2):
        for m, value in enumerate(VALUES):
            sender.send(value, number, m)
        arriving = [receiver.begin(number, m) for m in range(len(VALUES))]
        for m in reversed(range(len(VALUES))):
            assert_equal(arriving[m].value(), VALUES[m])
    sender.flush()
    assert all(getattr(sent, "transfer", None) is None for sent in sender._under_way)
    sender.release()
    assert not sender._under_way


def post_ones(sender: DeviceSender, number: int) -> None:
    for m in range(number):
        sender.send(torch.ones(1), 0, m)


def test_small_tensors_are_not_in_the_message_of_the_header(ends: tuple[DeviceSender, DeviceReceiver]) -> None:
    sender, receiver = ends
    post_ones(sender, 2)
    assert [sent.message.tensor.nbytes for sent in sender._under_way] == [48, 48]
    assert [len(sent.works) for sent in sender._under_way] == [2, 1]  # the layout follows the first header
    for m in range(2):
        receiver.receive(0, m)


def test_the_limit_bounds_what_is_posted(ends: tuple[DeviceSender, DeviceReceiver]) -> None:
    sender, receiver = ends
    arriving = []
    for m in range(6):
        if m >= 2:
            arriving.append(receiver.begin(0, m - 2))
        sender.send(torch.full((2,), m), 0, m, keep=2)
        assert len(sender._under_way) <= 2
    arriving += [receiver.begin(0, m) for m in (4, 5)]
    assert [each.value().tolist() for each in arriving] == [[m, m] for m in range(6)]


def test_failures_are_headers(ends: tuple[DeviceSender, DeviceReceiver]) -> None:
    sender, receiver = ends
    sender.send(torch.ones(1), 3, 0)
    assert receiver.receive(3, 0).tolist() == [1]
    sender.fail()
    with pytest.raises(PeerFailed):
        receiver.begin(3, 1)


def test_a_tensor_on_another_device_is_refused(ends: tuple[DeviceSender, DeviceReceiver]) -> None:
    sender, _ = ends
    message = r"stage 0 computes on cpu, but sends a tensor of shape \[2, 3\] that is on meta.*device=x\.device"
    with pytest.raises(ValueError, match=message):
        sender.send(torch.empty(2, 3, device="meta"), 0, 0)


def a_pass(number: int) -> Pass:
    return Pass(number, 2, True, "never", 0, PassContext.capture("cpu"))


def test_edges_leave_out_gradients_that_nothing_requires(transports: Two) -> None:
    """Edge 1 from stage 0 to the driver: micro-batch 0 requires a gradient, micro-batch 1 does not."""
    source, target, this = Edges(0, [0, 1], transports[0]), Edges(1, [0, 1], transports[1]), a_pass(0)
    for m, requires_grad in enumerate([True, False]):
        source.mail["F", 1].send((torch.ones(2), {}), 0, m, requires_grad=[requires_grad])
        source.post(Post("SEND", "F", m, 1, 1), this)
        target.post(Post("RECV", "F", m, 1, 0), this)
        assert target.mail["F", 1].receive(0, m)[0].requires_grad == requires_grad
    target.mail["B", 1].send([torch.ones(2)], 0, 0)
    for m in range(2):
        target.post(Post("SEND", "B", m, 1, 0), this)
        source.post(Post("RECV", "B", m, 1, 1), this)
    assert source.mail["B", 1].receive(0, 0)[0].tolist() == [1, 1]
    with pytest.raises(KeyError):
        source.mail["B", 1].receive(0, 1)
    source.mail["F", 1].send((torch.ones(2), {}), 5, 0, requires_grad=[True])
    source.post(Post("SEND", "F", 0, 1, 1), a_pass(5))
    source.discard(5)
    source.post(Post("RECV", "B", 0, 1, 1), a_pass(5))  # would wait for its header


def test_tied_parameters_need_no_turn(transports: Two) -> None:
    weights = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.arange(3.0))]
    copy, owner = (TiedParameters(rank, [TIE], {"weight": weights[rank]}, transports[rank]) for rank in range(2))
    for weight in weights:
        weight.grad = torch.ones(3)

    def exchange(tied: TiedParameters) -> None:
        tied.share_values(0)
        tied.move_gradients(0)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(exchange, [copy, owner])) == [None, None]
    assert weights[0].tolist() == [0, 1, 2]
    assert weights[0].grad is None and weights[1].grad is not None and weights[1].grad.tolist() == [2, 2, 2]


def test_owned_parameters_may_change_in_place_after_an_evaluation(transports: Two) -> None:
    """Such as weights that an average replaced for the evaluation; their own memory is sent."""
    weights = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.arange(3.0))]
    copy, owner = (TiedParameters(rank, [TIE], {"weight": weights[rank]}, transports[rank]) for rank in range(2))
    with torch.no_grad():
        for number in range(2):
            owner.share_values(number)
            with ThreadPoolExecutor(1) as pool:
                receiving = pool.submit(copy.share_values, number)
                owner.flush()  # waits here for the transfer; without this, the next change is an error
                receiving.result()
            weights[1].add_(1)
    owner.flush()
    assert weights[0].tolist() == [1, 2, 3] and weights[1].tolist() == [2, 3, 4]


def test_tensors_that_have_arrived_are_let_go_without_a_wait(ends: tuple[DeviceSender, DeviceReceiver]) -> None:
    sender, receiver = ends
    post_ones(sender, 2)
    receiver.receive(0, 0)
    deadline = time.monotonic() + 60
    while len(held := [sent for sent in sender._under_way if getattr(sent, "transfer", None) is not None]) > 1:
        sender.release_sent()
        assert time.monotonic() < deadline
    assert len(held) == 1  # the other one waits for its receive
    receiver.begin(0, 1)


def test_close_waits_for_an_abort_whose_threads_are_still_starting(
    transports: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, is_starting = threading.Thread.start, threading.Event()

    def start(thread: threading.Thread) -> None:
        if thread.name == "relay-abort":
            is_starting.set()
            time.sleep(0.05)
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with ThreadPoolExecutor(1) as pool:
        aborting = pool.submit(transports[0].abort)
        assert is_starting.wait(10)
        transports[0].close()
        aborting.result()
    assert not [thread for thread in threading.enumerate() if thread.name == "relay-abort"]


def test_release_does_not_wait_for_transfers(ends: tuple[DeviceSender, DeviceReceiver]) -> None:
    sender, receiver = ends
    post_ones(sender, 3)
    receiver.receive(0, 0)
    deadline = time.monotonic() + 60
    while len(sender._under_way) > 2:
        sender.release()
        assert time.monotonic() < deadline
    sender.release()
    assert len(sender._under_way) == 2  # their receives have not been posted
    for m in (1, 2):
        receiver.receive(0, m)
    while len(sender._under_way) > 1:
        sender.release(keep=1)
        assert time.monotonic() < deadline
    sender.flush()
    sender.release(keep=1)
    assert len(sender._under_way) == 1
    sender.release()
    assert not sender._under_way
