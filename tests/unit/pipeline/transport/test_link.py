"""A link between two ranks, which are two threads here: what is sent arrives, and a failure does as well."""

import math
import threading
import time
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup
from torch.nn.utils.rnn import pack_sequence

from strategies.common.errors import PeerFailed, PeerSilent, is_consequence
from strategies.common.torch_compat import tree_leaves
from strategies.common.waiting import wait_here
from strategies.launch.rendezvous import store_at
from strategies.launch.session import join_group
from strategies.pipeline.schedule.operations import Post
from strategies.pipeline.stage.edges import Edges
from strategies.pipeline.stage.layers import PassContext
from strategies.pipeline.stage.passes import Pass
from strategies.pipeline.transport import link
from strategies.pipeline.transport.interface import HostTransport
from strategies.pipeline.transport.link import Link, Links, Receiver, Sender, Unusual, filled, structure_of

CPU = torch.device("cpu")


@pytest.fixture
def ends(groups: tuple[ProcessGroup, ProcessGroup]) -> tuple[Sender, Receiver]:
    return Sender(Link(groups[0], 1), 3), Receiver(Link(groups[1], 0), 3, device=CPU)


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
    "a sequence that holds only tensors": (pack_sequence([torch.ones(3, 2), torch.zeros(2, 2)]), {("a", None): 1}),
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
    sender.release()
    assert not sender._under_way


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_receive_frees_what_was_sent_in_the_other_direction(
    groups: tuple[ProcessGroup, ProcessGroup], requires_grad: bool
) -> None:
    """Except for as many values as may be in transit. A driver does so even if a gradient is not required."""
    this = Pass(0, 6, True, "never", 0, PassContext.capture("cpu"))
    driver, worker = (Edges(r, [0, 1], HostTransport(Links(groups[r]), CPU, wait_here)) for r in (1, 0))
    for m in range(this.microbatches):
        driver.mail["F", 0].send((torch.ones(2), {}), 0, m, requires_grad=[requires_grad])
        driver.post(Post("SEND", "F", m, 0, 0, 2), this)
        worker.post(Post("RECV", "F", m, 0, 1, 2), this)
        assert worker.mail["F", 0].receive(0, m)[0].requires_grad == requires_grad
        assert len(worker._senders["B", 0]._under_way) <= 2
        if requires_grad:
            worker.mail["B", 0].send([torch.ones(2)], 0, m)
        worker.post(Post("SEND", "B", m, 0, 1, 2), this)
        driver.post(Post("RECV", "B", m, 0, 0, 2), this)
        assert len(driver._senders["F", 0]._under_way) <= 2


def test_a_sender_knows_whether_gradients_come_back(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    assert sender.send((torch.ones(1), torch.ones(1, requires_grad=True), torch.arange(2)), 0, 0)
    assert [t.requires_grad for t in receiver.receive(0, 0)] == [False, True, False]
    assert not sender.send((torch.ones(1), torch.ones(1), torch.arange(2)), 0, 1)
    assert [t.requires_grad for t in receiver.begin(0, 1).value()] == [False, False, False]


@pytest.mark.parametrize(
    ("width", "expected"),
    [(2, [2, 1, 2, 1, 1]), (2**16, [3, 2, 3, 2, 2])],  # header, description if it is new, tensor if it is not small
)
def test_a_layout_is_described_once(ends: tuple[Sender, Receiver], width: int, expected: list[int]) -> None:
    sender, receiver = ends
    sizes = []
    for m, rows in enumerate([4, 4, 3, 4, 3]):
        sender.send((torch.ones(rows, width), "word"), 0, m)
        sizes.append(len(sender._under_way[-1].works))
    assert sizes == expected
    assert [receiver.receive(0, m)[0].shape[0] for m in range(5)] == [4, 4, 3, 4, 3]


def test_objects_that_are_not_tensors_arrive_as_they_were(ends: tuple[Sender, Receiver]) -> None:
    """Values that are equal but not interchangeable have layouts of their own."""
    sender, receiver = ends
    x = torch.ones(1)
    values: list[Any] = [1, True, 1.0, 0, False, 0.0, -0.0, None, "1", b"1", float("nan"), float("nan"), (), [], {}]
    values += [{1: x}, {True: x}, {"a": x, "b": 1}, {"b": 1, "a": x}, {("a", None): x}, OrderedDict(a=x), torch.float16]
    values += [Pair(x, 1), Pair(x, True), [x, 1], (x, 1), (x, [1]), (x, (1,)), {1, 2}, 2**70, range(3), slice(1, None)]
    for number in range(2):
        for m, value in enumerate(values):
            sender.send(value, number, m)
            received = receiver.receive(number, m)
            assert type(received) is type(value) and repr(received) == repr(value)
    assert len(sender._known) == len(values) - 1  # the NaNs have the same one


def test_each_value_is_new(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    tensors = [torch.full((2, 2), float(m), requires_grad=True) for m in range(100)]
    for m, tensor in enumerate(tensors[:50]):
        sender.send([tensor, {"m": None}], 0, m)
    received = [receiver.receive(0, m) for m in range(50)]
    sender.release()
    for m, tensor in enumerate(tensors[50:], 50):  # in the memory of those before
        sender.send([tensor, {"m": None}], 0, m)
    received += [receiver.receive(0, m) for m in range(50, 100)]
    for value in received:
        value[1]["m"] = value[0]
    for m, value in enumerate(received):
        assert_equal(value[0], tensors[m])
        assert value[0].is_leaf and value[1]["m"] is value[0]
        value[0].sum().backward()


def test_memory_is_used_again_in_any_mode(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    for m, mode in enumerate([torch.inference_mode(), torch.no_grad(), torch.enable_grad(), torch.inference_mode()]):
        with mode:
            sender.send(torch.full((2,), m), 0, m)
            assert receiver.receive(0, m).tolist() == [m, m]
            sender.release()


def test_memory_of_many_layouts_is_not_kept(ends: tuple[Sender, Receiver], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_MAX_LAYOUTS", 128)
    sender, receiver = ends
    num = link._MAX_LAYOUTS + 10
    assert num * 8000 * 4 > 2 * link._FREE_BYTES
    for turn in range(2):
        for m in range(num):
            sender.send(torch.full((8000 + m,), m, dtype=torch.int32), turn, m)
            assert receiver.receive(turn, m).tolist() == [m] * (8000 + m)
            sender.release()
    assert sum(known.layout.message_bytes * len(known.free) for known in sender._known.values()) <= link._FREE_BYTES
    assert len(sender._known) <= link._MAX_LAYOUTS
    assert max(len(message.views) for message, _ in receiver._link._posted) <= link._MAX_VIEWED


def test_views_that_gloo_would_misread(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    for m, size in enumerate([4, 2**14]):
        z = torch.randn(size, dtype=torch.complex64)
        value = [z.conj(), z.imag, z.conj().imag, torch.stack([z, z]).t()]
        sender.send(value, 0, m)
        assert_equal(receiver.receive(0, m), value)


def test_what_has_arrived_is_not_waited_for(groups: tuple[ProcessGroup, ProcessGroup]) -> None:
    waits: list[float] = []

    def wait(function: Callable[[], Any]) -> None:
        waits.append(time.monotonic())
        function()

    sender, receiver = Sender(Link(groups[0], 1), 0, wait=wait), Receiver(Link(groups[1], 0), 0, device=CPU, wait=wait)
    receiver._link.post()
    num = link._NUM_POSTED
    for m in range(num + 2):
        sender.send(torch.ones(1), 0, m)
    while not all(message.has_begun for message, _ in receiver._link._posted):
        time.sleep(0.001)
    for m in range(num):
        receiver.receive(0, m)
    sender.flush()
    assert not waits
    large = link.SMALL_BYTES
    sender.send(torch.ones(large), 0, num + 2)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(lambda: [receiver.receive(0, m).sum().item() for m in range(num, num + 3)])
        sender.flush()  # the caller may change the tensor now
        assert received.result(10) == [1, 1, large]
    assert waits


def test_small_and_large_values_take_turns(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    limit = link.SMALL_BYTES
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


def test_no_more_than_the_limit_is_under_way(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(lambda: [receiver.receive(0, m)[0].item() for m in range(12)])
        for m in range(12):
            sender.send(torch.full((2**19,), float(m)), 0, m, keep=2)
            assert len(sender._under_way) <= 2
        assert received.result(10) == list(range(12))


def test_small_values_are_under_way_in_a_bounded_number(ends: tuple[Sender, Receiver]) -> None:
    sender, receiver = ends
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(lambda: [receiver.receive(0, m).item() for m in range(200)])
        for m in range(200):
            sender.send(torch.tensor([m]), 0, m)
            sender.flush(keep=2)
            assert len(sender._under_way) <= link.MAX_UNDER_WAY
        assert received.result(10) == list(range(200))


def opened(groups: tuple[ProcessGroup, ProcessGroup], channels: int) -> tuple[list[Sender], list[Receiver]]:
    """Both ends of several channels of one link."""
    links = Link(groups[0], 1), Link(groups[1], 0)
    senders = [Sender(links[0], channel) for channel in range(channels)]
    return senders, [Receiver(links[1], channel, device=CPU) for channel in range(channels)]


@pytest.mark.parametrize("size", [1, 2**17])
def test_values_of_other_channels_that_come_first_are_kept(
    groups: tuple[ProcessGroup, ProcessGroup], size: int
) -> None:
    senders, receivers = opened(groups, 3)
    for m in range(4):
        for k, sender in enumerate(senders):
            sender.send((torch.full((size,), 10.0 * m + k, requires_grad=k == 1), "word"), 7, m)

    def received(k: int, m: int) -> float:
        value, word = receivers[k].receive(7, m)
        assert value.shape == (size,) and word == "word" and value.requires_grad == (k == 1)
        return float(value.unique().item())

    assert [received(2, m) for m in range(3)] == [2, 12, 22]
    assert [received(0, m) for m in range(4)] == [0, 10, 20, 30]
    assert [received(1, m) for m in range(4)] == [1, 11, 21, 31]
    assert received(2, 3) == 32


def test_a_channel_that_failed_does_not_end_the_others(groups: tuple[ProcessGroup, ProcessGroup]) -> None:
    """A process that has failed still gets orders, such as that to return its layers."""
    senders, receivers = opened(groups, 2)
    senders[1].send("before", 0, 0)
    senders[1].fail()
    senders[0].send("order", 0, 0)
    assert not receivers[0]._link.has_failed_peer
    assert receivers[0].receive(0, 0) == "order"
    assert receivers[0]._link.has_failed_peer
    assert receivers[1].receive(0, 0) == "before"
    for _ in range(2):
        with pytest.raises(PeerFailed, match="rank 0 of the pipeline failed"):
            receivers[1].receive(0, 1)
    senders[0].send("another", 0, 1)
    assert receivers[0].receive(0, 1) == "another"


@pytest.mark.parametrize("size", [2, 2**17])
def test_a_value_that_is_kept_does_not_take_the_mode_of_the_thread_that_keeps_it(
    groups: tuple[ProcessGroup, ProcessGroup], size: int
) -> None:
    senders, receivers = opened(groups, 2)
    senders[0].send(torch.ones(size, requires_grad=True), 0, 0)
    senders[1].send(torch.ones(1), 0, 0)
    with torch.inference_mode():
        assert receivers[1].receive(0, 0).is_inference()
    value = receivers[0].receive(0, 0)
    assert value.requires_grad and not value.is_inference()


class CannotBeRead:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_after_a_message_that_cannot_be_read_a_link_fails_at_once(groups: tuple[ProcessGroup, ProcessGroup]) -> None:
    """The rest of the message would be taken for that of the next one."""
    senders, receivers = opened(groups, 2)
    senders[0].send(CannotBeRead(), 0, 0)
    senders[1].send(torch.ones(1), 0, 0)
    with pytest.raises(ValueError, match="no number"):
        receivers[1].receive(0, 0)
    for receiver in receivers:
        with pytest.raises(RuntimeError, match=r"rank 0 could not be read, so no later one can: ValueError: .*no numb"):
            receiver.receive(0, 0)


def test_threads_may_send_over_one_link_at_the_same_time(groups: tuple[ProcessGroup, ProcessGroup]) -> None:
    """Each new layout and each large tensor is a message of its own."""
    senders, receivers = opened(groups, 3)
    sizes = [1 + 7 * m if m % 2 else 2**16 + 8 * m for m in range(40)]

    def send(k: int) -> None:
        for m, size in enumerate(sizes):
            senders[k].send(torch.full((size,), float(k)), 0, m)

    with ThreadPoolExecutor(3) as pool:
        sending = list(map(lambda k: pool.submit(send, k), range(3)))
        for m, size in enumerate(sizes):
            for k, receiver in enumerate(receivers):
                value = receiver.receive(0, m)
                assert value.shape == (size,) and value.unique().tolist() == [k]
    for done in sending:
        done.result(10)


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
    with pytest.raises(AssertionError, match=r"expected pass and micro-batch \(0, 0\), got \(0, 1\)"):
        receiver.receive(0, 0)


def test_waiting_in_vain_ends(groups: tuple[ProcessGroup, ProcessGroup]) -> None:
    receiver = Receiver(Link(groups[1], 0), 0, device=CPU, timeout=timedelta(seconds=0.2))
    with pytest.raises(PeerSilent, match="rank 0 of the pipeline sent nothing within the time-out") as caught:
        receiver.receive(0, 0)
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
        thread.join(60)
    assert time.monotonic() < began + 30, "the time-out is 60 s"


# Nested values


@dataclass(frozen=True)
class Place:
    """The place of a value."""

    number: int


def described(value: Any) -> Any:
    return structure_of(value, lambda tensor: (tensor.shape, tensor.dtype))


ALIKE = [
    (torch.zeros(2, 3), torch.ones(2, 3)),
    ((torch.zeros(2), {"a": [1, None]}), (torch.ones(2), {"a": [1, None]})),
    (math.nan, math.nan),
]
DIFFERENT = [
    torch.zeros(2),
    torch.zeros(2, 1),
    torch.zeros(2, dtype=torch.float64),
    torch.nn.Parameter(torch.zeros(2)),
    (torch.zeros(2),),
    [torch.zeros(2)],
    (torch.zeros(2), None),
    *(0, 0.0, -0.0, False, None, "0", b"0", 1, True, 1.0),
    *({"a": 1}, {"a": True}, {"b": 1}, {"a": 1, "b": 2}, {"b": 2, "a": 1}, {1: 1}, {True: 1}),
    *((), [], {}),
]


@pytest.mark.parametrize(("one", "other"), ALIKE, ids=["tensors", "nested", "not a number"])
def test_values_that_differ_in_their_tensors_only_have_one_description(one: Any, other: Any) -> None:
    assert described(one) == described(other)


def test_all_other_values_have_descriptions_of_their_own() -> None:
    assert len({described(value) for value in DIFFERENT}) == len(DIFFERENT)


def test_tensors_are_described_in_the_order_of_leaves() -> None:
    a, b, c = (torch.zeros(n) for n in range(3))
    seen: list[torch.Tensor] = []
    value = {"z": a, "a": [b]}, c
    structure_of(value, lambda tensor: seen.append(tensor))
    assert [*map(id, seen)] == [*map(id, tree_leaves(value))]


@pytest.mark.parametrize(
    "value",
    [Pair(1, 2), OrderedDict(a=1), {Place(0): 1}, Place(0), {1, 2}, torch.Size([1])],
    ids=lambda value: type(value).__name__,
)
def test_other_objects_have_no_description(value: Any) -> None:
    with pytest.raises(Unusual):
        described((value,))


@pytest.mark.parametrize(
    "template",
    [
        Place(1),
        (Place(0), [Place(1), None, 2.5], {"a": Place(1), "b": "text"}),
        Pair(Place(0), [Place(1)]),
        OrderedDict(a=Place(1), b=(Place(0),)),
        (Pair(Place(1), None), {3: torch.Size([1]), 4: Place(0)}),
    ],
    ids=["alone", "plain", "namedtuple", "ordered", "mixed"],
)
def test_markers_are_replaced_in_all_containers(template: Any) -> None:
    values = ["zero", "one"]

    def expected(node: Any) -> Any:
        if isinstance(node, Place):
            return values[node.number]
        if isinstance(node, Pair):
            return Pair(*map(expected, node))
        if isinstance(node, dict):
            return type(node)((key, expected(part)) for key, part in node.items())
        if type(node) in (tuple, list):
            return type(node)(map(expected, node))
        return node

    found = filled(template, Place, lambda place: values[place.number])
    assert found == expected(template)
    assert type(found) is type(expected(template))
