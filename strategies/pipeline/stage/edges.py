"""The connections between chunks: those within a process, and this process's ends of those to others.

Edge e leads to chunk e; edge 0 comes from the driver's code, and the last edge goes back there::

    driver's code ──edge 0──▶ chunk 0 ──edge 1──▶ chunk 1 ──edge 2──▶ driver's code

Values travel in the direction of the arrows, gradients against it. At each end of an edge there is a
:class:`~strategies.pipeline.stage.stage.Mailbox` for values and one for gradients; if both ends are in one process,
they are the same. Between two processes, the sends and receives in the rows move what is in them::

    chunk ──▶ mailbox ── SEND ──▶ channel ──▶ RECV ──▶ mailbox ──▶ chunk of another process
"""

from collections.abc import Sequence
from itertools import pairwise

from strategies.pipeline.schedule.operations import Edge, Post
from strategies.pipeline.stage.stage import Mailbox, Pass, Ports
from strategies.pipeline.transport.channel import EDGE_TAG, Receiver, Sender
from strategies.pipeline.transport.interface import Transport


class Edges:
    """One process's ends of the edges of a pipeline.

    Args:
        rank: This process. The driver's rank is the last.
        rank_of: The process of each chunk.
        transport: Opens channels to other processes; ``None`` if there are none.

    Attributes:
        mail: The mailboxes of this process, by kind and number of the edge.
    """

    def __init__(self, rank: int, rank_of: Sequence[int], transport: Transport | None) -> None:
        driver = rank_of[-1]
        ends = [driver, *rank_of, driver]
        self.rank, self.rank_of, self.transport = rank, tuple(rank_of), transport
        self.waits_in_receives = transport is None or not transport.is_ordered
        self.mail: dict[Edge, Mailbox] = {}
        self._senders: dict[Edge, Sender] = {}
        self._receivers: dict[Edge, Receiver] = {}
        self._answered: set[tuple[int, int, int]] = set()
        """Values for which gradients will come back, by pass, micro-batch and edge."""
        for e, (source, target) in enumerate(pairwise(ends)):
            if rank not in (source, target):
                continue
            is_local = source == target
            self.mail["F", e] = Mailbox(copies=e == 0 and is_local)  # layers may change the user's tensors in place
            self.mail["B", e] = Mailbox()
            if not is_local:
                assert transport is not None, f"edge {e} leads to another process"
                tag, other = EDGE_TAG + 2 * e, target if source == rank else source
                self._senders["F" if source == rank else "B", e] = transport.sender(other, tag)
                self._receivers["B" if source == rank else "F", e] = transport.receiver(other, tag)

    def ports(self) -> dict[int, Ports]:
        """Return the ports of each chunk of this process."""
        return {
            i: Ports(self.mail["F", i], self.mail["F", i + 1], self.mail["B", i + 1], self.mail["B", i])
            for i, rank in enumerate(self.rank_of)
            if rank == self.rank
        }

    def post(self, post: Post, this: Pass) -> None:
        """Move a value of a pass; see :class:`~strategies.pipeline.stage.stage.Connections`.

        What does not travel is left out: both ends know from the value whether there will be a gradient.
        """
        kind, m, e = post.kind, post.microbatch, post.edge
        mail, key = self.mail[kind, e], (this.number, m, e)
        if post.way == "SEND":
            if mail.has(this.number, m):
                # Under gpipe, the driver receives gradients of inputs after its own backward passes.
                keep = None if (kind, e) == ("B", 0) and not this.gathers else this.limit
                if self._senders[kind, e].send(mail.receive(this.number, m), this.number, m, keep=keep) and kind == "F":
                    self._answered.add(key)
        elif kind == "F" or key in self._answered:
            self._answered.discard(key)
            mail.expect(self._receivers[kind, e].begin(this.number, m), this.number, m)
            if kind == "B" and this.limit is not None:  # the memory of small messages is used again
                self._senders["F", e].release(this.limit)

    def begin(self, this: Pass) -> None:
        """Drop what has been sent in earlier passes, which has arrived: this pass comes after them everywhere."""
        for sender in self._senders.values():
            sender.flush()

    def end(self, this: Pass) -> None:
        """Drop what has been sent to later stages, which has arrived: what was computed from it is back."""
        for (kind, _), sender in self._senders.items():
            if kind == "F":
                sender.flush()

    def release(self, keep: int | None) -> None:
        """Drop all sent values but the last ``keep`` on each channel, which have arrived."""
        if keep is not None:
            for sender in self._senders.values():
                sender.release(keep)

    def discard(self, number: int) -> None:
        """Forget a pass that will have no backward part. The garbage collector may call this at any time."""
        for key in list(self._answered):  # a copy, which CPython makes without switching threads
            if key[0] == number:
                self._answered.discard(key)
        for mail in self.mail.values():
            mail.discard(number)
