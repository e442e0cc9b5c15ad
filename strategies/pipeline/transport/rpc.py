"""Send values between RPC workers that the user started, for ``Pipe``. RPC calls put them into the inbox of a process.

Between the stages of a pipeline, :mod:`~strategies.pipeline.transport.link` does.

    process 0 ── send ── rpc_async(deliver) ──▶ inbox of 1 ◀── receive ── process 1

Delivery never waits for the receiver, so no order of sends and receives can cause a deadlock. No message outlives its
pass: after a failure, the driver makes every process abandon the pass, and the next pass runs normally.
"""

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import rpc

from strategies.common.errors import PeerFailed
from strategies.common.torch_compat import tree_map_only
from strategies.common.trees import tensors_in
from strategies.common.waiting import Wait, wait_here
from strategies.pipeline.transport.interface import InChannel


class MessageKey(NamedTuple):
    """Identifies a message: its channel, pass and micro-batch."""

    channel: int
    number: int
    microbatch: int


class Inbox:
    """Holds messages until they are taken. Any thread may add messages; one thread takes them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrived: dict[MessageKey, Any] = {}
        self._given_up: set[int] = set()

    def put(self, key: MessageKey, value: Any) -> None:
        """Add a message, unless its pass has been abandoned."""
        with self._changed:
            if key.number not in self._given_up:
                self._arrived[key] = value
                self._changed.notify_all()

    def take(self, key: MessageKey) -> Any:
        """Wait for a message and remove it.

        Raises:
            PeerFailed: If the pass of the message is abandoned.
        """
        with self._changed:
            while key not in self._arrived:
                if key.number in self._given_up:
                    raise PeerFailed(f"pass {key.number} of the Pipe has failed elsewhere")
                self._changed.wait()
            return self._arrived.pop(key)

    def give_up(self, number: int) -> None:
        """End every wait for messages of a pass, and drop its messages."""
        with self._changed:
            self._given_up.add(number)
            for key in [key for key in self._arrived if key.number == number]:
                del self._arrived[key]
            self._changed.notify_all()


def deliver(inbox: Any, key: MessageKey, value: Any) -> None:
    """Add a message to the inbox behind an ``RRef``. Runs in the process that owns the inbox."""
    inbox.local_value().put(key, value)


def give_up(inbox: Any, number: int) -> None:
    """Abandon a pass in the inbox behind an ``RRef``. Runs in the process that owns the inbox."""
    inbox.local_value().give_up(number)


class RpcSender:
    """Sends values to the inbox of another process; see :class:`~strategies.pipeline.transport.interface.OutChannel`.

    Args:
        inbox: The ``RRef`` to the inbox.
        channel: Distinguishes channels that end in the same inbox.
    """

    def __init__(self, inbox: Any, channel: int) -> None:
        self._inbox, self._channel = inbox, channel
        self._under_way: deque[Any] = deque()

    def send(self, value: Any, pass_number: int, microbatch: int, *, keep: int | None = None) -> bool:
        flags = [tensor.requires_grad for tensor in tensors_in(value)]
        message = (tree_map_only(Tensor, lambda tensor: tensor.detach(), value), flags)
        key = MessageKey(self._channel, pass_number, microbatch)
        if self._inbox.is_owner():
            deliver(self._inbox, key, message)
        else:
            message = tree_map_only(Tensor, lambda tensor: tensor.cpu(), message)
            call = rpc.rpc_async(self._inbox.owner(), deliver, args=(self._inbox, key, message), timeout=0)
            self._under_way.append(call)
        if keep is not None:
            self.flush(keep)
        return any(flags)

    def release(self, keep: int = 0) -> None:
        self.flush(keep)

    def flush(self, keep: int = 0) -> None:
        """Wait until all but the last ``keep`` messages have arrived.

        Raises:
            RuntimeError: If a message could not be delivered.
        """
        while len(self._under_way) > keep:
            self._under_way.popleft().wait()


class RpcReceiver(InChannel):
    """Takes values from an inbox of this process; see :class:`~strategies.pipeline.transport.interface.InChannel`.

    Args:
        inbox: The inbox.
        channel: The sender's channel.
        device: The device of received tensors.
        wait: Runs a function that blocks until a value has arrived.
    """

    def __init__(self, inbox: Inbox, channel: int, device: torch.device, wait: Wait) -> None:
        self._inbox, self._channel, self._device, self._wait = inbox, channel, device, wait

    def receive(self, pass_number: int, microbatch: int) -> Any:
        key = MessageKey(self._channel, pass_number, microbatch)
        value, flags = self._wait(partial(self._inbox.take, key))
        ahead = iter(flags)
        return tree_map_only(Tensor, lambda t: t.detach().to(self._device).requires_grad_(next(ahead)), value)


class RpcTransport:
    """One process's part of the data plane; see :class:`~strategies.pipeline.transport.interface.Transport`.

    Args:
        rank: The rank of this process.
        inboxes: The ``RRef`` to the inbox of each process.
        device: The device of received tensors.
        wait: Runs a function that blocks until a value has arrived.
    """

    is_ordered = False
    waits_for_receivers = False

    def __init__(self, rank: int, inboxes: Sequence[Any], device: torch.device, wait: Wait = wait_here) -> None:
        self._inboxes, self._device, self._wait = list(inboxes), device, wait
        self.inbox: Inbox = self._inboxes[rank].local_value()
        """The inbox of this process."""

    def sender(self, peer: int, channel: int) -> RpcSender:
        return RpcSender(self._inboxes[peer], channel)

    def receiver(self, peer: int, channel: int) -> RpcReceiver:
        return RpcReceiver(self.inbox, channel, self._device, self._wait)

    def give_up(self, number: int) -> None:
        """End every wait for messages of a pass, in all processes."""
        for inbox in self._inboxes:
            if inbox.is_owner():
                give_up(inbox, number)
            else:
                with suppress(RuntimeError):  # the process has ended
                    rpc.rpc_async(inbox.owner(), give_up, args=(inbox, number), timeout=0)

    def fail(self) -> None:
        """Do nothing: the driver receives every failure, and makes all processes abandon the pass."""

    def abort(self) -> None:
        """Do nothing: no process waits for a device."""

    def release_sent(self) -> None:
        """Do nothing: values that have arrived are not kept."""

    def close(self) -> None:
        """Do nothing: the RPC session belongs to the user."""
