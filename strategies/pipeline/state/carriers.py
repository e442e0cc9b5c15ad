"""Carriers bring the state of a stage to the worker that continues with it. This module also pickles the state.

    driver ── pickle over RPC, storages over the data plane ──▶ worker                 (:class:`Shipped`)
    worker ── pickle, storages beside it ──▶ slot ──▶ another worker for the stage     (:class:`InSlot`)

The values of large tensors are not part of the pickle. They follow one storage at a time, directly to their final place
(:mod:`strategies.pipeline.transport.storages`, :mod:`strategies.pipeline.transport.slots`), so that no process holds a
second copy of a stage. Tensors that have not been built are sent as recipes
(:mod:`strategies.pipeline.construction`).
"""

import importlib
import io
import pickle
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any, Protocol

import cloudpickle
import torch
from torch import Tensor, UntypedStorage, nn

from strategies.common.stage_layers import describe
from strategies.common.torch_compat import (
    STORAGES,
    compiled_call,
    gradient_hooks,
    number_of_storage,
    reduced_storage,
    storage_for_pickle,
    storage_of,
)
from strategies.common.transformers_compat import is_capturing_hook
from strategies.pipeline.construction.recipe import Recipe, View
from strategies.pipeline.construction.without_memory import SMALL_BYTES, Construction
from strategies.pipeline.state.stage_state import StageState
from strategies.pipeline.transport.slots import Slot, SlotAddress

Receive = Callable[[Sequence[UntypedStorage]], None]
"""Receives the values of storages from the driver."""

_CPU = torch.device("cpu")
_ALL = -1
"""In a slot, no storage is part of the pickle, because torch makes an archive of each storage that it pickles."""


class Carrier(Protocol):
    """Brings a worker the state of its stage."""

    def take(self, receive: Receive) -> StageState:
        """Return the state, in newly allocated memory. Called once, in the process of the worker."""


@dataclass(frozen=True)
class Shipped:
    """A state that the driver sends: the pickle of the state. The driver sends the large storages afterwards.

    Attributes:
        blob: See :class:`Parcel`.
    """

    blob: bytes

    def take(self, receive: Receive) -> StageState:
        state, storages = unpickled(self.blob)
        assert isinstance(state, StageState)
        receive(storages)
        return state


@dataclass(frozen=True)
class InSlot:
    """A state in a slot, which a previous worker wrote as a snapshot.

    Attributes:
        address: The slot.
        number: The number of the snapshot.
    """

    address: SlotAddress
    number: int

    def carrier(self) -> Carrier:
        return self

    def deliver(self, send: Callable[[list[UntypedStorage]], None]) -> None:
        """Send nothing: everything is in the slot."""

    def take(self, receive: Receive) -> StageState:
        slot = Slot.opened(self.address)
        try:
            return _state_in(slot, self.number, None)
        finally:
            slot.close()


class StageSlots:
    """The slots of a stage, as its worker writes and reads them.

    Args:
        index: The number of the stage.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._opened: dict[SlotAddress, Slot] = {}

    def write(self, address: SlotAddress, number: int, state: StageState) -> None:
        """Write a snapshot into a slot.

        Raises:
            ValueError: If an object of the stage cannot be pickled.
        """
        slot = self._slot(address)
        slot.forget()
        try:
            parcel = pickled(state, state.layers, None, small_bytes=_ALL)
        except ValueError as error:
            raise ValueError(
                f"no snapshot can be taken of {describe(self._index, state.layers)}: {error}. The layer got this "
                "object after the pipeline started: let it drop the object after its forward pass, or give it a "
                "__getstate__ that leaves the object out"
            ) from error
        slot.write(number, parcel.blob, parcel.storages)

    def read(self, address: SlotAddress, number: int, device: torch.device | None = None) -> StageState:
        """Return the state in a slot, in new memory.

        Args:
            address: The slot.
            number: The number of the snapshot.
            device: The device of the tensors; by default, each tensor is on the device that it was on.

        Raises:
            RuntimeError: If the slot does not have this snapshot whole.
        """
        return _state_in(self._slot(address), number, device)

    def _slot(self, address: SlotAddress) -> Slot:
        if address not in self._opened:
            self._opened[address] = Slot.opened(address)
        return self._opened[address]


def _state_in(slot: Slot, number: int, device: torch.device | None) -> StageState:
    state, storages = unpickled(slot.read_blob(number), device)
    assert isinstance(state, StageState)
    slot.read_storages(storages)
    return state


@dataclass
class Parcel:
    """A pickled state.

    Attributes:
        blob: The pickle, with a number in place of each large storage.
        storages: These storages, in the order of their numbers. Tensors that share a storage also share it on arrival.
        built: The numbers of the storages that the receiver builds.
    """

    blob: bytes
    storages: list[UntypedStorage]
    built: frozenset[int] = frozenset()

    def carrier(self) -> Carrier:
        """Return the part that RPC sends, and release it here."""
        blob, self.blob = self.blob, b""
        return Shipped(blob)

    def deliver(self, send: Callable[[list[UntypedStorage]], None]) -> None:
        """Send the storages, and release them here."""
        send(self.storages)


@dataclass(frozen=True)
class _Built:
    """Represents the storage that a recipe computes."""

    number: int


def _reduced_code(code: CodeType) -> tuple[Any, ...]:
    """Return the reduced form of code, with its file name, so that a worker's traceback shows the lines of a script.

    cloudpickle 3.1.3 replaces the file name with ``<dynamic-code>``.
    """
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if argument == "<dynamic-code>" else argument for argument in arguments)


class _StagePickler(cloudpickle.Pickler):
    """Leaves out large storages, and refuses to pickle the whole model with a layer that refers to it."""

    def __init__(self, file: io.BytesIO, forbidden: Any, construction: Construction | None, small_bytes: int) -> None:
        # one dict, because a chain of dicts would take a fifth of the time of a snapshot
        self.dispatch_table = {
            **cloudpickle.Pickler.dispatch_table,
            CodeType: _reduced_code,
            UntypedStorage: reduced_storage,
        }
        super().__init__(file)
        self._forbidden, self._construction, self._small_bytes = forbidden, construction, small_bytes
        self.storages: dict[int, UntypedStorage] = {}
        self.recipes: dict[int, Recipe] = {}
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Built):
            return obj
        if not isinstance(obj, STORAGES):
            return None
        storage, dtype = storage_of(obj)
        if storage.nbytes() <= self._small_bytes:
            return None
        key = number_of_storage(storage)
        self.storages.setdefault(key, storage)
        number = self._numbers.setdefault(key, len(self._numbers))
        return number, storage.nbytes(), dtype, storage.device

    def reducer_override(self, obj: Any) -> Any:
        if obj is self._forbidden:
            raise ValueError(
                f"a layer of the pipelined module refers to the whole model ({type(obj).__name__}), for example by a "
                "bound method or an attribute, so it cannot be sent to another process without the model; let the "
                "layer hold only what it needs"
            )
        is_tensor = isinstance(obj, Tensor) and not isinstance(obj, nn.Parameter)  # which contains its tensor
        if is_tensor and self._construction is not None and self._construction.knows(obj):
            if type(obj) is not Tensor:
                raise ValueError(
                    f"a tensor of class {type(obj).__name__} and shape {list(obj.shape)} was made without memory, in "
                    "configure_model or init_module, and only its values would arrive in another process. Make it in "
                    "__init__, or use a plain torch.Tensor"
                )
            view = self._construction.view(obj)
            if view.storage not in self.recipes:
                self.recipes[view.storage] = self._construction.recipe(obj)
            return _on_storage, (view, _Built(view.storage), obj.requires_grad, vars(obj))
        if is_capturing_hook(obj):  # captures run on stages without it, see strategies.common.transformers_compat
            return _no_hook, ()
        if type(obj) is object and (place := _global_place(obj)) is not None:
            return _global, place
        return super().reducer_override(obj)


def _global_place(sentinel: object) -> tuple[str, str] | None:
    """Return module and name of a global ``object()``, which code compares by identity; ``None`` if not found."""
    for module, own in [*sys.modules.items()]:
        for name, value in [*vars(own).items()] if module != "__main__" and isinstance(own, ModuleType) else ():
            if value is sentinel:
                return module, name
    return None


def _global(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _on_storage(view: View, storage: UntypedStorage, requires_grad: bool, attributes: dict[str, Any]) -> Tensor:
    tensor = view.on(storage).requires_grad_(requires_grad)
    vars(tensor).update(attributes)
    return tensor


def _no_hook() -> Any:
    return _does_nothing


def _does_nothing(*_: Any) -> None: ...


class _StageUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, recipes: dict[int, Recipe], device: torch.device | None) -> None:
        super().__init__(file)
        self._recipes, self._device = recipes, device
        self.storages: dict[int, UntypedStorage] = {}
        self._built: dict[int, UntypedStorage] = {}

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, _Built):
            if pid.number not in self._built:
                self._built[pid.number] = self._recipes[pid.number].replay()
            return self._built[pid.number]
        number, num_bytes, dtype, device = pid
        if number not in self.storages:
            self.storages[number] = UntypedStorage(num_bytes, device=self._device or device)
        return storage_for_pickle(self.storages[number], dtype)


def unpickled(blob: bytes, device: torch.device | None = _CPU) -> tuple[Any, list[UntypedStorage]]:
    """Return the object, and the storages in it whose values will be received, in the order of their numbers.

    Args:
        blob: The pickle; see :class:`Parcel`.
        device: The device of these storages. If it is ``None``, each is on the device that it was on when it was
            pickled.
    """
    content, recipes = pickle.loads(blob)
    unpickler = _StageUnpickler(io.BytesIO(content), recipes, device)
    found = unpickler.load()
    return found, [storage for _, storage in sorted(unpickler.storages.items())]


def pickled(
    state: Any,
    layers: nn.Sequential,
    forbidden: Any,
    construction: Construction | None = None,
    *,
    small_bytes: int = SMALL_BYTES,
) -> Parcel:
    """Pickle the state of a stage, including classes and functions that a script or notebook defines.

    Args:
        state: The object to pickle.
        layers: The layers in ``state``. The error message names the layer that cannot be pickled.
        forbidden: The whole model, which must not become part of the pickle.
        construction: Has the recipes of tensors that have not been built.
        small_bytes: The maximum size of a storage that is part of the pickle. Larger ones are left out.

    Raises:
        ValueError: If an object cannot be pickled, or refers to ``forbidden``.
    """
    hooked = [name for name, p in layers.named_parameters() if any(gradient_hooks(p))]
    if hooked:
        raise ValueError(
            f"parameter {hooked[0]} has a hook (register_hook), which cannot follow it to another process; register "
            "hooks on the output of a layer instead, in its forward. To log gradients read the parameter's .grad in "
            'on_before_optimizer_step, and pass log="parameters" to WandbLogger.watch'
        )
    for name, layer in layers.named_modules():
        if compiled_call(layer) is not None:
            warnings.warn(
                f"layer {name} was compiled by .compile(), which cannot be sent to another process: the layer runs "
                "uncompiled there. Replace it with torch.compile(layer), or compile functions that it calls.",
                stacklevel=2,
            )
    file = io.BytesIO()
    pickler = _StagePickler(file, forbidden, construction, small_bytes)
    try:
        pickler.dump(state)
    except ValueError:
        raise
    except Exception as error:  # methods of the pickled objects may raise any exception
        culprits = [
            f"layer {name}, a {type(layer).__name__}," for name, layer in layers.named_children() if _fails(layer)
        ]
        raise ValueError(
            f"{' and '.join(culprits) or 'an optimizer'} cannot be sent to another process "
            f"({type(error).__name__}: {error})"
        ) from error
    return Parcel(
        pickle.dumps((file.getvalue(), pickler.recipes)), [*pickler.storages.values()], frozenset(pickler.recipes)
    )


def _fails(layer: nn.Module) -> bool:
    try:
        cloudpickle.dumps(layer)
    except Exception:  # as above
        return True
    return False
