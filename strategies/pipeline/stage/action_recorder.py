"""Record when a process waits, computes and sends.

Without a recorder, the only cost for a stage is a check.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor

from strategies.common.torch_compat import tree_leaves
from strategies.pipeline.stage.records import LayerRecord, ProcessRecords, Record, RecordKind


class ActionRecorder:
    """Records what a process does, as consecutive records that do not overlap.

    Times come from ``time.perf_counter``, which on Linux is one clock for all processes of a host.

    Args:
        device: The device of the layers. On CUDA, each time is taken when the device has completed its work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._now: Callable[[], float] = time.perf_counter
        if device.type == "cuda":
            self._now = partial(_when_done, device)
        self._records: list[Record] = []
        self._begin = self._received = 0.0
        self._computed: float | None = None
        self._layers: dict[int, LayerRecord] = {}
        self._layer: tuple[int, float] | None = None
        self._has_begun = False
        self.pass_of_code = -1
        """The pass whose code is being recorded, after the call of a list of layers or, going backward, before it; -1
        for any other activity."""

    def begin(self, pass_of_code: int = -1) -> None:
        """Start the next record. After :meth:`hold` and :meth:`split`, only if code after a call is recorded."""
        has_begun, self._has_begun = self._has_begun, False
        if has_begun and pass_of_code < 0:
            return
        self._begin = self._received = self._now()
        self._computed, self.pass_of_code = None, pass_of_code

    def hold(self) -> None:
        """Continue the current record: the next call of :meth:`begin` has no effect."""
        self._has_begun = True

    def received(self) -> None:
        """Record that the input has arrived. Not called if the process waits for nothing."""
        self._received = self._now()

    def computed(self) -> None:
        """Record that the computation has ended and the send begins. Not called if the process sends nothing."""
        self._computed = self._now()

    def end(self, kind: RecordKind, microbatch: int = -1, stage: int = -1, number: int = -1) -> None:
        """Add a record; see :class:`~strategies.pipeline.stage.records.Record`."""
        now = self._now()
        computed = now if self._computed is None else self._computed
        self._records.append(Record(kind, microbatch, stage, number, self._begin, self._received, computed, now))

    def split(self, kind: RecordKind, microbatch: int, stage: int, number: int) -> None:
        """Add a record, and start the next one immediately, because one call of autograd covers both."""
        self.end(kind, microbatch, stage, number)
        self.begin()
        self._has_begun = True

    def layer(self, place: int, value: Any) -> None:
        """Record that the forward pass of the previous layer has ended and that of the next layer begins.

        Args:
            place: The index of the layer in the whole module.
            value: The input of the layer.
        """
        self.end_layers()
        elements = sum(leaf.numel() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
        known = self._layers.get(place, LayerRecord(0.0, 0))
        self._layers[place] = LayerRecord(known.seconds, max(known.elements, elements))
        self._layer = place, self._now()

    def end_layers(self) -> None:
        """Record that the forward pass of the last layer has ended."""
        if self._layer is None:
            return
        (place, begin), self._layer = self._layer, None
        known = self._layers[place]
        self._layers[place] = LayerRecord(known.seconds + self._now() - begin, known.elements)

    @property
    def has_records(self) -> bool:
        """Whether anything has been recorded."""
        return bool(self._records)

    def recorded(self) -> ProcessRecords:
        """Return all records."""
        return ProcessRecords(self._records, memory_bytes(self._device), self._layers)


def memory_bytes(device: torch.device) -> int:
    """Return the resident memory of this process; on CUDA, the peak memory that torch has allocated."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


def _when_done(device: torch.device) -> float:
    torch.cuda.current_stream(device).synchronize()  # not the device: an early receive may still wait for its send
    return time.perf_counter()
