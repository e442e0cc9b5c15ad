"""What carries values between the processes of a pipeline: one transport in each process.

headers, layouts    gloo, under every transport: the CPU can wait for them, and they can report a failure
payloads            host plane: gloo, through the memory of the hosts        (HostTransport)
                    device plane: from device to device                      (device.py)

Between RPC workers that the user has started there is no gloo: everything travels in calls of RPC (rpc.py).
"""

from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup

from strategies.common.waiting import Wait
from strategies.pipeline.transport.channel import Arriving, Receiver, Sender


class OutChannel(Protocol):
    """Sends values to one peer; see :class:`~strategies.pipeline.transport.channel.Sender`."""

    def send(self, value: Any, pass_number: int, microbatch: int, *, keep: int | None = None) -> bool:
        """Send a value; return whether a tensor of it requires a gradient, which the receiver sends back."""

    def release(self, keep: int = 0) -> None:
        """Drop references to sent values but the last ``keep``."""

    def flush(self, keep: int = 0) -> None:
        """Wait until the caller may change the tensors of all values but the last ``keep``."""


class InChannel(Protocol):
    """Receives the values of one peer; see :class:`~strategies.pipeline.transport.channel.Receiver`."""

    def begin(self, pass_number: int, microbatch: int) -> Arriving:
        """Begin to receive the value of a pass and a micro-batch."""

    def receive(self, pass_number: int, microbatch: int) -> Any:
        """Wait for the value of a pass and a micro-batch."""


class Transport(Protocol):
    """One process's part of the data plane. It opens channels, each of which has one direction and a tag.

    Attributes:
        is_ordered: Whether sends and receives run in the order in which they are posted, so that all processes have to
            post them in one order; see :mod:`strategies.pipeline.schedule.posting`.
    """

    is_ordered: bool

    def sender(self, peer: int, tag: int) -> OutChannel:
        """Open a channel to a rank."""

    def receiver(self, peer: int, tag: int) -> InChannel:
        """Open a channel from a rank."""

    def fail(self) -> None:
        """Report to every process that receives from this one that this one has failed, so that none waits for it."""

    def abort(self) -> None:
        """End all waits for devices, after a failure of any process; called on any thread."""

    def let_go(self) -> None:
        """Drop tensors that have been sent, without waiting for those that have not."""

    def close(self) -> None:
        """Release what the channels hold, whether or not values are being sent."""


class HostTransport:
    """Payloads travel over gloo, through the memory of the hosts.

    Args:
        group: The data plane.
        device: Where received tensors are put.
        wait: Runs a function that blocks until values have arrived.
    """

    is_ordered = False

    def __init__(self, group: ProcessGroup, device: torch.device, wait: Wait) -> None:
        self._group, self._device, self._wait = group, device, wait
        self._senders: list[Sender] = []

    def sender(self, peer: int, tag: int) -> Sender:
        self._senders.append(Sender(self._group, peer, tag=tag, wait=self._wait))
        return self._senders[-1]

    def receiver(self, peer: int, tag: int) -> Receiver:
        return Receiver(self._group, peer, device=self._device, tag=tag, wait=self._wait)

    def fail(self) -> None:
        for sender in self._senders:
            sender.fail()

    def abort(self) -> None:
        """Do nothing: this process waits for messages, and those waits end by themselves."""

    def let_go(self) -> None:
        """Do nothing: gloo tells only those who wait, so what has been sent is kept until the next pass."""

    def close(self) -> None:
        self._senders.clear()
