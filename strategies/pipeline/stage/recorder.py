"""Records when a process waits, computes and sends, while recording is on.

A stage without a recorder only checks that it has none.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor

from strategies.common.torch_compat import tree_leaves
from strategies.pipeline.stage.records import LayerRecord, Record, Recorded, RecordKind


class ActionRecorder:
    """Records what a process does, as consecutive records that do not overlap.

    The times are those of ``time.perf_counter``, which is one clock for all processes of a host on Linux.

    Args:
        device: The device of the layers. On CUDA, each time is taken when the device has done what it was given.
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
        """The pass whose code after the call of the module is what is being recorded; -1 if it is something else."""

    def begin(self, pass_of_code: int = -1) -> None:
        """The process is ready for what it records next; without effect after :meth:`hold` and :meth:`split`."""
        if self._has_begun:
            self._has_begun = False
            return
        self._begin = self._received = self._now()
        self._computed, self.pass_of_code = None, pass_of_code

    def hold(self) -> None:
        """What has begun goes on: :meth:`begin` has no effect the next time."""
        self._has_begun = True

    def received(self) -> None:
        """The process has what it waited for; left out if it waits for nothing."""
        self._received = self._now()

    def computed(self) -> None:
        """The process has computed, and now sends; left out if it sends nothing."""
        self._computed = self._now()

    def end(self, kind: RecordKind, microbatch: int = -1, stage: int = -1, number: int = -1) -> None:
        """Add a record; see :class:`~strategies.pipeline.stage.records.Record`."""
        now = self._now()
        computed = now if self._computed is None else self._computed
        self._records.append(Record(kind, microbatch, stage, number, self._begin, self._received, computed, now))

    def split(self, kind: RecordKind, microbatch: int, stage: int, number: int) -> None:
        """Add a record, and begin the next one at once: a call of autograd does what belongs to both."""
        self.end(kind, microbatch, stage, number)
        self.begin()
        self._has_begun = True

    def layer(self, place: int, value: Any) -> None:
        """The forward pass of a layer begins, and that of the layer before it has ended.

        Args:
            place: The place of the layer in the whole module.
            value: Its input.
        """
        self.end_layers()
        elements = sum(leaf.numel() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
        known = self._layers.get(place, LayerRecord(0.0, 0))
        self._layers[place] = LayerRecord(known.seconds, max(known.elements, elements))
        self._layer = place, self._now()

    def end_layers(self) -> None:
        """The forward pass of the last layer has ended."""
        if self._layer is None:
            return
        (place, begin), self._layer = self._layer, None
        known = self._layers[place]
        self._layers[place] = LayerRecord(known.seconds + self._now() - begin, known.elements)

    @property
    def has_records(self) -> bool:
        """Whether anything has been recorded."""
        return bool(self._records)

    def recorded(self) -> Recorded:
        """Return what has been recorded."""
        return Recorded(self._records, memory_bytes(self._device), self._layers)


def memory_bytes(device: torch.device) -> int:
    """Return the resident memory of this process; on CUDA the most that torch has allocated so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


def _when_done(device: torch.device) -> float:
    torch.cuda.current_stream(device).synchronize()  # not the device: a receive posted ahead may wait for its send
    return time.perf_counter()
