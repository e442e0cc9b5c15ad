"""The records of a process: what it did in a step, and when.

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
    """One activity of a process, with times.

    Attributes:
        kind: The kind of an action; or on the driver ``"b"`` and ``"a"``, the code before the call of a list of layers
            and its backward pass, ``"feed"``, sending the input of the list, and ``"loss"``, the code after the
            last call, with its backward pass if that runs per micro-batch; or ``"step"``, an optimizer's step.
        microbatch: The micro-batch. If the code of the driver runs for a whole batch, the first one for ``"b"``, and
            the last one otherwise.
        stage: The chunk of layers; for ``"b"``, ``"feed"`` and ``"a"`` the first chunk of the list; -1 for ``"step"``.
        number: The number of the pass; -1 if it belongs to none.
        begin: When the process was ready.
        received: When the input from another process had arrived.
        computed: When the computation had ended.
        end: When the process had handed its output to the transport.
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
        """Return the record with all times increased by ``seconds``."""
        times = (self.begin, self.received, self.computed, self.end)
        return Record(*self[:4], *(time + seconds for time in times))

    def __repr__(self) -> str:
        if self.kind == "step":
            return "optimizer"
        if self.kind in KINDS:
            return f"{self.stage}{self.kind}{self.microbatch}"
        return f"{'' if self.kind == 'loss' else self.stage or ''}{self.kind}{self.microbatch}"


class LayerRecord(NamedTuple):
    """The forward passes of a layer, without recomputation.

    Attributes:
        seconds: The total time.
        elements: The number of elements of the layer's largest input.
    """

    seconds: float
    elements: int


class ProcessRecords(NamedTuple):
    """All records of a process.

    Attributes:
        records: The records, in the order in which they ended.
        memory_bytes: The resident memory of the process; on CUDA, the peak memory that torch has allocated.
        layers: The records of its layers, by index in the whole module.
    """

    records: list[Record]
    memory_bytes: int
    layers: Mapping[int, LayerRecord] = MappingProxyType({})
