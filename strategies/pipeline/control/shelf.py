"""The shelf of a stage: parts of its state, set aside on the worker and described to the driver.

    driver    shelved = ShelvedPart.of(stage, Part(PartKind.STATE_DICT))
    worker    keeps the tensors of the part under a number, without copying them; sends a layout of each
    driver    shelved.values()      one tensor after another, a few MiB in each message

Beyond what a process holds anyway, it needs memory for one tensor and a few messages only. Freed blocks of messages are
returned to the system regularly. Otherwise glibc would keep them: an aligned block seldom fits where a block of the
same size was, and each thread has its own heap.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from strategies.common.torch_compat import tree_map_with_path
from strategies.common.trees import name_of
from strategies.launch.allocator import return_freed_memory
from strategies.pipeline.control.client import RemoteStage
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.control.parts import Part, PartKind, Piece, ShelvedLayout, bytes_of

_MESSAGE_BYTES = 4 * 2**20
"""Maximum number of bytes of tensors in one message; large, so that the overhead of a call is negligible."""

_MESSAGES_KEPT = 8
"""Number of messages after which the memory of used messages is returned to the system."""

Fetch = Callable[[RemoteStage, int, Sequence[Piece]], Tensor]
"""Fetches bytes from the shelf of a stage, given the number of the part on the shelf and the pieces."""


def among_commands(stage: RemoteStage, number: int, pieces: Sequence[Piece]) -> Tensor:
    """Fetch in order with the other commands of the stage."""
    return stage.ask(StageCommands.shelved, number, pieces).wait()


def for_user(stage: RemoteStage, number: int, pieces: Sequence[Piece]) -> Tensor:
    """Fetch for user code, which may read values at any time."""
    return stage.readable().ask(StageCommands.shelved, number, pieces).wait()


def in_rescue(stage: RemoteStage, number: int, pieces: Sequence[Piece]) -> Tensor:
    """Fetch even if another stage has failed."""
    return stage.ask(StageCommands.shelved, number, pieces).rescue()


def beside(stage: RemoteStage, number: int, pieces: Sequence[Piece]) -> Tensor:
    """Fetch while the stage runs other commands, from any thread.

    Raises:
        WorkerLost: If the process of the stage has ended.
    """
    return stage.beside(_from_shelf, number, pieces).wait()


def _from_shelf(host: Any, number: int, pieces: Sequence[Piece]) -> Tensor:
    """Return bytes from the shelf; runs on an RPC thread of a worker, whose host is behind an ``RRef``."""
    content: Tensor = host.local_value().hosted.shelved(number, pieces)
    return content


class ShelvedPart:
    """A part of the state on the shelf of a stage, which drops it when nothing on the driver refers to this object.

    Args:
        stage: The stage.
        number: The number on the shelf.
        tree: The part, with a :class:`~strategies.pipeline.control.parts.ShelvedLayout` in place of each tensor on the
            shelf.
    """

    def __init__(self, stage: RemoteStage, number: int, tree: Any) -> None:
        self.stage, self.number, self.tree = stage, number, tree

    @classmethod
    def of(cls, stage: RemoteStage, part: Part) -> "ShelvedPart":
        """Make a stage put a part of its state on its shelf."""
        number = stage.new_number()
        (tree,) = stage.ask(StageCommands.capture, {number: part}).wait()
        return cls(stage, number, tree)

    @classmethod
    def rescued(cls, stage: RemoteStage, parts: Sequence[Part]) -> "dict[Part, ShelvedPart]":
        """Make a stage put parts of its state on its shelf, even if another stage has failed."""
        numbered = {stage.new_number(): part for part in parts}
        trees = stage.ask(StageCommands.capture, numbered).rescue()
        return {part: cls(stage, number, tree) for (number, part), tree in zip(numbered.items(), trees, strict=True)}

    def __del__(self) -> None:
        self.stage.send(StageCommands.free, self.number)

    def mapped(self, make: Callable[[str, ShelvedLayout], Any]) -> Any:
        """Return the part with ``make(path, layout)`` in place of each layout."""

        def made(path: Any, leaf: Any) -> Any:
            return make(name_of(path), leaf) if isinstance(leaf, ShelvedLayout) else leaf

        return tree_map_with_path(made, self.tree)

    def values(self, fetch: Fetch = among_commands) -> Any:
        """Return the part with its values."""
        wanted: list[Wanted] = []
        self.mapped(lambda path, layout: wanted.append(Wanted(self, path, layout)))
        fetched = fetched_values(wanted, fetch)
        return self.mapped(lambda path, layout: next(fetched))


def captured(stage: RemoteStage, kind: PartKind) -> Any:
    """Return a part of the state of a stage, with its values."""
    return ShelvedPart.of(stage, Part(kind)).values()


class Wanted(NamedTuple):
    """A tensor to be fetched: the part that contains it, its path in the part, and its layout."""

    part: ShelvedPart
    path: str
    layout: ShelvedLayout


def fetched_values(wanted: Sequence[Wanted], fetch: Fetch) -> Iterator[Tensor]:
    """Fetch tensors in the order given.

    Args:
        wanted: The tensors.
        fetch: Fetches the bytes of a message.

    Yields:
        The tensors. If the caller keeps none of them, one tensor and one message are in memory.
    """
    value: Tensor | None = None
    for number, (part, entries) in enumerate(_messages(wanted), start=1):
        if number % _MESSAGES_KEPT == 0:
            return_freed_memory()
        content, taken = fetch(part.stage, part.number, [piece for piece, _ in entries]), 0
        for piece, layout in entries:
            if piece.start == 0:
                value = layout.empty()
            assert value is not None
            own, size_bytes = bytes_of(value), piece.stop - piece.start
            own[piece.start : piece.stop] = content[taken : taken + size_bytes]
            taken += size_bytes
            if piece.stop == len(own):
                del own
                yield value
                value = None
        del content


def _messages(wanted: Sequence[Wanted]) -> Iterator[tuple[ShelvedPart, list[tuple[Piece, ShelvedLayout]]]]:
    """Yield messages of pieces of one part: each tensor from its first byte to its last, in the order given."""
    entries: list[tuple[Piece, ShelvedLayout]] = []
    room = _MESSAGE_BYTES
    for k, (part, path, layout) in enumerate(wanted):
        size_bytes, start = layout.empty("meta").nbytes, 0
        while start < size_bytes or start == size_bytes == 0:
            stop = min(size_bytes, start + room)
            entries.append((Piece(path, start, stop), layout))
            room -= stop - start
            if room <= 0:
                yield part, entries
                entries, room = [], _MESSAGE_BYTES
            start = stop
            if size_bytes == 0:
                break
        if entries and (k + 1 == len(wanted) or wanted[k + 1].part is not part):
            yield part, entries
            entries, room = [], _MESSAGE_BYTES
