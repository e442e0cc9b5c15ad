"""One direction of the data plane between two processes: nested values, sent as point-to-point messages.

A value is a tensor, or tuples, lists and dicts of tensors and other objects. The sender sends it as

    header   int64[6]: kind of the message, pass, micro-batch, size of the layout in bytes; if the value announces a
             pass (:class:`Announcement`), also that pass's number of micro-batches and its seed, otherwise zeros
    tensors  in the same message as the header if they are small together, otherwise one message each after the
             layout; an empty tensor is not sent
    layout   uint8[size]: nesting, shapes, dtypes, objects that are not tensors; only if the receiver lacks it

The sender numbers layouts and both sides keep them, so each layout is sent once. Sends are asynchronous, because
gloo's send waits until the peer has posted its receive, which would make two stages run in lock-step. The sender keeps
a reference to each message until the message has arrived. The receiver posts the receive of the next header in advance.
"""

import math
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ParamSpec, TypeVar

import cloudpickle
import torch
from torch.distributed import ProcessGroup, Work

from strategies.common.errors import PeerFailed, PeerSilent
from strategies.common.torch_compat import (
    profiler_is_on,
    record_functions,
    timeout_of,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from strategies.common.trees import TensorLayout
from strategies.common.waiting import Wait, wait_here

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

FEED_TAG = 2
"""Tag of the channels between the driver and stage 0: the pipeline's inputs, and their gradients."""

_FAILED, _END = -1, -2
"""Kinds of headers without a value: the sender's process has failed and sends nothing more; the sender announces no
more passes. Any other kind is the number of a layout."""

_HEADER_BYTES = 6 * 8

_SMALL_BYTES = 2**15
"""Maximum size of all tensors of a value that are sent in the message of its header. A tensor in a message of its own
takes one more round trip, because the receiver posts a buffer for it after it has received the layout. The buffer for
the header's message is posted in advance, and may be larger than that message."""

_ALIGNMENT = 16
"""Tensors in a message start at multiples of this number of bytes, the size of the largest dtype."""

NO_LIMIT = timedelta(days=365)
"""Time-out of a stage that waits for its next pass or for its values; gloo cannot wait without a time-out."""

_NOTHING_ANNOUNCED = 0, 0

_MAX_LAYOUTS = 1024


@dataclass(frozen=True)
class Announcement:
    """A pass without a backward part, announced over the data plane instead of by a command.

    For the attributes see :class:`~strategies.pipeline.stage.stage.Pass`.
    """

    number: int
    microbatches: int
    seed: int


def _pickled(layout: Any) -> bytes:
    try:
        return pickle.dumps(layout)
    except Exception:  # a class defined in a script or a notebook, which pickle cannot import
        return cloudpickle.dumps(layout)


def _places(sizes_bytes: Iterable[int]) -> tuple[list[int], int]:
    """Return the offsets of tensors of these sizes in a message with a header, and the end of the last tensor."""
    starts, end = [], _HEADER_BYTES
    for size_bytes in sizes_bytes:
        starts.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = starts[-1] + size_bytes
    return starts, end


def unrecorded(function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
    """Call a function that starts a send or a receive, without an event of torch's profiler.

    torch records such work as an event, and writes the event's end when the work ends, on the thread that detects it.
    The receive of the next message is posted in advance, so it ends after the profiler has collected and freed its
    events: torch would write the end into freed memory.
    """
    if not profiler_is_on():
        return function(*args, **kwargs)
    record_functions(False)  # on this thread, and in callbacks that inherit its state
    try:
        return function(*args, **kwargs)
    finally:
        record_functions(True)


class Sender:
    """Sends values to one peer, in order, without waiting until they arrive.

    Args:
        group: A process group for point-to-point messages of CPU tensors.
        peer: The receiver's rank in ``group``.
        tag: Distinguishes the channel from others between the same two processes. It uses ``tag`` and ``tag + 1``.
        limit: Maximum number of sent values that have not arrived; beyond it, :meth:`send` waits for the oldest.
            ``None``: no maximum, until :meth:`flush`. (gloo reports an arrival only to a caller that waits for it, so
            the sender cannot poll.)
        wait: Runs a function that blocks until values have arrived.
    """

    def __init__(
        self, group: ProcessGroup, peer: int, *, tag: int = 0, limit: int | None = None, wait: Wait = wait_here
    ) -> None:
        self._group, self._peer, self._tag, self._limit, self._wait = group, peer, tag, limit, wait
        self._timeout = timeout_of(group)
        self._layouts: dict[bytes, int] = {}
        self._under_way: deque[list[tuple[Work, torch.Tensor]]] = deque()
        self._announced = _NOTHING_ANNOUNCED
        self._has_failed = False

    def send(self, value: Any, pass_number: int, microbatch: int, *, requires_grad: list[bool] | None = None) -> None:
        """Send ``value``. The caller must not change its tensors until they have arrived.

        Args:
            value: What to send.
            pass_number: Identifies the pass; the receiver checks it.
            microbatch: Identifies the micro-batch; the receiver checks it.
            requires_grad: For each tensor of ``value``, whether the receiver sends a gradient back; by default the
                tensor's own ``requires_grad``.
        """
        leaves, spec = tree_flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        flags = iter(requires_grad or [tensor.requires_grad for tensor in tensors])
        layout = tree_unflatten(
            [
                TensorLayout(tuple(leaf.shape), leaf.dtype, next(flags)) if isinstance(leaf, torch.Tensor) else leaf
                for leaf in leaves
            ],
            spec,
        )
        key = _pickled(layout)
        number, description = self._layouts.get(key), b""
        if number is None:
            if len(self._layouts) == _MAX_LAYOUTS:
                self._layouts.clear()  # the receiver overwrites its layouts as new ones arrive
            number = self._layouts[key] = len(self._layouts)
            description = cloudpickle.dumps(layout)
        header = [number, pass_number, microbatch, len(description), *self._announced]
        self._announced = _NOTHING_ANNOUNCED
        starts, end = _places([tensor.nbytes for tensor in tensors])
        is_small = end <= _HEADER_BYTES + _SMALL_BYTES
        message = torch.empty(end if is_small else _HEADER_BYTES, dtype=torch.uint8)
        message[:_HEADER_BYTES].view(torch.int64).copy_(torch.tensor(header))
        if is_small:
            for start, tensor in zip(starts, tensors, strict=True):
                if tensor.numel():
                    place = message[start : start + tensor.nbytes].view(tensor.dtype)
                    place.view(tensor.shape).copy_(tensor.detach())
        messages = [self._post(message, self._tag)]
        if description:
            messages.append(self._post(torch.frombuffer(bytearray(description), dtype=torch.uint8), self._tag))
        if not is_small:
            messages += [self._post(t.detach().contiguous().cpu(), self._tag + 1) for t in tensors if t.numel()]
        self._under_way.append(messages)
        if self._limit is not None:
            self.flush(self._limit)

    def announce(self, this: Announcement) -> None:
        """Announce a pass to the receiver in the header of the next value, which must be the first one of that pass."""
        self._announced = this.microbatches, this.seed

    def end_passes(self) -> None:
        """Tell the receiver, if its process still runs, that no more passes will be announced."""
        self._send_last(_END)

    def fail(self) -> None:
        """Tell the receiver, if its process still runs, that this process has failed, so that it stops waiting."""
        self._has_failed = True
        self._send_last(_FAILED)

    def _send_last(self, kind: int) -> None:
        with suppress(RuntimeError):
            self._under_way.append([self._post(torch.tensor([kind, 0, 0, 0, 0, 0]).view(torch.uint8), self._tag)])

    def release(self) -> None:
        """Drop references to sent messages, when a later message from the peer has shown that all have arrived."""
        self._wait_until(0)

    def flush(self, keep: int = 0) -> None:
        """Wait until all values but the last ``keep`` have arrived; after :meth:`fail`, return at once.

        A receiver may never receive values that were sent before a failure.
        """
        if len(self._under_way) > keep and not self._has_failed:
            self._wait(partial(self._wait_until, keep))

    def _wait_until(self, num_under_way: int) -> None:
        while len(self._under_way) > num_under_way:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        for work, _ in self._under_way.popleft():
            work.wait(self._timeout)

    def _post(self, tensor: torch.Tensor, tag: int) -> tuple[Work, torch.Tensor]:
        return unrecorded(self._group.send, [tensor], self._peer, tag), tensor


class Receiver:
    """Receives the values of one :class:`Sender`, in order.

    Args:
        group: As for the sender.
        peer: The sender's rank in ``group``.
        device: Device of the received tensors.
        tag: The sender's tag.
        wait: Runs a function that blocks until a header has arrived.
    """

    def __init__(
        self,
        group: ProcessGroup,
        peer: int,
        *,
        device: torch.device,
        tag: int = 0,
        wait: Wait = wait_here,
    ) -> None:
        self._group, self._peer, self._device, self._tag, self._wait = group, peer, device, tag, wait
        self._timeout = timeout_of(group)
        self._layouts: dict[int, _Described] = {}
        self._message = torch.empty(_HEADER_BYTES + _SMALL_BYTES, dtype=torch.uint8)
        self._posted: Work | None = None
        self._header: list[int] | None = None

    def post(self) -> None:
        """Post the receive of the next header, if it has not been posted yet."""
        if self._posted is None:
            self._posted = unrecorded(self._group.recv, [self._message], self._peer, self._tag)

    def receive(self, pass_number: int, microbatch: int) -> Any:
        """Wait for the next value, which must have the given pass and micro-batch.

        Returns:
            The value; its tensors are new, with ``requires_grad`` as the sender set it.

        Raises:
            PeerFailed: If the sender has failed.
            PeerSilent: If nothing arrived within the group's time-out.
            RuntimeError: If the sender's process has ended.
        """
        kind, *place, size_bytes, _, _ = self._next_header(self._timeout, self._wait)
        assert kind != _END, "expected a value, but got the header that ends the announcements of passes"
        assert place == [pass_number, microbatch], (
            f"expected pass and micro-batch {pass_number, microbatch}, got {place}"
        )
        if size_bytes:
            description = torch.empty(size_bytes, dtype=torch.uint8)
            unrecorded(self._group.recv, [description], self._peer, self._tag).wait(self._timeout)
            self._layouts[kind] = _Described.of(pickle.loads(description.numpy().tobytes()))
        described = self._layouts[kind]
        ahead = iter(described.starts)
        value = tree_map(lambda leaf: self._received(leaf, ahead), described.layout)
        self._header = self._posted = None
        self.post()
        return value

    def announcement(self) -> Announcement | None:
        """Wait for the next announced pass, on the calling thread and without a time-out.

        Returns:
            The pass; ``None`` if the sender announces no more.

        Raises:
            PeerFailed: If the sender has failed.
            RuntimeError: If the sender's process has ended.
        """
        kind, number, _, _, *announced = self._next_header(NO_LIMIT, wait_here)
        if kind == _END:
            self._header = self._posted = None
            self.post()
            return None
        return Announcement(number, *announced)

    def _next_header(self, timeout: timedelta, wait: Wait) -> list[int]:
        """Return the next header, which stays the next one until the caller has received the value that follows it."""
        if self._header is None:
            self.post()
            assert self._posted is not None
            try:
                wait(partial(self._posted.wait, timeout))
            except RuntimeError as error:
                if "imed out" not in str(error):
                    raise
                raise PeerSilent(f"rank {self._peer} of the pipeline sent nothing within the time-out") from error
            self._header = self._message[:_HEADER_BYTES].view(torch.int64).tolist()
        if self._header[0] == _FAILED:
            raise PeerFailed(f"rank {self._peer} of the pipeline failed")
        return self._header

    def _received(self, leaf: Any, starts: Iterator[int | None]) -> Any:
        if not isinstance(leaf, TensorLayout):
            return leaf
        start = next(starts)
        tensor = torch.empty(leaf.shape, dtype=leaf.dtype)
        if not tensor.numel():
            pass
        elif start is None:
            unrecorded(self._group.recv, [tensor], self._peer, self._tag + 1).wait(self._timeout)
        else:
            tensor.copy_(self._message[start : start + tensor.nbytes].view(leaf.dtype).view(leaf.shape))
        return tensor.to(self._device).requires_grad_(leaf.requires_grad)


@dataclass(frozen=True)
class _Described:
    """A layout, and the offset of each tensor in the header's message; ``None``: the tensor has its own message."""

    layout: Any
    starts: list[int | None]

    @classmethod
    def of(cls, layout: Any) -> "_Described":
        tensors = [leaf for leaf in tree_leaves(layout) if isinstance(leaf, TensorLayout)]
        starts, end = _places([math.prod(t.shape) * t.dtype.itemsize for t in tensors])
        return cls(layout, list(starts) if end <= _HEADER_BYTES + _SMALL_BYTES else [None] * len(tensors))
