"""What a process does in a pass: actions, the user's code, and the sends, receives and collectives between processes.

Legend: m micro-batch, i stage of a table (a chunk of layers), e edge, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from strategies.pipeline.schedule.tables import Action


class UserCode(NamedTuple):
    """What the driver runs of the model outside the stages, for one micro-batch. Prints as ``b0`` or ``a0``.

    Attributes:
        part: ``"b"`` for the code before the call of the pipelined module (embeddings), ``"a"`` for its backward pass.
        microbatch: The micro-batch.
    """

    part: Literal["b", "a"]
    microbatch: int

    def __repr__(self) -> str:
        return f"{self.part}{self.microbatch}"


Computation: TypeAlias = Action | UserCode
"""What a process computes, as opposed to what it sends and receives."""


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


class Result(NamedTuple):
    """The driver's code takes the output of the last stage for a micro-batch. Prints as ``r0``.

    It keeps the output, or runs the code after the call of the module, with its backward pass.

    Attributes:
        microbatch: The micro-batch.
    """

    microbatch: int

    def __repr__(self) -> str:
        return f"r{self.microbatch}"


class Tied(NamedTuple):
    """An exchange of tied parameters with other processes, in one order of all processes.

    Attributes:
        what: ``"values"`` of owners, before forward passes, or ``"gradients"`` of copies, after backward passes.
    """

    what: Literal["values", "gradients"]

    def __repr__(self) -> str:
        return f"TIED_{self.what.upper()}"


DeviceOperation: TypeAlias = Computation | Post | Meeting | Group
"""What a process gives to its device."""

Operation: TypeAlias = DeviceOperation | Result | Tied

Row: TypeAlias = Sequence[Operation]
"""What one process does in a pass, or in a part of one, in order."""


Edge: TypeAlias = tuple[Literal["F", "B"], int]
"""The kind of what travels over an edge, and the number of the edge."""


def edge_to(computation: Computation) -> Edge | None:
    """Return the edge over which a computation gets its input."""
    if computation[0] in "bW":
        return None
    if isinstance(computation, UserCode):
        return "B", 0
    return ("F", computation.stage) if computation.kind == "F" else ("B", computation.stage + 1)


def edge_from(computation: Computation) -> Edge | None:
    """Return the edge over which the result of a computation leaves."""
    if computation[0] in "aW":
        return None
    if isinstance(computation, UserCode):
        return "F", 0
    return ("F", computation.stage + 1) if computation.kind == "F" else ("B", computation.stage)
