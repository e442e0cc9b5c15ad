"""The connections between chunks: within this process, and this process's ends of connections to other processes.

Edge e leads to chunk e. Edge 0 comes from the driver's code, and the last edge returns to it::

    driver's code ──edge 0──▶ chunk 0 ──edge 1──▶ chunk 1 ──edge 2──▶ driver's code

If there are several lists of layers, the edge to the first chunk of a list comes from the driver's code. The last chunk
of the list before it is on the driver, and shares the mailboxes of this edge with the code: passes differ.

Values are sent in the direction of the arrows, gradients in the opposite direction. Each end of an edge has a
:class:`Mailbox` for values and one for gradients. If both ends are in one process, they share these mailboxes. Between
two processes, the sends and receives in the rows move the content of the mailboxes::

    chunk ──▶ mailbox ── SEND ──▶ channel ──▶ RECV ──▶ mailbox ──▶ chunk of another process
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from strategies.common.torch_compat import TreeSpec, tree_flatten, tree_unflatten
from strategies.pipeline.schedule.operations import Edge, Post
from strategies.pipeline.stage.passes import Pass
from strategies.pipeline.transport.interface import InChannel, OutChannel, Transport
from strategies.pipeline.transport.link import FIRST_EDGE, Arriving

_ALONE, _WITHOUT_SKIPS = tree_flatten(0)[1], tree_flatten((0, {}))[1]
_LISTS = [tree_flatten([0] * length)[1] for length in range(9)]


def leaves_of(value: Any) -> tuple[list[Any], TreeSpec]:
    """A faster ``tree_flatten``, which takes several microseconds per node.

    The most frequent values of stages have a fast path: a tensor, a tensor without skips, and short lists of tensors.
    """
    kind = type(value)
    if kind is Tensor:
        return [value], _ALONE
    if kind is tuple and len(value) == 2 and type(value[0]) is Tensor and type(value[1]) is dict and not value[1]:
        return [value[0]], _WITHOUT_SKIPS
    if kind is list and len(value) < len(_LISTS) and all(type(leaf) is Tensor or leaf is None for leaf in value):
        return list(value), _LISTS[len(value)]
    return tree_flatten(value)


def with_leaves(leaves: list[Any], spec: TreeSpec) -> Any:
    """A faster ``tree_unflatten``, for the result of :func:`leaves_of`."""
    if spec is _ALONE:
        return leaves[0]
    if spec is _WITHOUT_SKIPS:
        return leaves[0], {}
    return tree_unflatten(leaves, spec)


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in ``value``, in the order of its leaves."""
    return [leaf for leaf in leaves_of(value)[0] if isinstance(leaf, Tensor)]


class Mailbox:
    """Holds values, by pass and micro-batch, until they are taken out.

    Args:
        copies: Whether the receiver gets copies of tensors, which it may change in place.
        device: The device of the receiver, to which tensors are moved; ``None`` if they need not be moved.
    """

    def __init__(self, *, copies: bool = False, device: torch.device | None = None) -> None:
        self._copies, self._device = copies, device
        self._values: dict[tuple[int, int], Any] = {}
        self._arriving: dict[tuple[int, int], Arriving] = {}

    def send(self, value: Any, number: int, m: int, *, requires_grad: list[bool] | None = None) -> None:
        """Put in a value, detached.

        Args:
            value: The value.
            number: The pass.
            m: The micro-batch.
            requires_grad: For each tensor, whether the receiver returns a gradient; by default its ``requires_grad``.
        """
        leaves, spec = leaves_of(value)
        flags = iter(requires_grad or [leaf.requires_grad for leaf in leaves if isinstance(leaf, Tensor)])
        own = [self._own(leaf).requires_grad_(next(flags)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._values[number, m] = with_leaves(own, spec)

    def put(self, value: Any, number: int, m: int) -> None:
        """Put in a value unchanged, with its graph."""
        self._values[number, m] = value

    def expect(self, arriving: Arriving, number: int, m: int) -> None:
        """Put in a value whose receive has begun."""
        self._arriving[number, m] = arriving

    def has(self, number: int, m: int) -> bool:
        """Return whether a value has been put in."""
        return (number, m) in self._values

    def receive(self, number: int, m: int) -> Any:
        """Take a value out."""
        arriving = self._arriving.pop((number, m), None)
        value = self._values.pop((number, m)) if arriving is None else arriving.value()
        return value if self._device is None else _moved(value, self._device)

    def discard(self, number: int) -> None:
        """Drop the values of a pass. The garbage collector may call this at any time."""
        for kept in (self._values, self._arriving):
            for key in list(kept):  # a copy, which CPython makes without switching threads
                if key[0] == number:
                    kept.pop(key, None)

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone() if self._copies else tensor.detach()


def _moved(value: Any, device: torch.device) -> Any:
    leaves, spec = leaves_of(value)
    moved = [
        leaf.detach().to(device).requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
    return with_leaves(moved, spec)


@dataclass(frozen=True)
class Ports:
    """The four ports of a :class:`~strategies.pipeline.stage.stage.Chunk`."""

    inputs: Mailbox
    outputs: Mailbox
    output_grads: Mailbox
    input_grads: Mailbox


class Edges:
    """One process's ends of the edges of a pipeline.

    Args:
        rank: The rank of this process. The driver has the last rank.
        rank_of: The rank of the process of each chunk.
        transport: Opens channels to other processes; ``None`` if there are none.
        devices: The device of each chunk of this process, if there are several devices.
        firsts: The first chunk of each list of layers.

    Attributes:
        firsts: The edges over which the driver's code sends inputs.
        mail: The mailboxes of this process, by kind and number of the edge.
        waits_in_receives: Whether a receive returns when the value has arrived. Otherwise the computation waits for it.
        waits_for_receivers: Whether :meth:`end` may wait until another process receives.
    """

    def __init__(
        self,
        rank: int,
        rank_of: Sequence[int],
        transport: Transport | None,
        devices: Mapping[int, torch.device] | None = None,
        firsts: Sequence[int] = (0,),
    ) -> None:
        self.firsts = frozenset(firsts)
        on = devices or {}
        driver = rank_of[-1]
        ends = [driver, *rank_of, driver]
        self.rank, self.rank_of, self.transport = rank, tuple(rank_of), transport
        self.waits_in_receives = transport is None or not transport.is_ordered
        self.waits_for_receivers = transport is not None and transport.waits_for_receivers
        self.mail: dict[Edge, Mailbox] = {}
        self._senders: dict[Edge, OutChannel] = {}
        self._receivers: dict[Edge, InChannel] = {}
        self._answered: set[tuple[int, int, int]] = set()
        """Values for which gradients will arrive, by pass, micro-batch and edge."""
        for e, (source, target) in enumerate(pairwise(ends)):
            if rank not in (source, target):
                continue
            is_local = source == target
            copies = e in self.firsts and is_local  # layers may change the user's tensors in place
            self.mail["F", e] = Mailbox(copies=copies, device=on.get(e))
            self.mail["B", e] = Mailbox(device=on.get(e - 1))
            if not is_local:
                assert transport is not None, f"edge {e} leads to another process"
                other = target if source == rank else source
                self._senders["F" if source == rank else "B", e] = transport.sender(other, FIRST_EDGE + e)
                self._receivers["B" if source == rank else "F", e] = transport.receiver(other, FIRST_EDGE + e)

    def ports(self) -> dict[int, Ports]:
        """Return the ports of each chunk of this process."""
        return {
            i: Ports(self.mail["F", i], self.mail["F", i + 1], self.mail["B", i + 1], self.mail["B", i])
            for i, rank in enumerate(self.rank_of)
            if rank == self.rank
        }

    def post(self, post: Post, this: Pass) -> None:
        """Send a value of a pass from a mailbox, or receive a value into a mailbox.

        Skips a gradient that is not required: both ends know this from the value.
        """
        kind, m, e = post.kind, post.microbatch, post.edge
        mail, key = self.mail[kind, e], (this.number, m, e)
        if post.way == "SEND":
            if mail.has(this.number, m):
                has_gradients = self._senders[kind, e].send(
                    mail.receive(this.number, m), this.number, m, keep=post.limit
                )
                if has_gradients and kind == "F":
                    self._answered.add(key)
            return
        is_sent = kind == "F" or key in self._answered
        if is_sent:
            self._answered.discard(key)
            mail.expect(self._receivers[kind, e].begin(this.number, m), this.number, m)
        # Free the memory of small messages. All but the last ``limit`` have arrived by now, except in a worker that
        # receives nothing here, because the gradient is not required.
        if post.limit is not None and (is_sent or e in self.firsts):
            self._senders["F" if kind == "B" else "B", e].release(post.limit)

    def begin(self) -> None:
        """Drop the values sent in earlier passes. They have arrived, because every process has ended these passes."""
        for sender in self._senders.values():
            sender.flush()

    def end(self) -> None:
        """Drop the values sent to later stages, at the end of a row.

        On the driver they have arrived, because results computed from them have returned. Values of a worker may not
        have arrived; if :attr:`waits_for_receivers` is set and a neighbour fails, they never do.
        """
        for (kind, _), sender in self._senders.items():
            if kind == "F":
                sender.flush()

    def discard(self, number: int) -> None:
        """Forget a pass that will have no backward part. The garbage collector may call this at any time."""
        for key in list(self._answered):  # a copy, which CPython makes without switching threads
            if key[0] == number:
                self._answered.discard(key)
        for mail in self.mail.values():
            mail.discard(number)
