"""The link of two processes: nested values on several channels, as point-to-point messages in one order.

    channel 3 ── Sender ──┐                        ┌── Receiver ──▶ takes values in the order of its row
    channel 4 ── Sender ──┼──▶ Link ═════▶ Link ───┤
    orders    ── Sender ──┘     in order           └── Receiver     keeps what arrives before it is taken

A channel carries one kind of values in one direction: the driver's orders, the gradients and values of tied parameters,
or the activations or gradients of an edge. If a process takes a value of one channel while values of other channels
come first, the receivers of these channels keep them.

A value is a tensor, or a nesting of tuples, lists and dicts of tensors and other objects. The sender sends it as

    header   48 bytes: number of the layout, channel, pass, micro-batch, size of the layout in bytes (int64), padding
    tensors  in the same message as the header if they are small together, otherwise one message each after the
             layout; an empty tensor is not sent
    layout   uint8[size]: nesting, shapes, dtypes, objects that are not tensors; only if the receiver lacks it

Headers have one tag and all other messages have another tag, so that the receives of the next headers can be posted in
advance.

The sender numbers layouts and both sides keep them, so each layout is sent once. Sends are asynchronous, because
gloo's send waits until the peer has posted its receive, which would make two stages run in lock-step. The sender keeps
a reference to each message until the message has arrived.

For a value with few small tensors, Python and tensor operators take most of the time. Both sides therefore keep, with
each layout, the views of their messages to which or from which the tensors are copied.
"""

import math
import os
import pickle
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

import cloudpickle
import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from strategies.common.errors import PeerFailed, PeerSilent
from strategies.common.torch_compat import (
    TreeSpec,
    cpu_backend,
    profiler_is_on,
    set_profiler_events,
    timeout_of,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from strategies.common.trees import TensorLayout, layouts
from strategies.common.waiting import Wait, wait_here

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Marker = TypeVar("Marker")

ORDERS, TIED_GRADIENTS, TIED_VALUES, FIRST_EDGE = range(4)
"""The channels of a link: the driver's orders, gradients and values of tied parameters, and the values of each edge e,
which have the number ``FIRST_EDGE + e``: activations in one direction, gradients in the other."""

_HEADER_TAG, _CONTENT_TAG, _UNUSED_TAG = range(3)

_FAILED = -1
"""Kind of a header without a value: the sender's process has failed and sends nothing more on the channel. Any other
kind is the number of a layout."""

_NOTHING = -2
"""Marks a buffer in which no header has arrived yet, in place of the kind of a header."""

_HEADER, _KIND = struct.Struct("=5q8x"), struct.Struct("=q")  # padded, so that tensors directly follow it

SMALL_BYTES = 2**18
"""Maximum total size of tensors that are sent in the message of their header. A tensor in a separate message takes one
more round trip, because the receiver posts a buffer for it after it has received the layout. The buffer for the
header's message is posted in advance, and may be larger than the message."""

_ALIGNMENT = 16
"""Tensors in a message start at multiples of this number of bytes, the size of the largest dtype."""

_NUM_POSTED = 8
"""Number of posted receives of headers. For a message without a posted receive, the event loops of both processes must
first exchange notifications."""

_MAX_LOOKS = 16
"""How often a receiver polls for a message before it sleeps: for about 25 microseconds, which is no longer than the
operating system takes to wake a sleeping thread."""

_FREE_BYTES = 2**21
"""Total size below which values in transit need no other bound; also of the sent messages that are kept for reuse."""

MAX_UNDER_WAY = 64
"""Maximum number of values in transit whose tensors have been copied, so that no thread must wait for their arrival."""

NO_LIMIT = timedelta(days=365)
"""Time-out of a stage that waits for its next order or for its values; gloo cannot wait without a time-out."""

_MAX_LAYOUTS = 1024

_MAX_VIEWED = 16
"""Maximum number of layouts for which the memory of a message keeps views."""

_let_others_run: Callable[[], None] = getattr(os, "sched_yield", partial(time.sleep, 0))

_VALUES = frozenset([type(None), bool, int, str, bytes])
"""Types whose objects are interchangeable if they are equal and have exactly the same type."""


# Nested values, without the several microseconds that a pytree takes for each node


class Unusual(Exception):
    """Raised if a structure has parts that :func:`structure_of` cannot describe."""


def structure_of(value: Any, describe: Callable[[Tensor], Any]) -> tuple[Any, ...]:
    """Return a hashable description of ``value``, which differs for values that differ in more than their tensors.

    Args:
        value: The value.
        describe: Called for each tensor, in the order of leaves of a pytree; returns its description.

    Raises:
        Unusual: If the value has parts other than tensors, tuples, lists, dicts and plain values.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return kind, *[structure_of(part, describe) for part in value]
    if kind in _VALUES:
        return kind, value
    if isinstance(value, Tensor):
        return kind, describe(value)
    if kind is float:
        return kind, struct.pack("d", value)  # -0.0 equals 0.0, and no NaN equals any
    if kind is dict and all(type(key) in _VALUES for key in value):
        keys = [(type(key), key) for key in value]
        return kind, *keys, *[structure_of(part, describe) for part in value.values()]
    raise Unusual


def filled(template: Any, kind: type[Marker], value_of: Callable[[Marker], Any]) -> Any:
    """Return a nested structure with values in place of markers.

    Args:
        template: The structure.
        kind: The class of the markers, which has no subclasses.
        value_of: Returns the value of a marker.
    """
    own = type(template)
    if own is kind:
        return value_of(template)
    if own is tuple:
        return tuple([filled(part, kind, value_of) for part in template])
    if own is list:
        return [filled(part, kind, value_of) for part in template]
    if own is dict:
        return {key: filled(part, kind, value_of) for key, part in template.items()}
    if own in _VALUES or own is float:
        return template
    return tree_map(
        lambda leaf: value_of(leaf) if isinstance(leaf, kind) else leaf,
        template,
        is_leaf=lambda node: isinstance(node, kind),
    )


def _pickled(layout: Any) -> bytes:
    try:
        return pickle.dumps(layout)
    except Exception:  # a class defined in a script or a notebook, which pickle cannot import
        return cloudpickle.dumps(layout)


def _places(sizes_bytes: Iterable[int]) -> tuple[list[int], int]:
    """Return the offsets of tensors of these sizes in a message with a header, and the end of the last tensor."""
    starts, end = [], _HEADER.size
    for size_bytes in sizes_bytes:
        starts.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = starts[-1] + size_bytes
    return starts, end


def unprofiled(function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
    """Call a function that starts a send or a receive, without an event of torch's profiler.

    torch records such work as an event, and writes the event's end when the work ends, on the thread that detects it.
    The receives of the next messages are posted in advance, so they end after the profiler has collected and freed its
    events: torch would write the end into freed memory.
    """
    if not profiler_is_on():
        return function(*args, **kwargs)
    set_profiler_events(False)  # on this thread, and in callbacks that inherit its state
    try:
        return function(*args, **kwargs)
    finally:
        set_profiler_events(True)


class Layout:
    """A layout, and the offsets of its tensors in the message of the header.

    Args:
        tree: A value, or the list of its leaves, with a :class:`TensorLayout` in place of each tensor.
        spec: The structure of the value if ``tree`` is the list of its leaves, otherwise ``None``. Only a structure of
            tuples, lists and dicts can hold layouts: a ``PackedSequence``, for example, can only hold tensors.
        small_bytes: Maximum size of all tensors that are in the message of the header.
    """

    def __init__(self, tree: Any, spec: TreeSpec | None, small_bytes: int) -> None:
        self._tree, self._spec = tree, spec
        self.tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, TensorLayout)]
        self._sizes = [math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in self.tensors]
        self._starts, end = _places(self._sizes)
        self.is_small = end <= _HEADER.size + small_bytes
        """Whether the tensors are in the message of the header."""
        self.message_bytes = end if self.is_small else _HEADER.size
        """Size of the message of the header."""
        self.total_bytes = end
        self.has_gradients = any(tensor.requires_grad for tensor in self.tensors)
        """Whether the receiver returns gradients."""

    def places(self, message: Tensor) -> list[Tensor]:
        """Return the tensors of a value as views of the message of its header, if they are small."""
        if not self.is_small:
            return []
        return [
            message[start : start + size].view(tensor.dtype).view(tensor.shape)
            if size
            else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            for start, size, tensor in zip(self._starts, self._sizes, self.tensors, strict=True)
        ]

    def filled(self, tensors: Iterable[Tensor]) -> Any:
        """Return a value of this layout that consists of these tensors."""
        ahead = iter(tensors)
        value = filled(self._tree, TensorLayout, lambda _: next(ahead))
        return value if self._spec is None else tree_unflatten(value, self._spec)


class _Buffer:
    """Memory for a header and for tensors behind it."""

    def __init__(self, size_bytes: int) -> None:
        with torch.inference_mode(False):  # the memory is reused, perhaps in another mode
            self.tensor = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        self._bytes = self.tensor.numpy().data
        self.views: dict[Layout, list[Tensor]] = {}
        """For layouts of values that have been in this memory, the tensors as views."""

    def write_header(self, kind: int, *rest: int) -> None:
        """Write a header."""
        _HEADER.pack_into(self._bytes, 0, kind, *rest)

    def header(self) -> tuple[int, ...]:
        """Return the header."""
        return _HEADER.unpack_from(self._bytes)

    def clear(self) -> None:
        """Prepare for :attr:`has_begun`."""
        _KIND.pack_into(self._bytes, 0, _NOTHING)

    @property
    def has_begun(self) -> bool:
        """Whether a message has arrived since :meth:`clear`, at least its first bytes."""
        kind: int = _KIND.unpack_from(self._bytes)[0]
        return kind != _NOTHING

    def places(self, layout: Layout) -> list[Tensor]:
        """Return the places of the tensors of a value, as views of this memory."""
        places = self.views.get(layout)
        if places is None:
            if len(self.views) == _MAX_VIEWED:
                self.views.clear()
            with torch.inference_mode(False):
                places = self.views[layout] = layout.places(self.tensor)
        return places


@dataclass(frozen=True)
class _Numbered:
    """A layout that the receiver knows by a number, and the memory of arrived messages, for reuse."""

    number: int
    layout: Layout
    free: list[_Buffer]


class Transfer(Protocol):
    """A transfer of tensors between two devices. It keeps the memory of the tensors alive."""

    def wait(self) -> None:
        """Make later computation of this thread wait until the transfer has run."""

    def synchronize(self) -> None:
        """Block until the transfer has run."""

    @property
    def is_over(self) -> bool:
        """Whether the transfer has run, or has been given up, as far as is known without waiting."""


@dataclass(frozen=True)
class Sent:
    """A value in transit: its sends, the memory that gloo reads, and its layout if its message may be reused.

    Tensors of the device plane have a separate ``transfer``.
    """

    works: list[Work]
    message: _Buffer
    contents: Sequence[Tensor] = ()
    of: _Numbered | None = None
    transfer: Transfer | None = None


_Value = tuple[tuple[int, int], Layout, list[Tensor] | None]
"""A value that has arrived: its pass and micro-batch, its layout, and its tensors, unless a device plane carries
them."""


@dataclass
class _Arrivals:
    """The receiving end of a channel.

    Attributes:
        device: The device of received tensors.
        small_bytes: As for the sender.
        has_content: Whether tensors that are not small follow their header on the link.
        layouts: The layouts so far, by number.
        early: Values that came before a value of another channel that was taken first.
        has_failed: Whether the sender has failed.
    """

    device: torch.device
    small_bytes: int
    has_content: bool
    layouts: dict[int, Layout] = field(default_factory=dict)
    early: deque[_Value] = field(default_factory=deque)
    has_failed: bool = False


class Link:
    """The connection of this process with one other process. It delivers messages in the order in which they are sent.

    One thread at a time receives. Several threads may send.

    Args:
        group: A process group for point-to-point messages of CPU tensors.
        peer: The rank of the other process in ``group``.
    """

    def __init__(self, group: ProcessGroup, peer: int) -> None:
        backend = cpu_backend(group)
        self._send, self._recv, self.peer, self.timeout = backend.send, backend.recv, peer, timeout_of(group)
        self._lock = threading.Lock()
        self._arrivals: dict[int, _Arrivals] = {}
        self._posted: deque[tuple[_Buffer, Work]] = deque()
        self._free: list[_Buffer] = []
        self._header: tuple[int, ...] | None = None
        self._num_looks = _MAX_LOOKS
        self._unreadable = ""
        """The error with which reading a message has failed."""

    def send(self, message: Tensor, contents: Sequence[Tensor] = ()) -> list[Work]:
        """Start to send a message with a header, and the contents that follow it."""
        with self._lock:  # a thread of the user may send an order at any time, to read a value
            works = [unprofiled(self._send, [message], self.peer, _HEADER_TAG)]
            works += [unprofiled(self._send, [content], self.peer, _CONTENT_TAG) for content in contents]
        return works

    def send_memory(self, memory: Tensor) -> Work:
        """Start to send memory that the peer expects, without a header; see :meth:`receive_memory`."""
        return unprofiled(self._send, [memory], self.peer, _CONTENT_TAG)

    def receive_memory(self, memory: Tensor) -> Work:
        """Start to receive into memory."""
        return unprofiled(self._recv, [memory], self.peer, _CONTENT_TAG)

    def close_group(self) -> None:
        """Close the connections with all processes of the group, unless this one is closed. Any thread may call this.

        Waits for messages of which no part has been transferred then fail. Work of gloo cannot be aborted, but if a
        wait takes too long, gloo closes the connections of the group.
        """
        memory = torch.empty(1, device="cpu")
        with suppress(RuntimeError):  # the time-out, or the connection is closed
            unprofiled(self._recv, [memory], self.peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))

    def open(self, channel: int, arrivals: _Arrivals) -> None:
        """Let values of a channel arrive."""
        self._arrivals[channel] = arrivals

    def take(self, channel: int, wait: Wait, timeout: timedelta) -> _Value:
        """Wait for the next value of a channel, and keep the values of other channels that come before it.

        Args:
            channel: The channel.
            wait: Runs a function that blocks until a header has arrived.
            timeout: Time limit of the wait for a header.

        Raises:
            PeerFailed: If the sender has failed.
            PeerSilent: If nothing arrived within the time limit.
            RuntimeError: If the sender's process has ended.
        """
        wanted = self._arrivals[channel]
        if wanted.early:
            return wanted.early.popleft()
        while not wanted.has_failed:
            kind, of, number, microbatch, size_bytes = self._next_header(wait, timeout)
            arrivals = wanted if of == channel else self._arrivals[of]
            if kind == _FAILED:
                arrivals.has_failed = True
                self._end_message()
                continue
            try:
                if arrivals is wanted:
                    layout, tensors = self._read(arrivals, kind, size_bytes)
                else:
                    with torch.inference_mode(False):  # the receiver may take the value in another mode
                        layout, tensors = self._read(arrivals, kind, size_bytes)
            except BaseException as error:  # the rest of the message may still arrive
                self._unreadable = f"{type(error).__name__}: {error}"
                raise
            value = (number, microbatch), layout, tensors
            self._end_message()
            if arrivals is wanted:
                return value
            arrivals.early.append(value)
        raise PeerFailed(f"rank {self.peer} of the pipeline failed")

    @property
    def has_failed_peer(self) -> bool:
        """Whether the peer has failed, as far as is known without waiting. Any thread may ask."""
        if any(arrivals.has_failed for arrivals in list(self._arrivals.values())):
            return True
        return any(message.has_begun and message.header()[0] == _FAILED for message, _ in list(self._posted))

    def post(self) -> None:
        """Post missing receives of the next headers."""
        while len(self._posted) < _NUM_POSTED:
            message = self._free.pop() if self._free else _Buffer(_HEADER.size + SMALL_BYTES)
            message.clear()
            try:
                work = unprofiled(self._recv, [message.tensor], self.peer, _HEADER_TAG)
            except RuntimeError:  # the peer's process has ended, but its last messages may have arrived
                if not self._posted:
                    raise
                self._free.append(message)
                return
            self._posted.append((message, work))

    def _next_header(self, wait: Wait, timeout: timedelta) -> tuple[int, ...]:
        """Return the next header. It stays the next header until :meth:`_end_message`."""
        if self._unreadable:
            raise RuntimeError(
                f"a message of rank {self.peer} could not be read, so no later one can: {self._unreadable}"
            )
        if self._header is None:
            self.post()
            message, work = self._posted[0]
            try:
                if message.has_begun or self._begins_soon(message):
                    work.wait(timeout)  # returns immediately, since gloo is writing the rest
                else:
                    wait(partial(work.wait, timeout))
            except RuntimeError as error:
                if "imed out" not in str(error):
                    raise
                raise PeerSilent(f"rank {self.peer} of the pipeline sent nothing within the time-out") from error
            self._header = message.header()
        return self._header

    def _begins_soon(self, message: _Buffer) -> bool:
        """Poll for a message for a short time, which is longer if polling has often succeeded before."""
        for _ in range(self._num_looks):
            _let_others_run()
            if message.has_begun:
                self._num_looks = min(2 * self._num_looks, _MAX_LOOKS)
                return True
        self._num_looks = max(self._num_looks // 2, 1)
        return False

    def _end_message(self) -> None:
        """Post the memory of the message with the current header again."""
        self._header = None
        self._free.append(self._posted.popleft()[0])
        self.post()

    def _read(self, arrivals: _Arrivals, kind: int, size_bytes: int) -> tuple[Layout, list[Tensor] | None]:
        """Return the layout and the tensors of the message with the current header."""
        if size_bytes:
            self._receive_layout(arrivals, kind, size_bytes)
        layout = arrivals.layouts[kind]
        if layout.is_small:
            return layout, self._arrived(layout, arrivals.device)
        return layout, self._received(layout, arrivals.device) if arrivals.has_content else None

    def _receive_layout(self, arrivals: _Arrivals, number: int, size_bytes: int) -> None:
        description = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        self.receive_memory(description).wait(self.timeout)
        tree, spec = pickle.loads(description.numpy().tobytes())
        arrivals.layouts[number] = Layout(tree, spec, arrivals.small_bytes)

    def _arrived(self, layout: Layout, device: torch.device) -> list[Tensor]:
        """Copy the tensors out of the message with the current header."""
        places = self._posted[0][0].places(layout)
        return [place.clone() if device.type == "cpu" else place.to(device) for place in places]

    def _received(self, layout: Layout, device: torch.device) -> list[Tensor]:
        """Receive the tensors, each in a separate message."""
        pins = device.type == "cuda"
        tensors = [
            torch.empty(described.shape, dtype=described.dtype, device="cpu", pin_memory=pins)
            for described in layout.tensors
        ]
        works = [self.receive_memory(tensor) for tensor in tensors if tensor.numel()]
        for work in works:
            work.wait(self.timeout)
        return [tensor.to(device, non_blocking=pins) for tensor in tensors]


class Links(dict[int, Link]):
    """The links of this process, by the rank of the other process. A link is made when it is first needed.

    Args:
        group: Connects the processes over gloo.
    """

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def __missing__(self, peer: int) -> Link:
        link = self[peer] = Link(self.group, peer)
        return link


class Sender:
    """Sends values on one channel, in order, without waiting until they arrive.

    Args:
        link: The link with the receiver's process.
        channel: The number of the channel.
        wait: Runs a function that blocks until values have arrived.
    """

    small_bytes = SMALL_BYTES
    """Maximum size of all tensors of a value that are sent in the message of its header."""

    def __init__(self, link: Link, channel: int, *, wait: Wait = wait_here) -> None:
        self._link, self._channel, self._wait = link, channel, wait
        self._known: dict[Any, _Numbered] = {}
        self._free_bytes = self._bytes_under_way = self._num_not_copied = 0
        self._under_way: deque[Sent] = deque()
        self._has_failed = False

    def send(self, value: Any, pass_number: int, microbatch: int, *, keep: int | None = None) -> bool:
        """Send ``value``. The caller must not change its tensors until they have arrived.

        Args:
            value: What to send.
            pass_number: Identifies the pass; the receiver checks it.
            microbatch: Identifies the micro-batch; the receiver checks it.
            keep: Calls :meth:`flush` with this number afterwards; ``None`` for no call. (gloo reports an arrival only
                to a caller that waits for it, so the sender cannot poll.)

        Returns:
            Whether a tensor requires a gradient, which the receiver will return.
        """
        known, tensors, description = self._look_up(value)
        layout, message = known.layout, self._message(known)
        message.write_header(known.number, self._channel, pass_number, microbatch, len(description))
        for place, tensor in zip(message.places(layout), tensors, strict=layout.is_small):
            place.copy_(tensor.detach() if tensor.requires_grad else tensor)
        contents = [as_message(description)] if description else []
        if not layout.is_small:
            contents += [_in_order(tensor) for tensor in tensors if tensor.numel()]
        self._under_way.append(Sent(self._link.send(message.tensor, contents), message, contents, known))
        self._bytes_under_way += layout.total_bytes
        self._num_not_copied += not layout.is_small
        if keep is not None:
            self.flush(keep)
        return layout.has_gradients

    def fail(self) -> None:
        """Notify the receiver, if its process still runs, that this process has failed, so that it stops waiting."""
        self._has_failed = True
        message = _Buffer(_HEADER.size)
        message.write_header(_FAILED, self._channel, 0, 0, 0)
        with suppress(RuntimeError):
            self._under_way.append(Sent(self._link.send(message.tensor), message))

    def release(self, keep: int = 0) -> None:
        """Drop references to all sent values but the last ``keep``. Call this when they are known to have arrived."""
        self._wait_until(keep)

    def flush(self, keep: int = 0) -> None:
        """Bound what is under way.

        If more than 64 values or 2 MiB are under way, wait until all but the last ``keep`` have arrived. With
        ``keep=0``, wait until the caller may change all tensors; small ones have been copied, and need no wait. After
        :meth:`fail`, return immediately: the receiver may never receive values that were sent before a failure.
        """
        if len(self._under_way) <= keep or self._has_failed:
            return
        must_wait = self._num_not_copied > 0 and not keep
        if must_wait or len(self._under_way) > MAX_UNDER_WAY or self._bytes_under_way > _FREE_BYTES:
            self._wait(partial(self._wait_until, keep))

    def _wait_until(self, num_under_way: int) -> None:
        while len(self._under_way) > num_under_way:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        sent = self._under_way.popleft()
        for work in sent.works:
            work.wait(self._link.timeout)
        if sent.of is None:
            return
        layout = sent.of.layout
        self._bytes_under_way -= layout.total_bytes
        self._num_not_copied -= not layout.is_small
        self._free_bytes += layout.message_bytes
        if self._free_bytes > _FREE_BYTES:
            self._free_bytes = layout.message_bytes
            for known in self._known.values():
                known.free.clear()
        sent.of.free.append(sent.message)

    def _message(self, known: _Numbered) -> _Buffer:
        """Return memory for a value of a layout."""
        if not known.free:
            return _Buffer(known.layout.message_bytes)
        self._free_bytes -= known.layout.message_bytes
        return known.free.pop()

    def _look_up(self, value: Any) -> tuple[_Numbered, list[Tensor], bytes]:
        """Return the layout of a value, the tensors, and the pickled layout if the receiver lacks it."""
        tensors: list[Tensor] = []
        key: Any
        spec = None

        def describe(tensor: Tensor) -> tuple[torch.Size, torch.dtype, bool]:
            tensors.append(tensor)
            return tensor.shape, tensor.dtype, tensor.requires_grad

        try:
            key = structure_of(value, describe)
        except Unusual:
            value, spec = tree_flatten(value)
            tensors = [leaf for leaf in value if isinstance(leaf, Tensor)]
            key = _pickled((layouts(value), spec))
        known = self._known.get(key)
        if known is not None:
            return known, tensors, b""
        if len(self._known) == _MAX_LAYOUTS:
            self._known.clear()  # the receiver overwrites its layouts when new layouts arrive
            self._free_bytes = 0
        tree = layouts(value)
        known = self._known[key] = _Numbered(len(self._known), Layout(tree, spec, self.small_bytes), [])
        return known, tensors, cloudpickle.dumps((tree, spec))


def as_message(description: bytes) -> Tensor:
    """Return a layout as the tensor that is sent."""
    return torch.frombuffer(bytearray(description), dtype=torch.uint8)


def _in_order(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor contiguously on the CPU, as gloo sends them.

    A GPU copies to pinned memory at full speed, and torch caches such memory for the next value.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if tensor.device.type != "cuda":
        return tensor.cpu()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(tensor)


class Arriving(Protocol):
    """A value whose receive has begun."""

    def value(self) -> Any:
        """Return the value. The computation that uses it waits until it has arrived."""


@dataclass(frozen=True)
class Arrived:
    """A value that has arrived.

    Attributes:
        known: The value.
    """

    known: Any

    def value(self) -> Any:
        return self.known


class Receiver:
    """Takes the values of one :class:`Sender`, in order.

    Args:
        link: The link with the sender's process.
        channel: The sender's channel.
        device: Device of the received tensors.
        wait: Runs a function that blocks until a header has arrived.
        timeout: Time limit of the wait for a header; by default that of the link.
    """

    small_bytes = SMALL_BYTES
    """As for the sender."""
    has_content = True
    """Whether the link carries tensors that are not small."""

    def __init__(
        self,
        link: Link,
        channel: int,
        *,
        device: torch.device,
        wait: Wait = wait_here,
        timeout: timedelta | None = None,
    ) -> None:
        self._link, self._channel, self._device, self._wait = link, channel, device, wait
        self._timeout = link.timeout if timeout is None else timeout
        link.open(channel, _Arrivals(device, self.small_bytes, self.has_content))

    def begin(self, pass_number: int, microbatch: int) -> Arriving:
        """Begin to receive the next value, which must have the given pass and micro-batch. This class waits for it.

        For the errors see :meth:`receive`.
        """
        return Arrived(self.receive(pass_number, microbatch))

    def receive(self, pass_number: int, microbatch: int) -> Any:
        """Wait for the next value, which must have the given pass and micro-batch.

        Returns:
            The value; its tensors are new, with ``requires_grad`` as the sender set it.

        Raises:
            PeerFailed: If the sender has failed.
            PeerSilent: If nothing arrived within the time limit.
            RuntimeError: If the sender's process has ended.
        """
        layout, tensors = self._next(pass_number, microbatch)
        assert tensors is not None
        for tensor, described in zip(tensors, layout.tensors, strict=True):
            if described.requires_grad:
                tensor.requires_grad_()
        return layout.filled(tensors)

    def _next(self, pass_number: int, microbatch: int) -> tuple[Layout, list[Tensor] | None]:
        """Wait for the next value, and return its layout and its tensors. For the errors see :meth:`receive`."""
        place, layout, tensors = self._link.take(self._channel, self._wait, self._timeout)
        assert place == (pass_number, microbatch), (
            f"expected pass and micro-batch {pass_number, microbatch}, got {place}"
        )
        return layout, tensors
