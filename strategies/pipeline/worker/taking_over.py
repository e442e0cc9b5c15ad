"""Snapshots of a stage on a worker: what they hold, how they get into a slot, and how a new process takes one over.

    worker ── pickle, with storages beside it ──▶ slot ──▶ a new worker for the same stage

A snapshot is taken between two passes. It holds what the driver would send if the pipeline started now, and what only
the process of the worker has.
"""

from dataclasses import dataclass

from torch import Tensor

from strategies.common.stage_layers import describe
from strategies.pipeline.stage.layers import ProcessRandomState
from strategies.pipeline.transport.slots import Slot, SlotAddress
from strategies.pipeline.worker.payload import Payload, pickled, unpickled

_ALL = -1
"""Storages of every size stay out of the pickle, because torch makes an archive of each storage that it pickles."""


@dataclass
class StageState:
    """The state of a stage between two passes, pickled as one object so that shared objects stay shared.

    Attributes:
        payload: What the driver would send if the pipeline started now.
        computed: Results of operations that the driver refers to, by number.
        grads: The gradient of each parameter; ``None`` if they are not part of the snapshot.
        random_state: That of the process.
        owners: Which replica steps a parameter, if the replicas of the stage divide its optimizer states.
    """

    payload: Payload
    computed: dict[int, Tensor]
    grads: dict[str, Tensor | None] | None
    random_state: ProcessRandomState
    owners: dict[Tensor, int] | None = None


class StageSlots:
    """The slots of a stage, in its worker."""

    def __init__(self) -> None:
        self._opened: dict[SlotAddress, Slot] = {}

    def write(self, address: SlotAddress, number: int, state: StageState) -> None:
        """Write a snapshot into a slot.

        Raises:
            ValueError: If an object of the stage cannot be pickled.
        """
        slot = self._slot(address)
        slot.forget()
        layers = state.payload.layers
        try:
            parcel = pickled(state, layers, None, small_bytes=_ALL)
        except ValueError as error:
            raise ValueError(
                f"no snapshot can be taken of {describe(state.payload.index, layers)}: {error}. The layer "
                "got this object after the pipeline started: let it drop the object after its forward pass, or "
                "give it a __getstate__ that leaves the object out"
            ) from error
        slot.write(number, parcel.blob, parcel.storages)

    def read(self, address: SlotAddress, number: int) -> StageState:
        """Return the state that a snapshot holds, in memory of its own."""
        slot = self._slot(address)
        state, storages = unpickled(slot.read_blob(number))
        assert isinstance(state, StageState)
        slot.read_storages(storages)
        return state

    def _slot(self, address: SlotAddress) -> Slot:
        if address not in self._opened:
            self._opened[address] = Slot.opened(address)
        return self._opened[address]
