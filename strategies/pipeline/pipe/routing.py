"""Messages between the partitions of a ``Pipe``, in one process or over RPC; each partition has an inbox.

    partition 0 ──F──▶ inbox of 1     partition 1 ──F──▶ inbox of 2     F: activations
         ▲ inbox ◀──B── partition 1        ▲ inbox ◀──B── partition 2   B: their gradients
         └─ a skip that 0 stashes and 2 pops is sent from 0 to the inbox of 2, and its gradient back

The user's process has an inbox, too, for the outputs of the last partition and the gradients of the inputs.
"""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import rpc

from strategies.common.errors import PeerFailed
from strategies.common.torch_compat import tree_map_only
from strategies.common.trees import tensors_in
from strategies.common.waiting import Wait, wait_here
from strategies.pipeline.pipe.local_engine import check_output
from strategies.pipeline.schedule.operations import Post
from strategies.pipeline.stage.skip import Key
from strategies.pipeline.stage.stage import Mailbox, Pass, Ports
from strategies.pipeline.transport.interface import Transport

_UNDER_WAY = 8
"""Number of messages of a partition in flight before it waits for the oldest."""


class MessageKey(NamedTuple):
    """Identifies a message: direction, pass, micro-batch, and the skip (``None`` for the value between layers)."""

    direction: Literal["F", "B"]
    number: int
    microbatch: int
    skip: Key | None


class Inbox:
    """Holds messages until they are taken; any thread puts messages in, one thread takes them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrived: dict[MessageKey, Any] = {}
        self._given_up: set[int] = set()

    def put(self, place: MessageKey, value: Any) -> None:
        """Add a message, unless its pass has been given up."""
        with self._changed:
            if place.number not in self._given_up:
                self._arrived[place] = value
                self._changed.notify_all()

    def take(self, place: MessageKey) -> Any:
        """Wait for a message and remove it.

        Raises:
            PeerFailed: If its pass is given up.
        """
        with self._changed:
            while place not in self._arrived:
                if place.number in self._given_up:
                    raise PeerFailed(f"pass {place.number} of the Pipe has failed elsewhere")
                self._changed.wait()
            return self._arrived.pop(place)

    def give_up(self, number: int) -> None:
        """End every wait for messages of a pass, and drop its messages."""
        with self._changed:
            self._given_up.add(number)
            self._changed.notify_all()
        self.forget(number)

    def forget(self, number: int) -> None:
        """Drop the messages of a pass."""
        with self._changed:
            for place in list(self._arrived):  # an atomic copy: the garbage collector may call this at any time
                if place.number == number:
                    self._arrived.pop(place, None)


def deliver(inbox: Any, place: MessageKey, value: Any) -> None:
    """Add a message to the inbox behind an ``RRef``; runs in the process of its owner."""
    inbox.local_value().put(place, value)


def give_up(inbox: Any, number: int) -> None:
    """Give up a pass in the inbox behind an ``RRef``; runs in the process of its owner."""
    inbox.local_value().give_up(number)


class Letters:
    """Sends messages to inboxes without waiting for their arrival."""

    def __init__(self) -> None:
        self._under_way: deque[Any] = deque()

    def send(self, inbox: Any, place: MessageKey, value: Any) -> None:
        """Send a value to the inbox behind an ``RRef``; tensors are sent from the memory of the host."""
        if inbox.is_owner():
            deliver(inbox, place, value)
            return
        value = tree_map_only(Tensor, lambda tensor: tensor.cpu(), value)
        self._under_way.append(rpc.rpc_async(inbox.owner(), deliver, args=(inbox, place, value), timeout=0))
        self.flush(_UNDER_WAY)

    def flush(self, keep: int = 0) -> None:
        """Wait until all but the last ``keep`` messages have arrived.

        Raises:
            Exception: If a message could not be delivered.
        """
        while len(self._under_way) > keep:
            self._under_way.popleft().wait()


@dataclass(frozen=True)
class Routes:
    """Sources and destinations of a partition's messages; inboxes are given as ``RRef``.

    Attributes:
        own: Inbox of the partition.
        sources: For each value that the partition receives, the inbox of its sender, to which the gradient is sent.
        targets: For each value that the partition sends, the inbox of the receiver.
        description: The partition in words.
    """

    own: Any
    sources: Mapping[Key | None, Any]
    targets: Mapping[Key | None, Any]
    description: str


class Router:
    """The ports of the stage of a partition: splits values by destination, and joins values from several sources.

    A stage takes and returns a pair: a value, and skips by their keys.
    """

    transport: Transport | None = None
    waits_in_receives = True

    def __init__(self, partition: int, routes: Routes, device: torch.device, wait: Wait = wait_here) -> None:
        self._partition = partition
        self._inputs, self._outputs, self._output_grads, self._input_grads = (Mailbox() for _ in range(4))
        self._routes, self._device, self._wait, self._letters = routes, device, wait, Letters()
        self._inbox: Inbox = routes.own.local_value()
        self._wanting: dict[tuple[int, int], list[tuple[Key | None, int]]] = {}
        self._expected: dict[tuple[int, int], list[Key | None]] = {}

    def ports(self) -> dict[int, Ports]:
        """Return the ports of the partition."""
        return {self._partition: Ports(self._inputs, self._outputs, self._output_grads, self._input_grads)}

    def post(self, post: Post, this: Pass) -> None:
        """Send or receive a value of a pass; see :class:`~strategies.pipeline.stage.stage.Connections`."""
        number, m = this.number, post.microbatch
        if post.way == "RECV" and post.kind == "F":
            self._inputs.put(self.receive(number, m), number, m)
        elif post.way == "RECV":
            if (number, m) in self._expected:
                self._output_grads.put(self.receive_grads(number, m), number, m)
        elif post.kind == "F":
            self.send(self._outputs.receive(number, m), number, m)
        elif self._input_grads.has(number, m):
            self.send_grads(self._input_grads.receive(number, m), number, m)

    def begin(self, this: Pass) -> None:
        """Do nothing: :meth:`end` has waited for earlier rows."""

    def end(self, this: Pass) -> None:
        """Wait until every message has arrived."""
        self._wait(self._letters.flush)

    def release(self, keep: int | None) -> None:
        """Do nothing: what has arrived is not kept."""

    def receive(self, number: int, m: int) -> Any:
        """Return the input of a micro-batch and the skips that the partition pops."""
        parts: dict[Key | None, Any] = {}
        wanting = []
        for skip in self._routes.sources:
            value, flags = self._wait(partial(self._inbox.take, MessageKey("F", number, m, skip)))
            parts[skip] = self._received(value, flags)
            if any(flags):
                wanting.append((skip, sum(flags)))
        if wanting:
            self._wanting[number, m] = wanting
        return parts.pop(None), parts

    def send(self, value: Any, number: int, m: int) -> None:
        """Send the output of a micro-batch and the skips that the partition stashes."""
        output, skips = value
        check_output(output, self._routes.description)
        expected = []
        for skip, part in {None: output, **skips}.items():
            flags = [tensor.requires_grad for tensor in tensors_in(part)]
            if any(flags):
                expected.append(skip)
            detached = tree_map_only(Tensor, lambda tensor: tensor.detach(), part)
            self._letters.send(self._routes.targets[skip], MessageKey("F", number, m, skip), (detached, flags))
        if expected:
            self._expected[number, m] = expected

    def receive_grads(self, number: int, m: int) -> list[Tensor | None]:
        """Return the gradients of the values that were sent, in the same order."""
        expected = self._expected.pop((number, m))
        grads = [self._wait(partial(self._inbox.take, MessageKey("B", number, m, skip))) for skip in expected]
        return [None if grad is None else grad.to(self._device) for part in grads for grad in part]

    def send_grads(self, grads: Sequence[Tensor | None], number: int, m: int) -> None:
        """Send the gradients of received values to the senders."""
        ahead = iter(grads)
        for skip, count in self._wanting.pop((number, m)):
            part = [next(ahead) for _ in range(count)]
            self._letters.send(self._routes.sources[skip], MessageKey("B", number, m, skip), part)

    def _received(self, value: Any, flags: Sequence[bool]) -> Any:
        ahead = iter(flags)

        def here(tensor: Tensor) -> Tensor:
            return tensor.detach().to(self._device).requires_grad_(next(ahead))

        return tree_map_only(Tensor, here, value)

    def discard(self, number: int) -> None:
        """Drop the remains of a pass. The garbage collector may call this at any time."""
        self._inbox.forget(number)
        for mail in (self._inputs, self._outputs, self._output_grads, self._input_grads):
            mail.discard(number)
        for kept in (self._wanting, self._expected):
            for key in list(kept):
                if key[0] == number:
                    kept.pop(key, None)
