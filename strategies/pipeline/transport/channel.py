"""One direction of the data plane between two processes: values whose tensors travel by point-to-point messages.

A value (a tensor, or tuples, lists and dicts of tensors and other objects) travels as

    header   int64[6]: kind of the message, pass, micro-batch, size of the layout in bytes, and where the value is the
             first one of a pass that no command tells of, that pass's number of micro-batches and seed
    tensors  behind the header in the same message if they are small together, otherwise one message each after the
             layout; none for an empty one
    layout   uint8[size]: nesting, shapes, dtypes, objects that are not tensors; only if the receiver lacks it

Layouts are numbered by the sender and remembered by both sides, so that a shape is described once. Sends are
asynchronous (gloo's send waits until the peer has posted its receive, which would put two stages in lock-step), and
what is under way is kept alive until it has arrived. The receive of the next header is posted ahead.
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
"""Kinds of headers without a value: this process failed and sends nothing more; no more passes will be announced. Other
kinds are numbers of layouts."""

_HEADER_BYTES = 6 * 8

_SMALL_BYTES = 2**15
"""How large the tensors of a value may be to travel behind its header. A tensor in a message of its own takes one more
round trip: the receiver posts a buffer for it when it knows the layout. A header's buffer is posted ahead, and may be
larger than what arrives."""

_ALIGNMENT = 16
"""Tensors in one message start at multiples of this, the size of the largest dtype."""

_NO_LIMIT = timedelta(days=365)
"""How long a stage waits for something to do; gloo has no word for ever."""

_NOTHING_ANNOUNCED = 0, 0

_MAX_LAYOUTS = 1024


@dataclass(frozen=True)
class Announcement:
    """What a stage must know of a pass that only goes forward; see :class:`~strategies.pipeline.stage.stage.Pass`."""

    number: int
    microbatches: int
    seed: int


def _pickled(layout: Any) -> bytes:
    try:
        return pickle.dumps(layout)
    except Exception:  # a class of a script or a notebook, which plain pickle does not know
        return cloudpickle.dumps(layout)


def _places(sizes_bytes: Iterable[int]) -> tuple[list[int], int]:
    """Where tensors of these sizes start in a message with a header, and where the last one ends."""
    starts, end = [], _HEADER_BYTES
    for size_bytes in sizes_bytes:
        starts.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = starts[-1] + size_bytes
    return starts, end


def unrecorded(function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
    """Call a function that starts to send or to receive, without an event of torch's profiler.

    torch gives such work an event that ends when the work does, on whichever thread notices that. The receive of the
    next message is posted ahead, so it ends after the profiler has collected and freed its events: torch would write
    the end into freed memory.
    """
    if not profiler_is_on():
        return function(*args, **kwargs)
    record_functions(False)  # for this thread, and for callbacks that inherit its state
    try:
        return function(*args, **kwargs)
    finally:
        record_functions(True)


class Sender:
    """Sends values to one peer, in order, without waiting for them.

    Args:
        group: A point-to-point group that works on CPU tensors.
        peer: The receiver's rank in ``group``.
        tag: Distinguishes the channel from others between the same two processes; ``tag`` and ``tag + 1`` are used.
        limit: How many values may be under way; :meth:`send` then waits for the oldest. ``None``: any number, until
            :meth:`flush`. (gloo tells that a send has arrived only to who waits for it, so there is no polling.)
        wait: Calls what waits for values to arrive.
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
        """Sends ``value``; its tensors must not be changed until they have arrived.

        Args:
            value: What to send.
            pass_number: Identifies the pass; the receiver checks it.
            microbatch: Identifies the micro-batch; the receiver checks it.
            requires_grad: For each tensor of ``value``, whether the receiver sends a gradient back; by default what the
                tensors themselves say.
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
                self._layouts.clear()  # the receiver overwrites what it knows as new descriptions come
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
        """Tells the receiver of a pass, along with the first value of it, which must be sent next."""
        self._announced = this.microbatches, this.seed

    def end_passes(self) -> None:
        """Tells the receiver, if it is still there, that no more passes will be announced."""
        self._send_last(_END)

    def fail(self) -> None:
        """Tells the receiver, if it is still there, that nothing will follow, so that it does not wait in vain."""
        self._has_failed = True
        self._send_last(_FAILED)

    def _send_last(self, kind: int) -> None:
        with suppress(RuntimeError):
            self._under_way.append([self._post(torch.tensor([kind, 0, 0, 0, 0, 0]).view(torch.uint8), self._tag)])

    def release(self) -> None:
        """Lets go of everything sent; for when it has arrived, as what the peer has sent since then shows."""
        self._wait_until(0)

    def flush(self, keep: int = 0) -> None:
        """Waits until everything has arrived but for the last ``keep`` values; after a failure nobody may take them."""
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
        device: Where received tensors are put.
        tag: The sender's tag.
        wait: Calls what waits for a header to arrive.
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
        """Posts the receive of the next header, if it has not been posted yet."""
        if self._posted is None:
            self._posted = unrecorded(self._group.recv, [self._message], self._peer, self._tag)

    def receive(self, pass_number: int, microbatch: int) -> Any:
        """Waits for the next value, which must be that of the given pass and micro-batch.

        Returns:
            The value; its tensors are new, with ``requires_grad`` as the sender set it.

        Raises:
            PeerFailed: If the sender has failed.
            PeerSilent: If nothing came within the group's time-out.
            RuntimeError: If the sender's process has gone.
        """
        kind, *place, size_bytes, _, _ = self._next_header(self._timeout, self._wait)
        assert kind != _END, "expected a value, but the sender announces passes, and has no more"
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
        """Waits for the next pass, in the calling thread and for as long as it takes.

        Returns:
            The pass; ``None`` if no more follow.

        Raises:
            PeerFailed: If the sender has failed.
            RuntimeError: If the sender's process has gone.
        """
        kind, number, _, _, *announced = self._next_header(_NO_LIMIT, wait_here)
        if kind == _END:
            self._header = self._posted = None
            self.post()
            return None
        return Announcement(number, *announced)

    def _next_header(self, timeout: timedelta, wait: Wait) -> list[int]:
        """Waits for the next header, unless it has been read; what stands behind it is still to be taken."""
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
    """A layout, and where each of its tensors starts in the message of the header; ``None``: in one of its own."""

    layout: Any
    starts: list[int | None]

    @classmethod
    def of(cls, layout: Any) -> "_Described":
        tensors = [leaf for leaf in tree_leaves(layout) if isinstance(leaf, TensorLayout)]
        starts, end = _places([math.prod(t.shape) * t.dtype.itemsize for t in tensors])
        return cls(layout, list(starts) if end <= _HEADER_BYTES + _SMALL_BYTES else [None] * len(tensors))
