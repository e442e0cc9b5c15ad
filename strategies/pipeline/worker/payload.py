"""The payload of a worker: the layers of a stage and its part of the optimizers, and how the driver pickles them."""

import io
import warnings
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
from torch import nn
from torch.optim import Optimizer

from strategies.common.torch_compat import has_gradient_hooks, is_compiled_in_place
from strategies.common.transformers_compat import is_capturing_hook
from strategies.pipeline.optim.replicas import Replicas
from strategies.pipeline.stage.layers import CallLayers, call_in_turn
from strategies.pipeline.transport.ties import Tie


@dataclass
class Payload:
    """What the driver sends to a worker, pickled as one object so that shared objects stay shared.

    Attributes:
        index: The number of the stage.
        layers: The layers of the stage, named as in the whole module.
        first_layer: The place of the first layer in the whole module.
        device: The device of the layers.
        deferred_batch_norm: See :class:`~strategies.pipeline.stage.stage.Stage`.
        optimizers: Class and attributes of each of the user's optimizers, restricted to this stage's parameters.
        numbers: For each optimizer, the numbers that the whole optimizer gives to the parameters of this stage.
        ties: The parameters that several stages share.
        replicas: The other pipelines, if there are several.
        call: How the layers are called; see :class:`~strategies.pipeline.stage.layers.Layers`.
        reports_side_outputs: Whether the stage reports which layers have side outputs.
        copies: The same layers of copies of the model, such as averages, with values of their own.
    """

    index: int
    layers: nn.Sequential
    first_layer: int
    device: str
    deferred_batch_norm: bool
    optimizers: list[tuple[type[Optimizer], dict[str, Any]]] = field(default_factory=list)
    numbers: list[list[int]] = field(default_factory=list)
    ties: list[Tie] = field(default_factory=list)
    replicas: Replicas | None = None
    call: CallLayers = call_in_turn
    reports_side_outputs: bool = False
    copies: list[nn.Sequential] = field(default_factory=list)


class _Pickler(cloudpickle.Pickler):
    """Refuses to pickle the whole model with a layer that refers to it."""

    def __init__(self, file: io.BytesIO, forbidden: Any) -> None:
        super().__init__(file)
        self._forbidden = forbidden

    def reducer_override(self, obj: Any) -> Any:
        if obj is self._forbidden:
            raise ValueError(
                f"a layer of the pipelined module refers to the whole model ({type(obj).__name__}), for example by a "
                "bound method or an attribute, so it cannot be sent to another process without the model; let the "
                "layer hold only what it needs"
            )
        if is_capturing_hook(obj):  # captures run on stages without it, see strategies.common.transformers_compat
            return _no_hook, ()
        return super().reducer_override(obj)


def _no_hook() -> Any:
    return _does_nothing


def _does_nothing(*_: Any) -> None: ...


def pickled(payload: Any, layers: nn.Sequential, forbidden: Any) -> bytes:
    """Pickle the payload of a worker, including classes and functions that a script or notebook defines.

    Args:
        payload: The object to pickle.
        layers: The layers in it; the error message names the one that cannot be pickled.
        forbidden: The whole model, which must not become part of the payload.

    Raises:
        ValueError: If an object cannot be pickled, or refers to ``forbidden``.
    """
    hooked = [name for name, p in layers.named_parameters() if has_gradient_hooks(p)]
    if hooked:
        raise ValueError(
            f"parameter {hooked[0]} has a hook (register_hook), which cannot follow it to another process; register "
            "hooks on the output of a layer instead, in its forward. To log gradients read the parameter's .grad in "
            'on_before_optimizer_step, and pass log="parameters" to WandbLogger.watch'
        )
    for name, layer in layers.named_modules():
        if is_compiled_in_place(layer):
            warnings.warn(
                f"layer {name} was compiled by .compile(), which is lost on the way to another process: it runs "
                "uncompiled there. Put torch.compile(layer) in its place, or compile functions that it calls.",
                stacklevel=2,
            )
    file = io.BytesIO()
    try:
        _Pickler(file, forbidden).dump(payload)
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
    return file.getvalue()


def _fails(layer: nn.Module) -> bool:
    try:
        cloudpickle.dumps(layer)
    except Exception:  # as above
        return True
    return False
