"""The journal of what a process sends and receives."""

from typing import Any

import pytest
import torch
from torch import Tensor

from strategies.pipeline.transport.journal import JournaledTransport, fingerprint
from strategies.pipeline.transport.link import Arrived, Arriving


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("size", [0, 1, 3, 8, 1001])
def test_a_fingerprint_shows_each_bit(dtype: torch.dtype, size: int) -> None:
    value = torch.arange(size).to(dtype)
    assert fingerprint({"x": (value, "other")}) == fingerprint([value.clone()])
    assert fingerprint(value.view(-1, 1)) != fingerprint(value)
    for byte in {0, value.nbytes // 2, value.nbytes - 1} & set(range(value.nbytes)):
        flipped = value.clone()
        flipped.view(torch.uint8)[byte] ^= 1
        assert fingerprint(flipped) != fingerprint(value)


def test_a_fingerprint_shows_the_order_of_rows() -> None:
    rows = torch.randn(4, 6)
    assert fingerprint(rows[[1, 0, 3, 2]]) != fingerprint(rows)


@pytest.mark.parametrize(
    "view",
    [
        torch.linspace(0, 1, 6)[::2],
        torch.linspace(0, 1, 6)[1::5],
        torch.ones(1).expand(5),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, 2, dtype=torch.complex64).mH,
        torch.randn(3, dtype=torch.complex64).conj().imag,
    ],
    ids=["steps", "one of a step", "expanded", "conjugate", "conjugate transpose", "negative"],
)
def test_a_fingerprint_of_a_view_is_that_of_its_values(view: Tensor) -> None:
    assert fingerprint(view) == fingerprint(torch.tensor(view.tolist(), dtype=view.dtype))
    assert fingerprint(view) != fingerprint(view + 1)


class Loop:
    """Carries values within this process: a transport, and both of its channels."""

    is_ordered = False

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.num_opened = 0

    def sender(self, peer: int, tag: int) -> "Loop":
        self.num_opened += 1
        return self

    receiver = sender

    def send(self, value: Any, pass_number: int, microbatch: int, *, keep: int | None = None) -> bool:
        self.values.append(value)
        return True

    def receive(self, pass_number: int, microbatch: int) -> Any:
        return self.values.pop(0)

    def begin(self, pass_number: int, microbatch: int) -> Arriving:
        return Arrived(self.receive(pass_number, microbatch))

    def release(self, keep: int = 0) -> None: ...

    def flush(self, keep: int = 0) -> None: ...

    def fail(self) -> None: ...

    def abort(self) -> None: ...

    def release_sent(self) -> None: ...

    def close(self) -> None: ...


def test_a_journal_has_what_passes_while_it_is_kept() -> None:
    value, loop = torch.arange(3.0), Loop()
    transport = JournaledTransport(loop)
    sender, receiver = transport.sender(1, 10), transport.receiver(2, 12)
    sender.send(value, 6, 0)
    assert transport.take() is None and torch.equal(receiver.receive(6, 0), value)

    transport.begin()
    assert sender.send((value, {}), 7, 1)
    assert torch.equal(receiver.begin(7, 1).value()[0], value)
    sent, received = transport.take() or []
    assert (sent.way, sent.peer, sent.channel, sent.number, sent.microbatch) == ("sent", 1, 10, 7, 1)
    assert (received.way, received.peer, received.channel) == ("received", 2, 12)
    assert sent.fingerprint == received.fingerprint == fingerprint(value)
    assert transport.take() is None


def test_a_channel_is_opened_once() -> None:
    loop = Loop()
    transport = JournaledTransport(loop)
    assert transport.sender(1, 10) is transport.sender(1, 10) is not transport.sender(1, 12)
    assert transport.receiver(1, 10) is transport.receiver(1, 10)
    assert loop.num_opened == 3
