"""What a process gives to its device: actions, and the sends, receives and collectives between processes.

Legend: m micro-batch, i stage of a table (a chunk of layers), e edge, r rank.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from strategies.pipeline.schedule.simulator import Step, UserCode
from strategies.pipeline.schedule.tables import Action


class Post(NamedTuple):
    """One end of a transfer. Prints as in ``torch.distributed.pipelining``: ``0SEND_F3`` is what stage 0 sends.

    Edge e leads to stage e; edge 0 comes from the driver's code. Gradients travel against it.

    Attributes:
        way: What this process does.
        kind: ``"F"`` for values, ``"B"`` for gradients.
        microbatch: The micro-batch.
        edge: The edge.
        peer: The other process.
    """

    way: Literal["SEND", "RECV"]
    kind: Literal["F", "B"]
    microbatch: int
    edge: int
    peer: int

    def __repr__(self) -> str:
        stage = self.edge - ((self.way == "SEND") == (self.kind == "F"))
        return f"{'code' if stage < 0 else stage}{self.way}_{self.kind}{self.microbatch}"


class Meeting(NamedTuple):
    """An operation that several processes run together: a collective, an exchange of ties, a new communicator.

    Attributes:
        name: What it is, such as ``"average 3"``; each has a name of its own.
        ranks: The processes that take part.
    """

    name: str
    ranks: tuple[int, ...]

    def __repr__(self) -> str:
        return self.name


class Group(NamedTuple):
    """Sends and receives between ``ncclGroupStart`` and ``ncclGroupEnd``: they start together and end together."""

    posts: tuple[Post, ...]

    def __repr__(self) -> str:
        return f"({' '.join(map(repr, self.posts))})"


Operation: TypeAlias = Action | UserCode | Post | Meeting | Group


Edge: TypeAlias = tuple[Literal["F", "B"], int]
"""The kind of what travels over an edge, and the number of the edge."""


def edge_to(step: Step) -> Edge | None:
    """Return the edge over which a step gets what it needs."""
    if step[0] in "bW":
        return None
    if isinstance(step, UserCode):
        return "B", 0
    return ("F", step.stage) if step.kind == "F" else ("B", step.stage + 1)


def edge_from(step: Step) -> Edge | None:
    """Return the edge over which the result of a step leaves."""
    if step[0] in "aW":
        return None
    if isinstance(step, UserCode):
        return "F", 0
    return ("F", step.stage + 1) if step.kind == "F" else ("B", step.stage)
