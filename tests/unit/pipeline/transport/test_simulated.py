"""Simulated communicators behave as NCCL's: they buffer nothing, keep the order of posting, and report misuse."""

import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from strategies.common.errors import PeerFailed
from strategies.common.trees import TensorLayout
from strategies.common.waiting import wait_here
from strategies.pipeline.transport.device import Route
from strategies.pipeline.transport.link import FIRST_EDGE
from strategies.pipeline.transport.simulated import SimulatedCommunicators, SimulatedTransfer

THERE, BACK = Route(0, 1, FIRST_EDGE), Route(1, 0, FIRST_EDGE)
Two = tuple[SimulatedCommunicators, SimulatedCommunicators]


def linked(groups: tuple[ProcessGroup, ProcessGroup], *, one_at_a_time: bool) -> Two:
    make = partial(SimulatedCommunicators, routes=[THERE, BACK], wait=wait_here, one_at_a_time=one_at_a_time)
    return make(groups[0], 0), make(groups[1], 1)


@pytest.fixture
def communicators(groups: tuple[ProcessGroup, ProcessGroup]) -> Iterator[Two]:
    both = linked(groups, one_at_a_time=False)
    yield both
    for each in both:
        each.close()


def layouts(*tensors: Tensor) -> list[TensorLayout]:
    return [TensorLayout(tuple(tensor.shape), tensor.dtype, False) for tensor in tensors]


def has_run(transfer: object, within_seconds: float) -> bool:
    assert isinstance(transfer, SimulatedTransfer)
    deadline = time.monotonic() + within_seconds
    while not transfer.is_over and time.monotonic() < deadline:
        time.sleep(0.005)
    return transfer.is_over


@pytest.mark.parametrize("rows", [1, 2**18])
def test_a_send_waits_until_its_receive_is_posted(communicators: Two, rows: int) -> None:
    x = torch.randn(rows)
    sent = communicators[0].by_route[THERE].send([x])
    assert not has_run(sent, 0.2)
    (received,), transfer = communicators[1].by_route[THERE].receive(layouts(x))
    transfer.wait()
    assert torch.equal(received, x)
    assert has_run(sent, 60)


def test_transfers_run_in_the_order_of_posting(communicators: Two) -> None:
    values = [torch.full((m + 1,), m) for m in range(8)]
    sent = [communicators[0].by_route[THERE].send([value]) for value in values]
    arriving = [communicators[1].by_route[THERE].receive(layouts(value)) for value in values]
    for (received,), transfer in reversed(arriving):
        transfer.wait()
        assert received.tolist() == [len(received) - 1] * len(received)
    for transfer in sent:
        transfer.synchronize()


def test_directions_have_communicators_of_their_own(communicators: Two) -> None:
    x = torch.ones(3)
    transfers = [communicators[0].by_route[THERE].send([x]), communicators[1].by_route[BACK].send([2 * x])]
    received = [
        communicators[1].by_route[THERE].receive(layouts(x)),
        communicators[0].by_route[BACK].receive(layouts(x)),
    ]
    for transfer in (*transfers, *(transfer for _, transfer in received)):
        transfer.wait()
    assert [tensors[0].tolist() for tensors, _ in received] == [[1, 1, 1], [2, 2, 2]]


def test_what_has_arrived_is_there_after_the_wait_only(communicators: Two) -> None:
    tensors = [torch.randn(3), torch.arange(4), torch.tensor(False), torch.randn(2).bfloat16(), torch.randn(2) * 1j]
    sent = communicators[0].by_route[THERE].send(tensors)
    received, transfer = communicators[1].by_route[THERE].receive(layouts(*tensors))
    assert has_run(sent, 60) and has_run(transfer, 60)
    assert received[0].isnan().all() and received[1].tolist() == [torch.iinfo(torch.int64).max] * 4
    assert received[2].item() is True and received[3].isnan().all() and received[4].isnan().all()
    transfer.wait()
    assert all(torch.equal(one, other) for one, other in zip(received, tensors, strict=True))


def test_nobody_keeps_what_has_been_received(communicators: Two) -> None:
    x = torch.ones(3)
    sent = communicators[0].by_route[THERE].send([x])
    received, transfer = communicators[1].by_route[THERE].receive(layouts(x))
    transfer.wait()
    sent.wait()
    alive = [weakref.ref(received.pop()), weakref.ref(x)]
    del x
    assert [each() for each in alive] == [None, None]


def test_a_tensor_must_not_change_while_it_is_sent(communicators: Two) -> None:
    x = torch.ones(2, 3)
    sent = communicators[0].by_route[THERE].send([x])
    (received,), transfer = communicators[1].by_route[THERE].receive(layouts(x))
    transfer.wait()
    x.add_(1)
    assert received.tolist() == [[1] * 3] * 2
    with pytest.raises(RuntimeError, match=r"stage 0 changed a tensor of shape \[2, 3\] .* to stage 1.*return a copy"):
        sent.wait()
    again = communicators[0].by_route[THERE].send([x])
    communicators[1].by_route[THERE].receive(layouts(x))[1].wait()
    again.wait()
    x.add_(1)  # the wait is over
    again.wait()


@pytest.mark.parametrize(("one_at_a_time", "error"), [(True, PeerFailed), (False, type(None))])
def test_crossing_sends_block_devices_that_run_one_operation_at_a_time(
    groups: tuple[ProcessGroup, ProcessGroup], one_at_a_time: bool, error: type
) -> None:
    """The obvious order of 1F1B: each process sends before it receives. The same order runs on independent streams."""
    both = linked(groups, one_at_a_time=one_at_a_time)
    x = torch.ones(1)
    if one_at_a_time:
        deadline = time.monotonic() + 0.5
        for communicators in both:
            communicators.has_failed_peer = lambda: time.monotonic() > deadline

    def sends_first(own: SimulatedCommunicators, there: Route, back: Route) -> None:
        sent = own.by_route[there].send([x])
        (received,), transfer = own.by_route[back].receive(layouts(x))
        transfer.wait()
        sent.wait()
        assert torch.equal(received, x)

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(sends_first, both[0], THERE, BACK), pool.submit(sends_first, both[1], BACK, THERE)]
        assert {type(run.exception()) for run in runs} == {error}
    for communicators in both:
        communicators.close()


def test_a_wait_ends_when_communicators_are_aborted(communicators: Two) -> None:
    transfer = communicators[0].by_route[THERE].send([torch.ones(1)])
    communicators[0].abort()
    for wait in (transfer.wait, transfer.synchronize, communicators[0].by_route[THERE].send([torch.ones(1)]).wait):
        with pytest.raises(PeerFailed, match="abandoned"):
            wait()


def test_the_thread_that_waits_raises_the_error_of_a_transfer(communicators: Two) -> None:
    def fail() -> None:
        raise ConnectionError("the other process has closed the connection")

    transfer = SimulatedTransfer(fail, lambda: None, communicators[0], "a send")
    transfer.run()
    with pytest.raises(ConnectionError, match="has closed"):
        transfer.wait()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8, torch.uint16])
def test_an_index_that_has_not_arrived_is_no_index(communicators: Two, dtype: torch.dtype) -> None:
    """With -1, which the bytes of NaN are as a signed integer, a gather by Python's rules would find the last row."""
    index = torch.tensor([1, 0], dtype=dtype)
    sent = communicators[0].by_route[THERE].send([index])
    (received,), transfer = communicators[1].by_route[THERE].receive(layouts(index))
    assert has_run(transfer, 60)
    assert received.tolist() == [torch.iinfo(dtype).max] * 2
    with pytest.raises(IndexError):
        torch.arange(3)[received.long()]
    transfer.wait()
    assert received.tolist() == [1, 0]
    sent.wait()


@pytest.mark.parametrize("tensor", [torch.zeros(3), torch.zeros(3, dtype=torch.int64), torch.tensor(False)], ids=str)
def test_what_has_not_arrived_must_not_be_changed(communicators: Two, tensor: Tensor) -> None:
    sent = communicators[0].by_route[THERE].send([tensor])
    (received,), transfer = communicators[1].by_route[THERE].receive(layouts(tensor))
    received.zero_()
    with pytest.raises(RuntimeError, match=r"stage 1 receives from stage 0 was changed before the wait for it"):
        transfer.wait()
    sent.wait()


def test_what_has_not_arrived_must_not_be_sent(communicators: Two) -> None:
    x = torch.ones(2, 3)
    sent = communicators[0].by_route[THERE].send([x])
    (received,), transfer = communicators[1].by_route[THERE].receive(layouts(x))
    assert has_run(transfer, 60)
    for view in (received, received[1]):
        with pytest.raises(RuntimeError, match=r"stage 1 sends stage 0 a tensor of shape .* that a receive still"):
            communicators[1].by_route[BACK].send([view])
    transfer.wait()
    back = communicators[1].by_route[BACK].send([received])
    (again,), transfer = communicators[0].by_route[BACK].receive(layouts(x))
    for each in (sent, back, transfer):
        each.wait()
    assert torch.equal(again, x)


def test_a_send_must_not_be_posted_before_its_tensor_is_computed(communicators: Two) -> None:
    """Such as by a layer that computes on a thread or stream of its own, for which it does not wait."""
    x, may_go_on = torch.zeros(2), threading.Event()

    def compute() -> None:
        may_go_on.wait(5)
        x.add_(1)

    with ThreadPoolExecutor(1) as pool:
        computing = pool.submit(compute)
        sent = communicators[0].by_route[THERE].send([x])
        may_go_on.set()
        computing.result()
    (received,), transfer = communicators[1].by_route[THERE].receive(layouts(x))
    transfer.wait()
    assert received.tolist() == [0, 0]
    with pytest.raises(RuntimeError, match="stage 0 changed a tensor"):
        sent.synchronize()


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, 3).t(), torch.arange(6)[::2], torch.ones(4, dtype=torch.uint8)[::2], torch.ones(1).expand(3)],
    ids=["transposed", "every second", "every second byte", "expanded"],
)
def test_values_must_follow_one_another(communicators: Two, tensor: Tensor) -> None:
    with pytest.raises(
        ValueError, match=r"stage 0 sends stage 1 a tensor .* are not contiguous in memory.* Send tensor.contiguous"
    ):
        communicators[0].by_route[THERE].send([tensor])


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(2, dtype=torch.complex64).conj(), "are not contiguous in memory"),
        (torch.ones(2).to_sparse(), "are not contiguous in memory"),
        (torch.empty(2, device="meta"), r"that is on meta, but the stage computes on cpu"),
        (torch.empty(0, 3), "has no elements"),
    ],
    ids=["conjugated", "sparse", "on another device", "empty"],
)
def test_what_has_no_memory_of_its_own_is_not_sent(communicators: Two, tensor: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        communicators[0].by_route[THERE].send([tensor])


def test_a_transfer_must_not_be_dropped_before_a_wait(communicators: Two) -> None:
    x = torch.ones(1)
    sent = communicators[0].by_route[THERE].send([x])
    received, transfer = communicators[1].by_route[THERE].receive(layouts(x))
    assert has_run(sent, 60) and has_run(transfer, 60)
    transfer.wait()
    del sent
    deadline = time.monotonic() + 60
    while not communicators[0].dropped and time.monotonic() < deadline:  # by the thread that has run it, too
        time.sleep(0.005)
    message = "send of stage 0 to stage 1: dropped without a wait, so the memory"
    for post in (
        lambda: communicators[0].by_route[THERE].send([x]),
        lambda: communicators[0].by_route[BACK].receive(layouts(x)),
    ):
        with pytest.raises(RuntimeError, match=message):
            post()
    assert received[0].tolist() == [1]
