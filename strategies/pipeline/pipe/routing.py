"""How partitions of a ``Pipe`` reach each other, in one process or over RPC: each has an inbox.

    partition 0 ──F──▶ inbox of 1     partition 1 ──F──▶ inbox of 2     F: activations
         ▲ inbox ◀──B── partition 1        ▲ inbox ◀──B── partition 2   B: their gradients
         └─ a skip that 0 stashes and 2 pops goes from 0 to the inbox of 2, and its gradient back

The user's process has an inbox, too: for the last partition's outputs, and for the gradients of the inputs.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.distributed import rpc

from strategies.common.errors import PeerFailed
from strategies.common.torch_compat import tree_map_only
from strategies.common.trees import tensors_in
from strategies.common.waiting import Wait, wait_here
from strategies.pipeline.pipe.local_engine import check_output
from strategies.pipeline.stage.skip import Key
from strategies.pipeline.worker.wiring import Wiring

_UNDER_WAY = 8
"""How many messages of a partition may be on their way before it waits for the oldest."""


class MessageKey(NamedTuple):
    """What a message is: direction, pass, micro-batch, and which skip, or ``None`` for what every layer hands on."""

    direction: Literal["F", "B"]
    number: int
    microbatch: int
    skip: Key | None


class Inbox:
    """What has arrived and has not been taken yet; anybody may put, one thread takes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrived: dict[MessageKey, Any] = {}
        self._given_up: set[int] = set()

    def put(self, place: MessageKey, value: Any) -> None:
        """Puts something in, unless its pass has been given up."""
        with self._changed:
            if place.number not in self._given_up:
                self._arrived[place] = value
                self._changed.notify_all()

    def take(self, place: MessageKey) -> Any:
        """Waits for something and takes it out.

        Raises:
            PeerFailed: If the pass is given up.
        """
        with self._changed:
            while place not in self._arrived:
                if place.number in self._given_up:
                    raise PeerFailed(f"pass {place.number} of the Pipe has failed elsewhere")
                self._changed.wait()
            return self._arrived.pop(place)

    def give_up(self, number: int) -> None:
        """Nothing of a pass is to be waited for any more."""
        with self._changed:
            self._given_up.add(number)
            self._changed.notify_all()
        self.forget(number)

    def forget(self, number: int) -> None:
        """Drops what has arrived of a pass."""
        with self._changed:
            for place in list(self._arrived):  # a copy at one stroke: the garbage collector may come here at any time
                if place.number == number:
                    self._arrived.pop(place, None)


def deliver(inbox: Any, place: MessageKey, value: Any) -> None:
    """Puts something into the inbox behind an ``RRef``, from its owner's process."""
    inbox.local_value().put(place, value)


def give_up(inbox: Any, number: int) -> None:
    """Gives a pass up in the inbox behind an ``RRef``, from its owner's process."""
    inbox.local_value().give_up(number)


class Post:
    """Sends to inboxes, without waiting for arrival."""

    def __init__(self) -> None:
        self._under_way: deque[Any] = deque()

    def send(self, inbox: Any, place: MessageKey, value: Any) -> None:
        """Sends a value to the inbox behind an ``RRef``; tensors travel over the host's memory."""
        if inbox.is_owner():
            deliver(inbox, place, value)
            return
        value = tree_map_only(Tensor, lambda tensor: tensor.cpu(), value)
        self._under_way.append(rpc.rpc_async(inbox.owner(), deliver, args=(inbox, place, value), timeout=0))
        self.flush(_UNDER_WAY)

    def flush(self, keep: int = 0) -> None:
        """Waits until everything has arrived but for the last ``keep`` messages.

        Raises:
            Exception: If something could not be delivered.
        """
        while len(self._under_way) > keep:
            self._under_way.popleft().wait()


@dataclass(frozen=True)
class Routes:
    """Where a partition's messages come from and go to; inboxes are given as ``RRef``.

    Attributes:
        own: The partition's inbox.
        sources: For what arrives, the inbox that its gradient goes to: that of the sender.
        targets: For what is sent, the inbox that it goes to.
        description: The partition in words.
    """

    own: Any
    sources: Mapping[Key | None, Any]
    targets: Mapping[Key | None, Any]
    description: str


class Router:
    """The ports of a partition's stage: takes apart what goes to different places, and puts together what came.

    What a stage takes and returns is a pair: a value, and skips by their keys.
    """

    def __init__(self, routes: Routes, device: torch.device, wait: Wait = wait_here) -> None:
        self._routes, self._device, self._wait, self._post = routes, device, wait, Post()
        self._inbox: Inbox = routes.own.local_value()
        self._wanting: dict[tuple[int, int], list[tuple[Key | None, int]]] = {}
        self._expected: dict[tuple[int, int], list[Key | None]] = {}

    def wiring(self) -> Wiring:
        """What a stage on a worker is connected to."""
        return Wiring(
            inputs=_Input(self.receive),
            outputs=_Output(self.send, self._post),
            output_grads=_Input(self.receive_grads),
            input_grads=_Output(self.send_grads, self._post),
            sender=_no_ties,
            receiver=_no_ties,
            limit=_UNDER_WAY,
            settle=self.settle,
            forget=self.forget,
        )

    def receive(self, number: int, m: int) -> Any:
        """The input of a micro-batch and the skips that it pops."""
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

    def send(self, value: Any, number: int, m: int, *, requires_grad: Sequence[bool] = ()) -> None:
        """Sends the output of a micro-batch on, and what it stashes."""
        output, skips = value
        check_output(output, self._routes.description)
        ahead = iter(requires_grad)
        expected = []
        for skip, part in {None: output, **skips}.items():
            flags = [next(ahead) for _ in tensors_in(part)]
            if any(flags):
                expected.append(skip)
            detached = tree_map_only(Tensor, lambda tensor: tensor.detach(), part)
            self._post.send(self._routes.targets[skip], MessageKey("F", number, m, skip), (detached, flags))
        if expected:
            self._expected[number, m] = expected

    def receive_grads(self, number: int, m: int) -> list[Tensor | None]:
        """The gradients of what was sent, in its order."""
        expected = self._expected.pop((number, m))
        grads = [self._wait(partial(self._inbox.take, MessageKey("B", number, m, skip))) for skip in expected]
        return [None if grad is None else grad.to(self._device) for part in grads for grad in part]

    def send_grads(self, grads: Sequence[Tensor | None], number: int, m: int, **_: Any) -> None:
        """Sends the gradients of what was received back to where it came from."""
        ahead = iter(grads)
        for skip, count in self._wanting.pop((number, m)):
            part = [next(ahead) for _ in range(count)]
            self._post.send(self._routes.sources[skip], MessageKey("B", number, m, skip), part)

    def settle(self) -> None:
        """Waits until everything sent has arrived."""
        self._wait(self._post.flush)

    def _received(self, value: Any, flags: Sequence[bool]) -> Any:
        ahead = iter(flags)

        def here(tensor: Tensor) -> Tensor:
            return tensor.detach().to(self._device).requires_grad_(next(ahead))

        return tree_map_only(Tensor, here, value)

    def forget(self, number: int) -> None:
        """Drops what is left of a pass."""
        self._inbox.forget(number)
        for kept in (self._wanting, self._expected):
            for key in list(kept):
                if key[0] == number:
                    kept.pop(key, None)


@dataclass(frozen=True)
class _Input:
    receive: Callable[[int, int], Any]


class _Output:
    def __init__(self, send: Callable[..., None], post: Post) -> None:
        self._send, self._post = send, post

    def send(self, value: Any, pass_number: int, microbatch: int, *, requires_grad: list[bool] | None = None) -> None:
        self._send(value, pass_number, microbatch, requires_grad=requires_grad or [])

    def flush(self, keep: int = 0) -> None:
        self._post.flush(keep)

    def fail(self) -> None:
        """Nothing: the user's process hears of every failure, and tells the others."""


def _no_ties(peer: int, tag: int) -> NoReturn:
    raise AssertionError(f"partitions share no parameters, yet one wants a channel to {peer} with tag {tag}")
