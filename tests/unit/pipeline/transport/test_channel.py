"""A channel between two ranks, which are two threads here: what is sent arrives, and a failure does as well."""

import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup

from strategies.common.errors import PeerFailed, PeerSilent, is_consequence
from strategies.launch.rendezvous import store_at
from strategies.launch.session import Session, join_data_plane, join_group
from strategies.pipeline.transport import channel
from strategies.pipeline.transport.channel import Announcement, Receiver, Sender

CPU = torch.device("cpu")


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[tuple[ProcessGroup, ProcessGroup]]:
    session = Session(tmp_path.as_uri(), "token", 2, timeout_seconds=5.0, threads=1, paths=[], driver_pid=0)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: join_data_plane(session, rank), range(2))
    yield first, second


@pytest.fixture
def ends(groups: tuple[ProcessGroup, ProcessGroup]) -> tuple[Sender, Receiver]:
    return Sender(groups[0], 1), Receiver(groups[1], 0, device=CPU)


Pair = namedtuple("Pair", ["left", "right"])


def assert_equal(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype and actual.shape == expected.shape
        assert torch.equal(actual, expected)
        assert actual.requires_grad == expected.requires_grad
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key, value in expected.items():
            assert_equal(actual[key], value)
    elif isinstance(expected, tuple | list):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_equal(one, other)
    else:
        assert actual == expected


VALUES: dict[str, Any] = {
    "a tensor": torch.randn(3, 2),
    "nested": {"x": (torch.randn(2, 2, dtype=torch.float64), None), "y": [torch.arange(3), "word", 1.5]},
    "types": [torch.rand(3) > 0.5, torch.randn(2).bfloat16(), torch.randn(2, dtype=torch.complex64), torch.tensor(7)],
    "with gradients": (torch.randn(2, requires_grad=True), torch.randn(2), torch.randn(1).requires_grad_()),
    "strided": torch.arange(12.0).view(3, 4).t(),
    "empty": (torch.empty(0, 3), torch.ones(1)),
    "no tensor": ("word", None),
    "a named tuple": Pair(torch.ones(2), torch.zeros(1)),
}


def test_values_arrive_in_order_as_they_were(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    places = [(number, m) for number in range(2) for m in range(len(VALUES))]
    for number, m in places:
        sender.send(list(VALUES.values())[m], number, m)
    for number, m in places:
        received = receiver.receive(number, m)
        expected = list(VALUES.values())[m]
        assert_equal(received, expected)
    sender.flush()
    assert not sender._under_way


def test_whose_gradient_is_wanted_may_be_said(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    sender.send((torch.ones(1), torch.ones(1), torch.arange(2)), 0, 0, requires_grad=[False, True, False])
    assert [t.requires_grad for t in receiver.receive(0, 0)] == [False, True, False]


@pytest.mark.parametrize(
    ("width", "expected"),
    [(2, [2, 1, 2, 1, 1]), (2**14, [3, 2, 3, 2, 2])],  # header, description if it is new, tensor if it is not small
)
def test_a_layout_is_described_once(ends: tuple[Sender, Receiver], width: int, expected: list[int]) -> None:
    sender, receiver = ends
    sizes = []
    for m, rows in enumerate([4, 4, 3, 4, 3]):
        sender.send((torch.ones(rows, width), "word"), 0, m)
        sizes.append(len(sender._under_way[-1]))
    assert sizes == expected
    assert [receiver.receive(0, m)[0].shape[0] for m in range(5)] == [4, 4, 3, 4, 3]


def test_small_and_large_values_take_turns(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    limit = channel._SMALL_BYTES
    values: list[Any] = []
    for nbytes in (limit - 1, limit, limit + 1, 3, 4 * limit, 0, limit - 32):
        values.append({"x": torch.randint(256, (nbytes,), dtype=torch.uint8), "y": torch.rand(1, dtype=torch.float64)})
        values.append((torch.randint(256, (nbytes,), dtype=torch.uint8), None))
    for m, value in enumerate(values):
        sender.send(value, 0, m)
    for m, value in enumerate(values):
        assert_equal(receiver.receive(0, m), value)
    sender.release()
    assert not sender._under_way


def test_passes_are_announced_along_with_their_first_value(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    for number in (3, 4):
        sender.announce(Announcement(number, 2, 2**62 + number))
        for m in range(2):
            sender.send(torch.tensor([number, m]), number, m)
    sender.end_passes()
    sender.send(torch.tensor([7]), 5, 0)
    for number in (3, 4):
        assert receiver.announcement() == Announcement(number, 2, 2**62 + number)
        assert [receiver.receive(number, m).tolist() for m in range(2)] == [[number, 0], [number, 1]]
    assert receiver.announcement() is None
    assert receiver.receive(5, 0).tolist() == [7]
    sender.fail()
    with pytest.raises(PeerFailed):
        receiver.announcement()


def test_no_more_than_the_limit_is_under_way(groups: tuple[ProcessGroup, ProcessGroup]) -> None:
    sender, receiver = Sender(groups[0], 1, limit=2), Receiver(groups[1], 0, device=CPU)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(lambda: [receiver.receive(0, m).item() for m in range(6)])
        for m in range(6):
            sender.send(torch.tensor([float(m)]), 0, m)
            assert len(sender._under_way) <= 2
        assert received.result(10) == [0, 1, 2, 3, 4, 5]


def test_two_channels_between_the_same_ranks(groups: tuple[ProcessGroup, ProcessGroup]) -> None:
    senders = [Sender(groups[0], 1, tag=tag) for tag in (0, 2)]
    receivers = [Receiver(groups[1], 0, device=CPU, tag=tag) for tag in (0, 2)]
    for k, sender in enumerate(senders):
        sender.send(torch.tensor([k]), 0, 0)
    assert [receiver.receive(0, 0).item() for receiver in reversed(receivers)] == [1, 0]


def test_a_sender_that_failed_says_so(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    sender.send(torch.ones(1), 0, 0)
    sender.fail()
    receiver.receive(0, 0)
    with pytest.raises(PeerFailed, match="rank 0 of the pipeline failed") as caught:
        receiver.receive(0, 1)
    assert is_consequence(caught.value)
    assert not is_consequence(RuntimeError("out of memory"))


def test_the_wrong_micro_batch_is_noticed(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    sender.send(torch.ones(1), 0, 1)
    with pytest.raises(AssertionError, match=r"expected pass and micro-batch \(0, 0\), got \[0, 1\]"):
        receiver.receive(0, 0)


def test_waiting_in_vain_ends(tmp_path: Path) -> None:
    session = Session(tmp_path.as_uri(), "token", 2, timeout_seconds=0.2, threads=1, paths=[], driver_pid=0)
    with ThreadPoolExecutor(2) as pool:
        _first, second = pool.map(lambda rank: join_data_plane(session, rank), range(2))
    with pytest.raises(PeerSilent, match="rank 0 of the pipeline sent nothing within the time-out") as caught:
        Receiver(second, 0, device=CPU).receive(0, 0)
    assert is_consequence(caught.value)


def test_connecting_ends_when_it_is_in_vain(tmp_path: Path) -> None:
    """The other process has appeared, and has died before it said where it listens."""
    url, began = f"{tmp_path.as_uri()}/data", time.monotonic()
    store = store_at(url, 2)
    store.set("arrived/1", "")

    def check() -> None:
        if time.monotonic() > began + 0.3:
            raise KeyError("why")

    with pytest.raises(KeyError, match="why"):
        join_group(url, 0, 2, 60.0, check=check)
    connecting = [thread for thread in threading.enumerate() if thread.name.startswith("relay-connect")]
    for thread in connecting:
        thread.join(5)
    assert connecting and time.monotonic() < began + 2
