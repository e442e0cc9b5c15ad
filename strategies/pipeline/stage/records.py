"""What the recorder of a process writes: what it did in a step, and when.

    begin        received                      computed      end
      │ waits for input │ forward, backward, code ... │ sends   │

All times are seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

from strategies.pipeline.schedule.tables import KINDS, Kind

RecordKind: TypeAlias = Kind | Literal["b", "feed", "loss", "a", "step"]


class Record(NamedTuple):
    """What a process did, and when.

    Attributes:
        kind: The kind of an action; or on the driver ``"b"`` and ``"a"``, the code before the call of the pipelined
            module and its backward pass, ``"feed"``, sending the module's input, and ``"loss"``, the code after the
            call, with its backward pass where that runs per micro-batch; or ``"step"``, an optimizer's step.
        microbatch: The micro-batch; the last one if the code of the driver runs for a whole batch.
        stage: The chunk of layers; -1 if there is none.
        number: The number of the pass; -1 if it belongs to none.
        begin: When the process was ready.
        received: When it had what it needs from another process.
        computed: When it had computed.
        end: When it had handed over what it sends.
    """

    kind: RecordKind
    microbatch: int
    stage: int
    number: int
    begin: float
    received: float
    computed: float
    end: float

    def shifted(self, seconds: float) -> Record:
        """Return the record with times of a clock that is ahead by this."""
        times = (self.begin, self.received, self.computed, self.end)
        return Record(*self[:4], *(time + seconds for time in times))

    def __repr__(self) -> str:
        if self.kind == "step":
            return "optimizer"
        return f"{self.stage}{self.kind}{self.microbatch}" if self.kind in KINDS else f"{self.kind}{self.microbatch}"


class LayerRecord(NamedTuple):
    """What the forward passes of a layer took, without recomputation.

    Attributes:
        seconds: Their time.
        elements: The number of elements of its largest input.
    """

    seconds: float
    elements: int


class Recorded(NamedTuple):
    """What a process hands over.

    Attributes:
        records: The records, in the order in which they ended.
        memory_bytes: Its resident memory; on CUDA the most that torch has allocated so far.
        layers: What its layers took, by their places in the whole module.
    """

    records: list[Record]
    memory_bytes: int
    layers: Mapping[int, LayerRecord] = MappingProxyType({})
