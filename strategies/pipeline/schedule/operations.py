"""The operations of a process in a pass: actions, the user's code, sends, receives and collectives.

Index letters: ``m`` micro-batch, ``i`` stage of a table (a chunk of layers), ``e`` edge, ``r`` rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from strategies.pipeline.schedule.tables import Action


class UserCode(NamedTuple):
    """The part of the model outside the stages, which the driver runs for a micro-batch. Prints as ``b0`` or ``a0``.

    If there are several lists of layers, the code between two lists prints as ``4b0`` and ``4a0`` if stage 4 is the
    first stage of the second list. It takes the output of the stage before.

    Attributes:
        part: ``"b"`` for the code before the call of a list of layers (embeddings), ``"a"`` for its backward pass.
        microbatch: The micro-batch.
        stage: The first stage of the list.
    """

    part: Literal["b", "a"]
    microbatch: int
    stage: int = 0

    def __repr__(self) -> str:
        return f"{self.stage or ''}{self.part}{self.microbatch}"


Computation: TypeAlias = Action | UserCode
"""An operation that computes, as opposed to one that sends or receives."""


class Post(NamedTuple):
    """One end of a transfer. Prints as in ``torch.distributed.pipelining``: ``0SEND_F3`` is a send of stage 0.

    Edge e leads to stage e. Edge 0 comes from the driver's code. Gradients are sent in the opposite direction.

    Attributes:
        way: Whether this process sends or receives.
        kind: ``"F"`` for values, ``"B"`` for gradients.
        microbatch: The micro-batch.
        edge: The edge.
        peer: The other process.
        limit: Maximum number of values in transit on a channel; ``None`` for no limit. A send beyond it waits for the
            oldest of these values, unless they are small. A receive frees the values that were sent over the same edge
            in the other direction, except for the last ``limit``.
    """

    way: Literal["SEND", "RECV"]
    kind: Literal["F", "B"]
    microbatch: int
    edge: int
    peer: int
    limit: int | None = None

    def __repr__(self) -> str:
        stage = self.edge - ((self.way == "SEND") == (self.kind == "F"))
        return f"{'code' if stage < 0 else stage}{self.way}_{self.kind}{self.microbatch}"


class Result(NamedTuple):
    """The driver's code takes the output of the last stage for a micro-batch. Prints as ``r0``.

    The code keeps the output, or runs the user's code after the call of the module, with its backward pass.

    Attributes:
        microbatch: The micro-batch.
    """

    microbatch: int

    def __repr__(self) -> str:
        return f"r{self.microbatch}"


class Tied(NamedTuple):
    """An exchange of tied parameters with other processes. All processes use the same order of exchanges.

    Attributes:
        what: ``"values"``, sent by owners before forward passes, or ``"gradients"`` of copies, after backward passes.
    """

    what: Literal["values", "gradients"]

    def __repr__(self) -> str:
        return f"TIED_{self.what.upper()}"


DeviceOperation: TypeAlias = Computation | Post
"""An operation that a process submits to its device."""

Operation: TypeAlias = DeviceOperation | Result | Tied

Row: TypeAlias = Sequence[Operation]
"""The operations of one process in a pass, or in a part of a pass, in order."""


Edge: TypeAlias = tuple[Literal["F", "B"], int]
"""The kind of the values that are sent over an edge, and the number of the edge."""


def edge_to(computation: Computation) -> Edge | None:
    """Return the edge over which a computation receives its input."""
    if computation[0] in "bW":
        return None
    if isinstance(computation, UserCode):
        return "B", computation.stage
    return ("F", computation.stage) if computation.kind == "F" else ("B", computation.stage + 1)
