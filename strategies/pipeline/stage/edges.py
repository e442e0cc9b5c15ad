"""The connections between chunks: those within a process, and this process's ends of those to others.

Edge e leads to chunk e; edge 0 comes from the driver's code, and the last edge goes back there::

    driver's code ──edge 0──▶ chunk 0 ──edge 1──▶ chunk 1 ──edge 2──▶ driver's code

Values travel in the direction of the arrows, gradients against it. An edge between two processes has a channel for
each; within a process, values go through a :class:`~strategies.pipeline.stage.stage.Mailbox`.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from strategies.pipeline.schedule.operations import Post
from strategies.pipeline.stage.stage import Input, Mailbox, Output, Ports
from strategies.pipeline.transport.channel import EDGE_TAG, Inputs, Sender
from strategies.pipeline.transport.device import DeviceReceiver, DeviceSender
from strategies.pipeline.transport.interface import Transport


class Source(NamedTuple):
    """The end of an edge where values come from."""

    values: Output
    grads: Input


class Target(NamedTuple):
    """The end of an edge where values go to."""

    values: Input
    grads: Output


class Edges:
    """One process's ends of the edges of a pipeline.

    Args:
        rank: This process. The driver's rank is the last.
        rank_of: The process of each chunk.
        transport: Opens channels to other processes; ``None`` if there are none.

    Attributes:
        sources: The ends of edges that come from this process, by number.
        targets: The ends of edges that go to this process, by number.
    """

    def __init__(self, rank: int, rank_of: Sequence[int], transport: Transport | None) -> None:
        driver = rank_of[-1]
        ends = [driver, *rank_of, driver]
        self.rank, self.rank_of = rank, tuple(rank_of)
        self.sources: dict[int, Source] = {}
        self.targets: dict[int, Target] = {}
        for e, (source, target) in enumerate(pairwise(ends)):
            tag = EDGE_TAG + 2 * e
            if source == target == rank:
                values, grads = Mailbox(copies=e == 0), Mailbox()  # layers may change the user's tensors in place
                self.sources[e], self.targets[e] = Source(values, grads), Target(values, grads)
            elif rank in (source, target):
                assert transport is not None, f"edge {e} leads to another process"
                other = target if source == rank else source
                sender, receiver = transport.sender(other, tag), transport.receiver(other, tag)
                if source == rank:
                    self.sources[e] = Source(sender, receiver)
                else:
                    self.targets[e] = Target(Inputs(receiver) if e == 0 else receiver, sender)

    def post(self, post: Post, pass_number: int) -> None:
        """Post a send or receive of a pass, under a transport whose processes have one order of posting.

        What does not travel is left out: both ends know from the value whether there will be a gradient.
        """
        number, m, e = pass_number, post.microbatch, post.edge
        source, target = self.sources.get(e), self.targets.get(e)
        if post.way == "SEND":
            assert source is not None or target is not None
            sender = source.values if post.kind == "F" and source is not None else target and target.grads
            assert isinstance(sender, DeviceSender)
            sender.post(number, m)
        elif post.kind == "F":
            assert target is not None
            receiver = target.values.receiver if isinstance(target.values, Inputs) else target.values
            assert isinstance(receiver, DeviceReceiver)
            receiver.begin(number, m)
        else:
            assert source is not None
            assert isinstance(source.values, DeviceSender) and isinstance(source.grads, DeviceReceiver)
            if source.values.takes_answer(number, m):
                source.grads.begin(number, m)

    def discard(self, pass_number: int) -> None:
        """Forget a pass that will have no backward part. The garbage collector may call this at any time."""
        for source in self.sources.values():
            if isinstance(source.values, DeviceSender):
                source.values.discard(pass_number)

    def ports(self) -> dict[int, Ports]:
        """Return the ports of each chunk of this process."""
        return {
            chunk: Ports(
                self.targets[chunk].values,
                self.sources[chunk + 1].values,
                self.sources[chunk + 1].grads,
                self.targets[chunk].grads,
            )
            for chunk, rank in enumerate(self.rank_of)
            if rank == self.rank
        }

    @property
    def senders(self) -> list[Sender]:
        """All channels that bring values or gradients to other processes."""
        ends = [*(source.values for source in self.sources.values()), *(t.grads for t in self.targets.values())]
        return [end for end in ends if isinstance(end, Sender)]
