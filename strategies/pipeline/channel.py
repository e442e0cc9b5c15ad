"""One direction of the data plane between two processes: values whose tensors travel by point-to-point messages.

A value (a tensor, or tuples, lists and dicts of tensors and other objects) travels as

    header   int64[4]: kind of the message, pass, micro-batch, size of the layout in bytes
    layout   uint8[size]: nesting, shapes, dtypes, objects that are not tensors; only if the receiver lacks it
    tensors  one message each, none for an empty one

Layouts are numbered by the sender and remembered by both sides, so that a shape is described once. Sends are
asynchronous (gloo's send waits until the peer has posted its receive, which would put two stages in lock-step), and
what is under way is kept alive until it has arrived. The receive of the next header is posted ahead.
"""

import pickle
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import cloudpickle
import torch
from torch.distributed import ProcessGroup, Work
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

_FAILED = -1
"""The header's kind that says: this process failed, nothing will follow. Other kinds are numbers of layouts."""


_MAX_LAYOUTS = 1024


Wait = Callable[[Callable[[], Any]], Any]
"""Calls a function that waits, perhaps so that the wait can be given up."""


def wait_here(wait: Callable[[], Any]) -> Any:
    """Waits in the calling thread, for as long as it takes."""
    return wait()


class PeerFailed(RuntimeError):
    """The neighbour failed and says so; its own report tells why, so this error is only a consequence."""


class PeerSilent(RuntimeError):
    """The neighbour sent nothing in time. It may hang, or wait for another one that does."""


def is_consequence(error: BaseException) -> bool:
    """Whether ``error`` only tells that another process failed or has gone."""
    return (
        isinstance(error, PeerFailed | PeerSilent)
        or "onnection closed by peer" in str(error)
        or "onnection reset" in str(error)
        or "failed to connect" in str(error)
    )


def _pickled(layout: Any) -> bytes:
    try:
        return pickle.dumps(layout)
    except Exception:  # a class of a script or a notebook, which plain pickle does not know
        return cloudpickle.dumps(layout)


@dataclass(frozen=True)
class TensorLayout:
    """Stands for a tensor in the layout of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def layouts(value: Any) -> Any:
    """The value with layouts in place of its tensors."""
    return tree_map(lambda leaf: _layout(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def with_meta_tensors(value: Any) -> Any:
    """The value with tensors on the ``meta`` device in place of layouts."""
    return tree_map(
        lambda leaf: (
            torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, TensorLayout) else leaf
        ),
        value,
    )


def _layout(tensor: torch.Tensor) -> TensorLayout:
    return TensorLayout(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def timeout_of(group: ProcessGroup) -> timedelta:
    """The group's time-out, of which gloo's sends and receives know only the one with which it connected."""
    backend: Any = group._get_backend(torch.device("cpu"))
    timeout: timedelta = backend.options._timeout
    return timeout


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
        messages = [self._post(torch.tensor([number, pass_number, microbatch, len(description)]), self._tag)]
        if description:
            messages.append(self._post(torch.frombuffer(bytearray(description), dtype=torch.uint8), self._tag))
        messages += [self._post(t.detach().contiguous().cpu(), self._tag + 1) for t in tensors if t.numel()]
        self._under_way.append(messages)
        if self._limit is not None:
            self.flush(self._limit)

    def fail(self) -> None:
        """Tells the receiver, if it is still there, that nothing will follow, so that it does not wait in vain."""
        self._has_failed = True
        with suppress(RuntimeError):
            self._under_way.append([self._post(torch.tensor([_FAILED, 0, 0, 0]), self._tag)])

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
        return self._group.send([tensor], self._peer, tag), tensor


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
        self._layouts: dict[int, Any] = {}
        self._header = torch.zeros(4, dtype=torch.int64)
        self._posted: Work | None = None

    def post(self) -> None:
        """Posts the receive of the next header, if it has not been posted yet."""
        if self._posted is None:
            self._posted = self._group.recv([self._header], self._peer, self._tag)

    def receive(self, pass_number: int, microbatch: int) -> Any:
        """Waits for the next value, which must be that of the given pass and micro-batch.

        Returns:
            The value; its tensors are new, with ``requires_grad`` as the sender set it.

        Raises:
            PeerFailed: If the sender has failed.
            PeerSilent: If nothing came within the group's time-out.
            RuntimeError: If the sender's process has gone.
        """
        self.post()
        assert self._posted is not None
        try:
            self._wait(partial(self._posted.wait, self._timeout))
        except RuntimeError as error:
            if "imed out" not in str(error):
                raise
            raise PeerSilent(f"rank {self._peer} of the pipeline sent nothing within the time-out") from error
        self._posted = None
        kind, *place, size_bytes = self._header.tolist()
        if kind == _FAILED:
            raise PeerFailed(f"rank {self._peer} of the pipeline failed")
        assert place == [pass_number, microbatch], (
            f"expected pass and micro-batch {pass_number, microbatch}, got {place}"
        )
        if size_bytes:
            description = torch.empty(size_bytes, dtype=torch.uint8)
            self._group.recv([description], self._peer, self._tag).wait(self._timeout)
            self._layouts[kind] = pickle.loads(description.numpy().tobytes())
        value = tree_map(self._receive_leaf, self._layouts[kind])
        self.post()
        return value

    def _receive_leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, TensorLayout):
            return leaf
        tensor = torch.empty(leaf.shape, dtype=leaf.dtype)
        if tensor.numel():
            self._group.recv([tensor], self._peer, self._tag + 1).wait(self._timeout)
        return tensor.to(self._device).requires_grad_(leaf.requires_grad)
