"""A journal of what a process sends and receives, to find out which process computes differently the second time.

    first time    received 1F0 ── sent 2F0 ── received 2B0 ── sent 1B0      fingerprints of the values, in order
    second time   received 1F0 ── sent 2F0 ✗

The stage whose first difference is something that it has sent has computed differently: it got the same values.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from strategies.common.trees import element_bytes, tensors_in
from strategies.pipeline.transport.interface import AroundTransport, InChannel, OutChannel, Transport

Fingerprint = tuple[Any, ...]
Way = Literal["sent", "received"]

SAME_STAGE = -1
"""The peer of values that a process exchanges with the same stage of other pipelines."""


def fingerprint(value: Any) -> Fingerprint:
    """Return shapes, dtypes and checksums (CRC-32) of the tensors in a value.

    Checksums differ if one bit of a tensor does. If more of it differs, such as the order of the elements, one of four
    billion checksums is equal by chance.
    """
    return tuple((tensor.shape, tensor.dtype, _checksum(tensor)) for tensor in tensors_in(value))


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(element_bytes(tensor).numpy().data)


@dataclass(frozen=True)
class Message:
    """A value that a process has sent or received.

    Attributes:
        way: Whether this process has sent or received it.
        peer: The rank of the other process; :data:`SAME_STAGE` for the same stage of other pipelines.
        channel: The channel.
        number: The pass; 0 for values that are exchanged with other pipelines.
        microbatch: The micro-batch; 0 for these values.
        fingerprint: See :func:`fingerprint`.
    """

    way: Way
    peer: int
    channel: int
    number: int
    microbatch: int
    fingerprint: Fingerprint


@dataclass(frozen=True)
class Comparison:
    """What a stage has computed twice from one snapshot.

    Attributes:
        first: What it sent and received the first time; ``None`` if its process has been replaced since.
        second: What it sent and received the second time.
        state: The names of the tensors of its state that differ at the end.
    """

    first: list[Message] | None
    second: list[Message]
    state: list[str]


class JournaledTransport(AroundTransport):
    """Keeps a journal of the values on all channels, between :meth:`begin` and :meth:`take`.

    A channel that has been opened before is the same channel again, because its other end stays open.

    Args:
        transport: The transport that carries the values.
    """

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self._senders: dict[tuple[int, int], JournaledSender] = {}
        self._receivers: dict[tuple[int, int], JournaledReceiver] = {}
        self._messages: list[Message] | None = None

    @property
    def is_open(self) -> bool:
        """Whether a journal is kept."""
        return self._messages is not None

    def begin(self) -> None:
        """Begin a new journal."""
        self._messages = []

    def take(self) -> list[Message] | None:
        """Return the journal, and keep none from now on."""
        messages, self._messages = self._messages, None
        return messages

    def note(self, way: Way, peer: int, channel: int, number: int, m: int, value: Any) -> None:
        """Add a value that a channel carries, if there is a journal."""
        if self._messages is not None:
            self._messages.append(Message(way, peer, channel, number, m, fingerprint(value)))

    def note_exchange(self, way: Way, value: Any) -> None:
        """Add a value that this process gives to or gets from the same stage of other pipelines."""
        self.note(way, SAME_STAGE, 0, 0, 0, value)

    def sender(self, peer: int, channel: int) -> "JournaledSender":
        if (peer, channel) not in self._senders:
            self._senders[peer, channel] = JournaledSender(self, self._transport.sender(peer, channel), peer, channel)
        return self._senders[peer, channel]

    def receiver(self, peer: int, channel: int) -> "JournaledReceiver":
        if (peer, channel) not in self._receivers:
            self._receivers[peer, channel] = JournaledReceiver(
                self, self._transport.receiver(peer, channel), peer, channel
            )
        return self._receivers[peer, channel]


class JournaledSender:
    """Sends values to one peer; see :class:`~strategies.pipeline.transport.interface.OutChannel`."""

    def __init__(self, journal: JournaledTransport, sender: OutChannel, peer: int, channel: int) -> None:
        self._journal, self.inner, self._peer, self._channel = journal, sender, peer, channel
        self.release: Callable[..., None] = sender.release
        self.flush: Callable[..., None] = sender.flush

    def send(self, value: Any, pass_number: int, microbatch: int, *, keep: int | None = None) -> bool:
        self._journal.note("sent", self._peer, self._channel, pass_number, microbatch, value)
        return self.inner.send(value, pass_number, microbatch, keep=keep)


class JournaledReceiver(InChannel):
    """Receives the values of one peer; see :class:`~strategies.pipeline.transport.interface.InChannel`."""

    def __init__(self, journal: JournaledTransport, receiver: InChannel, peer: int, channel: int) -> None:
        self._journal, self.inner, self._peer, self._channel = journal, receiver, peer, channel

    def receive(self, pass_number: int, microbatch: int) -> Any:
        value = self.inner.receive(pass_number, microbatch)
        self._journal.note("received", self._peer, self._channel, pass_number, microbatch, value)
        return value
