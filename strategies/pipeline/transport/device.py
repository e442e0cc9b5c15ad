"""The device plane sends payloads from device to device, and headers and layouts over gloo.

    compute stream of stage 0     ── F0 ──┬── F1 ──┬──
                                       event    event             a send waits for the action that computes its value
    communicator, stage 0 to 1    └▶ F0    └▶ F1          one communicator and stream per direction of an edge
                                             ├event  ├event       an action waits for the receive of its input
    compute stream of stage 1                └▶ F0 ──└▶ F1 ──

This module is the same for all kinds of devices: which values are sent, when they are posted, and which operation waits
for which transfer. A :class:`Communicator` implements the primitive operations, over NCCL (:mod:`.nccl`) or simulated
(:mod:`.simulated`).

A communicator does not buffer: a send may wait until its receive runs. So the values of a pass are posted in the order
of :func:`~strategies.pipeline.schedule.posting.posting_order`, and tied parameters in one order for all processes.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from strategies.common.errors import PeerFailed
from strategies.common.trees import TensorLayout
from strategies.common.waiting import Wait
from strategies.pipeline.transport.link import (
    FIRST_EDGE,
    MAX_UNDER_WAY,
    TIED_GRADIENTS,
    TIED_VALUES,
    Arriving,
    Layout,
    Link,
    Links,
    Receiver,
    Sender,
    Sent,
    Transfer,
    as_message,
)
from strategies.pipeline.transport.ties import Tie, pairs_of

_ABORT_SECONDS, _ABORT_SECONDS_AFTER_FAILURE = 10.0, 1.0
"""How long :meth:`Communicators.close` waits for aborts. Meanwhile, the user waits for an error message."""


class Communicator(Protocol):
    """One direction between the devices of two processes. Transfers run in the order in which they are posted."""

    def send(self, tensors: Sequence[Tensor]) -> Transfer:
        """Post sends of tensors that are contiguous and on the device. Their computation may still be running."""

    def receive(self, layouts: Sequence[TensorLayout]) -> tuple[list[Tensor], Transfer]:
        """Post the receives of new tensors, which may be used after :meth:`Transfer.wait`."""

    def abort(self) -> None:
        """End transfers that have not run. This may block, also because of a transfer of another communicator."""


class Route(NamedTuple):
    """The ranks of two processes and a channel between them."""

    source: int
    target: int
    channel: int


class Communicators:
    """The communicators of one process. They are opened one after another, and aborted together.

    An abort may block: ncclCommAbort waits for the device, on which the transfer of another communicator may spin. So
    each communicator is aborted on a separate thread, and only :meth:`close` waits for these threads.
    """

    def __init__(self) -> None:
        self.by_route: dict[Route, Communicator] = {}
        self.has_failed_peer: Callable[[], bool] = lambda: False
        """Returns whether a process that sends to this process has failed. A wait for a transfer then ends."""
        self._lock = threading.Lock()
        self._is_aborted = False
        self._aborts: list[threading.Thread] = []

    def add(self, route: Route, communicator: Communicator) -> None:
        """Add a communicator that will be connected next.

        Raises:
            PeerFailed: If the communicators have been aborted.
        """
        with self._lock:
            if not self._is_aborted:
                self.by_route[route] = communicator
                return
        raise given_up()

    def is_given_up(self) -> bool:
        """Return whether waits for transfers have been abandoned, because a process has failed."""
        return self._is_aborted or self.has_failed_peer()

    def abort(self) -> None:
        """End transfers that have not run, and all waits for them. Any thread may call this. Returns immediately."""
        with self._lock:
            if self._is_aborted:
                return
            self._is_aborted = True
            for communicator in self.by_route.values():
                self._start_abort(communicator)

    def abort_late(self, communicator: Communicator) -> None:
        """Abort a communicator again, because it may not have been connected when all communicators were aborted."""
        with self._lock:
            self._start_abort(communicator)

    def _start_abort(self, communicator: Communicator) -> None:
        thread = threading.Thread(target=_abort, args=(communicator,), name="relay-abort", daemon=True)
        thread.start()
        self._aborts.append(thread)

    def close(self) -> None:
        """Release communicators and threads. Does not wait for an abort that still blocks after some seconds."""
        seconds = _ABORT_SECONDS_AFTER_FAILURE if self._is_aborted else _ABORT_SECONDS
        self.abort()
        deadline = time.monotonic() + seconds
        with self._lock:
            aborts, self._aborts = self._aborts, []
        for thread in aborts:
            thread.join(max(deadline - time.monotonic(), 0))
        self.by_route.clear()


def given_up() -> PeerFailed:
    """Return the error of a wait for a transfer that will not run."""
    return PeerFailed("a transfer has been abandoned, because a process of the pipeline failed")


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, without a copy, because NCCL lacks some dtypes."""
    return tensor.detach().view(-1).view(torch.uint8)


def _abort(communicator: Communicator) -> None:
    with suppress(RuntimeError):  # the communicator reports again the failure for which it is aborted
        communicator.abort()


def num_communicators(rank: int, routes: Iterable[Route]) -> int:
    """Return the number of routes from or to a process."""
    return sum(rank in (route.source, route.target) for route in routes)


def routes_of(rank_of: Sequence[int], ties: Iterable[Tie]) -> list[Route]:
    """Return the routes of all payloads, in the order in which all processes create their communicators.

    Args:
        rank_of: The process of each chunk. The last rank is the driver's.
        ties: All ties of the pipeline.
    """
    driver = rank_of[-1]
    ends = [driver, *rank_of, driver]
    routes = []
    for e, (source, target) in enumerate(pairwise(ends)):
        if source != target:
            routes += [Route(source, target, FIRST_EDGE + e), Route(target, source, FIRST_EDGE + e)]
    for owner, copy in pairs_of(ties):
        routes += [Route(copy, owner, TIED_GRADIENTS), Route(owner, copy, TIED_VALUES)]
    return routes


class DeviceSender(Sender):
    """Sends values to one peer over a communicator; :class:`DeviceReceiver` receives them.

    Args:
        link: The link with the peer, for headers and layouts.
        route: From this process to the peer.
        communicator: Carries the payloads.
        device: The device of this process.
        wait: Runs a function that blocks until values have arrived.
    """

    small_bytes = 0

    def __init__(self, link: Link, route: Route, communicator: Communicator, device: torch.device, wait: Wait) -> None:
        super().__init__(link, route.channel, wait=wait)
        self._route, self._communicator, self._device = route, communicator, device

    def send(self, value: Any, pass_number: int, microbatch: int, *, keep: int | None = None) -> bool:
        self.release_sent()
        known, tensors, description = self._look_up(value)
        payload = [self._contiguous(tensor) for tensor in tensors if tensor.numel()]
        message = self._message(known)
        message.write_header(known.number, self._channel, pass_number, microbatch, len(description))
        contents = [as_message(description)] if description else []
        works = self._link.send(message.tensor, contents)
        transfer = self._communicator.send(payload) if payload else None
        self._under_way.append(Sent(works, message, contents, known, transfer))
        self._bytes_under_way += known.layout.total_bytes
        self._num_not_copied += bool(payload)
        if keep is not None:
            self.flush(keep)
        return known.layout.has_gradients

    def flush(self, keep: int = 0) -> None:
        """Make later computation wait for the transfers of all values except the last ``keep``.

        With ``keep``, block until the transfers have run, which bounds the memory of posted values.
        """
        if len(self._under_way) <= keep or self._has_failed:
            return
        if keep or len(self._under_way) > MAX_UNDER_WAY:
            self._wait(partial(self._wait_until, keep))
            return
        for place, sent in enumerate(self._under_way):
            if sent.transfer is not None:
                sent.transfer.wait()
                self._under_way[place] = replace(sent, transfer=None)

    def release(self, keep: int = 0) -> None:
        """Drop values whose transfers have run, except the last ``keep`` values, without waiting for any transfer.

        A later message shows that the headers have arrived, but work of the devices may still be queued.
        """
        self.release_sent()
        while len(self._under_way) > keep:
            oldest = self._under_way[0]
            if oldest.transfer is not None:
                return
            self._wait_for_oldest()

    def release_sent(self) -> None:
        """Drop the tensors of values whose transfers have run, without waiting for any transfer."""
        for place, sent in enumerate(self._under_way):
            if sent.transfer is not None:
                if not sent.transfer.is_over:
                    return  # later transfers have not run either
                sent.transfer.wait()
                self._under_way[place] = replace(sent, transfer=None)

    def _wait_for_oldest(self) -> None:
        sent = self._under_way[0]
        if sent.transfer is not None:
            sent.transfer.synchronize()
        super()._wait_for_oldest()

    def _contiguous(self, tensor: Tensor) -> Tensor:
        """Return a contiguous tensor on the device of this process.

        Raises:
            ValueError: If the tensor is on another device, or has no values.
        """
        if tensor.device != self._device and tensor.device.type != "cpu":
            raise ValueError(
                f"stage {self._route.source} computes on {self._device}, but sends a tensor of shape "
                f"{list(tensor.shape)} that is on {tensor.device}. A stage has one device: let its layers create "
                "tensors on the device of their input (device=x.device)."
            )
        return tensor.detach().to(self._device).resolve_conj().resolve_neg().contiguous()


@dataclass(frozen=True)
class _Posted:
    """A value whose receive has been posted: its layout, its tensors, and their transfer if any has elements."""

    layout: Layout
    tensors: list[Tensor]
    transfer: Transfer | None

    def value(self) -> Any:
        if self.transfer is not None:
            self.transfer.wait()
        for tensor, described in zip(self.tensors, self.layout.tensors, strict=True):
            if described.requires_grad:
                tensor.requires_grad_()
        return self.layout.filled(self.tensors)


class DeviceReceiver(Receiver):
    """Receives the values of one :class:`DeviceSender`, in order.

    Args:
        link: As for the sender.
        route: From the peer to this process.
        communicator: Carries the payloads.
        device: The device of this process.
        wait: Runs a function that blocks until a header has arrived.
    """

    small_bytes = 0
    has_content = False

    def __init__(self, link: Link, route: Route, communicator: Communicator, device: torch.device, wait: Wait) -> None:
        super().__init__(link, route.channel, device=device, wait=wait)
        self._communicator = communicator

    def begin(self, pass_number: int, microbatch: int) -> Arriving:
        """Wait for the header of the next value, and post the receives of its tensors.

        Computation after :meth:`Arriving.value` waits until they have arrived. For the errors see
        :meth:`Receiver.receive`.
        """
        layout, tensors = self._next(pass_number, microbatch)
        transfer: Transfer | None = None
        if tensors is None:  # else no tensor has elements
            received, transfer = self._communicator.receive([each for each in layout.tensors if 0 not in each.shape])
            ahead = iter(received)
            tensors = [
                torch.empty(each.shape, dtype=each.dtype, device=self._device) if 0 in each.shape else next(ahead)
                for each in layout.tensors
            ]
        return _Posted(layout, tensors, transfer)

    def receive(self, pass_number: int, microbatch: int) -> Any:
        return self.begin(pass_number, microbatch).value()


def _has_failed_peer(links: Links) -> bool:
    return any(link.has_failed_peer for link in list(links.values()))


class DeviceTransport:
    """Sends payloads from device to device.

    Args:
        links: The links with other processes, for headers and layouts.
        rank: The rank of this process.
        device: The device of this process.
        communicators: The communicators of this process.
        wait: Runs a function that blocks until values have arrived.
    """

    is_ordered = True
    waits_for_receivers = False

    def __init__(self, links: Links, rank: int, device: torch.device, communicators: Communicators, wait: Wait) -> None:
        self._links, self._rank, self._device, self._wait = links, rank, device, wait
        self._communicators = communicators
        self._senders: list[DeviceSender] = []
        communicators.has_failed_peer = partial(_has_failed_peer, links)

    def sender(self, peer: int, channel: int) -> Sender:
        route = Route(self._rank, peer, channel)
        communicator = self._communicators.by_route[route]
        self._senders.append(DeviceSender(self._links[peer], route, communicator, self._device, self._wait))
        return self._senders[-1]

    def receiver(self, peer: int, channel: int) -> Receiver:
        route = Route(peer, self._rank, channel)
        communicator = self._communicators.by_route[route]
        return DeviceReceiver(self._links[peer], route, communicator, self._device, self._wait)

    def fail(self) -> None:
        for sender in self._senders:
            sender.fail()
        self._communicators.abort()

    def abort(self) -> None:
        self._communicators.abort()

    def release_sent(self) -> None:
        for sender in self._senders:
            if not self._communicators.is_given_up():
                sender.release_sent()

    def close(self) -> None:
        self._senders.clear()
        self._communicators.close()
