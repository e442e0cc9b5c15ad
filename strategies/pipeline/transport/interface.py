"""The interface of transports, which carry values between the processes of a pipeline. Each process has one transport.

headers, layouts    gloo, with every transport: the CPU can wait for them, and they can report a failure
payloads            host plane: gloo, through the memory of the hosts        (HostTransport)
                    device plane: from device to device                      (device.py)

RPC workers that the user started have no gloo connections: RPC calls carry all values (rpc.py).
"""

from typing import Any, Protocol

import torch

from strategies.common.waiting import Wait
from strategies.pipeline.transport.link import Arrived, Arriving, Links, Receiver, Sender


class OutChannel(Protocol):
    """Sends values on one channel to one peer; see :class:`~strategies.pipeline.transport.link.Sender`."""

    def send(self, value: Any, pass_number: int, microbatch: int, *, keep: int | None = None) -> bool:
        """Send a value. Returns whether a tensor of it requires a gradient, which the receiver will return."""

    def release(self, keep: int = 0) -> None:
        """Drop references to sent values but the last ``keep``."""

    def flush(self, keep: int = 0) -> None:
        """Wait until the caller may change the tensors of all values but the last ``keep``."""


class InChannel(Protocol):
    """Receives the values of one channel from one peer; see :class:`~strategies.pipeline.transport.link.Receiver`."""

    def begin(self, pass_number: int, microbatch: int) -> Arriving:
        """Begin to receive the value of a pass and a micro-batch. By default, wait for it."""
        return Arrived(self.receive(pass_number, microbatch))

    def receive(self, pass_number: int, microbatch: int) -> Any:
        """Wait for the value of a pass and a micro-batch."""


class Transport(Protocol):
    """One process's part of the data plane. It opens the channels of the links with other processes.

    Attributes:
        is_ordered: Whether sends and receives run in the order in which they are posted, so that all processes must
            post them in one order; see :mod:`strategies.pipeline.schedule.posting`.
        waits_for_receivers: Whether :meth:`OutChannel.flush` may wait until another process receives.
    """

    is_ordered: bool
    waits_for_receivers: bool

    def sender(self, peer: int, channel: int) -> OutChannel:
        """Open a channel to a rank."""

    def receiver(self, peer: int, channel: int) -> InChannel:
        """Open a channel from a rank."""

    def fail(self) -> None:
        """Report the failure of this process to every process that receives from it, so that none waits for it."""

    def abort(self) -> None:
        """End waits of this process after a failure of any process. Any thread may call this.

        On a device plane, these are waits for devices. On the host plane, all connections are closed, so a process that
        only waits for the report of the failure should get some time for it.
        """

    def release_sent(self) -> None:
        """Drop tensors that have been sent, without waiting for any send."""

    def close(self) -> None:
        """Release the resources of the channels, even if values are being sent."""


class AroundTransport:
    """Base of a transport around a host transport, which does what concerns all channels.

    Args:
        transport: The other transport.
    """

    is_ordered = False
    waits_for_receivers = True

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def fail(self) -> None:
        self._transport.fail()

    def abort(self) -> None:
        self._transport.abort()

    def release_sent(self) -> None:
        self._transport.release_sent()

    def close(self) -> None:
        self._transport.close()


class HostTransport:
    """Sends payloads over gloo, through host memory.

    Args:
        links: The links with other processes.
        device: The device of received tensors.
        wait: Runs a function that blocks until values have arrived.
    """

    is_ordered = False
    waits_for_receivers = True

    def __init__(self, links: Links, device: torch.device, wait: Wait) -> None:
        self._links, self._device, self._wait = links, device, wait
        self._senders: list[Sender] = []

    def sender(self, peer: int, channel: int) -> Sender:
        self._senders.append(Sender(self._links[peer], channel, wait=self._wait))
        return self._senders[-1]

    def receiver(self, peer: int, channel: int) -> Receiver:
        return Receiver(self._links[peer], channel, device=self._device, wait=self._wait)

    def fail(self) -> None:
        for sender in self._senders:
            sender.fail()

    def abort(self) -> None:
        for link in list(self._links.values()):
            link.close_group()

    def release_sent(self) -> None:
        """Do nothing: gloo reports an arrival only to a caller that waits, so values are kept until the next pass."""

    def close(self) -> None:
        self._senders.clear()
