"""The payload of a worker: the layers of a stage and its part of the optimizers, and how the driver pickles them.

The values of large tensors are not part of the pickle: they follow over the data plane, one storage after another
(:mod:`strategies.pipeline.transport.storages`), so that no process holds a second copy of a stage. In place of tensors
that have been recorded and not built, their recipes travel (:mod:`strategies.pipeline.construction`).
"""

import io
import pickle
import warnings
from collections import ChainMap
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, ClassVar

import cloudpickle
from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer

from strategies.common.stage_layers import StageLayers
from strategies.common.torch_compat import (
    compiled_call,
    gradient_hooks,
    number_of_storage,
    storage_for_pickle,
    storage_of,
)
from strategies.common.transformers_compat import is_capturing_hook
from strategies.pipeline.construction.recipe import Recipe, View
from strategies.pipeline.construction.recording import SMALL_BYTES, Construction
from strategies.pipeline.optim.replicas import Replicas
from strategies.pipeline.schedule.tables import Placement
from strategies.pipeline.stage.layers import CallLayers, call_in_turn
from strategies.pipeline.transport.planes import GLOO
from strategies.pipeline.transport.ties import Tie


@dataclass
class Payload:
    """What the driver sends to a worker, pickled as one object so that shared objects stay shared.

    Attributes:
        index: The number of the stage.
        layers: The layers of the stage, named as in the whole module.
        device: The device of the layers.
        deferred_batch_norm: See :class:`~strategies.pipeline.stage.layers.Layers`.
        optimizers: Class and attributes of each of the user's optimizers, restricted to this stage's parameters.
        numbers: For each optimizer, the numbers that the whole optimizer gives to the parameters of this stage.
        ties: The parameters that several stages share.
        replicas: The other pipelines, if there are several.
        call: How the layers are called; see :class:`~strategies.pipeline.stage.layers.Layers`.
        reports_side_outputs: Whether the stage reports which layers have side outputs.
        copies: The same layers of copies of the model, such as averages, with values of their own.
        placement: Which process has which chunks.
        plane: The data plane; see :mod:`strategies.pipeline.transport.planes`.
    """

    index: int
    layers: StageLayers
    device: str
    deferred_batch_norm: bool
    optimizers: list[tuple[type[Optimizer], dict[str, Any]]] = field(default_factory=list)
    numbers: list[list[int]] = field(default_factory=list)
    ties: list[Tie] = field(default_factory=list)
    replicas: Replicas | None = None
    call: CallLayers = call_in_turn
    reports_side_outputs: bool = False
    copies: list[StageLayers] = field(default_factory=list)
    placement: Placement = field(default_factory=lambda: Placement((0,)))
    plane: str = GLOO


@dataclass
class Parcel:
    """A pickled payload.

    Attributes:
        blob: The pickle, with a number in place of each large storage.
        storages: These storages, in the order of their numbers. Tensors that share one share it on arrival too.
        built: The numbers of the recorded storages that the receiver builds.
    """

    blob: bytes
    storages: list[UntypedStorage]
    built: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Built:
    """Stands for the storage that a recipe computes."""

    number: int


def _reduced_code(code: CodeType) -> tuple[Any, ...]:
    """Return how code is pickled, with the name of its file, so that a worker's traceback shows the lines of a script.

    cloudpickle 3.1.3 puts ``<dynamic-code>`` in place of the name.
    """
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if argument == "<dynamic-code>" else argument for argument in arguments)


class _Pickler(cloudpickle.Pickler):
    """Leaves out large storages, and refuses to pickle the whole model with a layer that refers to it."""

    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _reduced_code}, cloudpickle.Pickler.dispatch_table)

    def __init__(
        self, file: io.BytesIO, forbidden: Any, construction: Construction | None, *, streams: bool, small_bytes: int
    ) -> None:
        super().__init__(file)
        self._forbidden, self._construction, self._streams = forbidden, construction, streams
        self._small_bytes = small_bytes
        self.storages: dict[int, UntypedStorage] = {}
        self.recipes: dict[int, Recipe] = {}
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Built):
            return obj
        found = storage_of(obj) if self._streams else None
        if found is None or found[0].nbytes() <= self._small_bytes:
            return None
        storage, dtype = found
        key = number_of_storage(storage)
        self.storages.setdefault(key, storage)
        number = self._numbers.setdefault(key, len(self._numbers))
        return number, storage.nbytes(), dtype

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
        return super().reducer_override(obj)


def _on_storage(view: View, storage: UntypedStorage, requires_grad: bool, attributes: dict[str, Any]) -> Tensor:
    tensor = view.on(storage).requires_grad_(requires_grad)
    vars(tensor).update(attributes)
    return tensor


def _no_hook() -> Any:
    return _does_nothing


def _does_nothing(*_: Any) -> None: ...


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, recipes: dict[int, Recipe]) -> None:
        super().__init__(file)
        self._recipes = recipes
        self.storages: dict[int, UntypedStorage] = {}
        self._built: dict[int, UntypedStorage] = {}

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, _Built):
            if pid.number not in self._built:
                self._built[pid.number] = self._recipes[pid.number].replay()
            return self._built[pid.number]
        number, num_bytes, dtype = pid
        if number not in self.storages:
            self.storages[number] = UntypedStorage(num_bytes)
        return storage_for_pickle(self.storages[number], dtype)


def unpickled(blob: bytes) -> tuple[Any, list[UntypedStorage]]:
    """Return a payload, and the storages in it whose values are still to be received, in the order of their numbers."""
    pickle_of_payload, recipes = pickle.loads(blob)
    unpickler = _Unpickler(io.BytesIO(pickle_of_payload), recipes)
    payload = unpickler.load()
    return payload, [storage for _, storage in sorted(unpickler.storages.items())]


def pickled(
    payload: Any,
    layers: nn.Sequential,
    forbidden: Any,
    construction: Construction | None = None,
    *,
    streams: bool = True,
    small_bytes: int = SMALL_BYTES,
) -> Parcel:
    """Pickle the payload of a worker, including classes and functions that a script or notebook defines.

    Args:
        payload: The object to pickle.
        layers: The layers in it; the error message names the one that cannot be pickled.
        forbidden: The whole model, which must not become part of the payload.
        construction: What knows the recipes of tensors that have been recorded and not built.
        streams: Leave out the values of large tensors. Otherwise they are part of the pickle.
        small_bytes: The largest storage that is part of the pickle nevertheless.

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
                f"layer {name} was compiled by .compile(), which is lost on the way to another process: it runs "
                "uncompiled there. Put torch.compile(layer) in its place, or compile functions that it calls.",
                stacklevel=2,
            )
    file = io.BytesIO()
    pickler = _Pickler(file, forbidden, construction, streams=streams, small_bytes=small_bytes)
    try:
        pickler.dump(payload)
    except ValueError:
        raise
    except Exception as error:  # pickling raises whatever the objects' own methods raise
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
