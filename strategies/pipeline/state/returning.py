"""The way back of a stage: what its worker holds comes into the driver's objects, which had stand-ins meanwhile.

    worker ── capture ──▶ shelf ── one tensor after another ──▶ parameters, buffers, optimizers, attributes

The objects of the driver stay the same, because optimizers and users refer to them. No tensor is on the driver twice.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from strategies.common.stage_layers import StageLayers
from strategies.pipeline.control.client import RemoteStage
from strategies.pipeline.control.parts import Part, PartKind
from strategies.pipeline.control.shelf import ShelvedPart, in_rescue
from strategies.pipeline.optim.optimizers import PipelineOptimizers
from strategies.pipeline.state.mirror import Mirror
from strategies.pipeline.state.stand_ins import move_from_meta


class PartOfModule(NamedTuple):
    """What the driver has of one module of a stage: of its layers, or of a copy of them.

    Attributes:
        layers: The layers.
        whole: The model that they are part of; another part of it may share a parameter with them.
        optimizers: Optimizers that may hold the parameters.
    """

    layers: StageLayers
    whole: nn.Module
    optimizers: Sequence[Optimizer]


def bring_back(
    remote: RemoteStage,
    modules: Sequence[PartOfModule],
    optimizers: PipelineOptimizers,
    *,
    mirror: Mirror | None,
    with_grads: bool,
) -> None:
    """Bring back what a worker holds, even if another stage has failed.

    Values come first. Code of layers (``get_extra_state``, pickling of objects) runs after that, so they are not lost
    if it fails.

    Args:
        remote: The stage.
        modules: Its layers, and those of each copy of the model.
        optimizers: The user's optimizers.
        mirror: What the worker was last told of attributes; ``None`` if it has run nothing that may change them.
        with_grads: Whether gradients come back too.

    Raises:
        Exception: What has failed on the way; values that have come before that are here.
    """
    tensors = [Part(PartKind.TENSORS, k) for k in range(len(modules))]
    states = [Part(PartKind.OPTIMIZER, k) for k in range(len(optimizers.optimizers))]
    layers = modules[0].layers
    if mirror is not None:
        mirror.carry_buffers(remote)
    shelved = ShelvedPart.rescued(remote, [*tensors, *([Part(PartKind.GRADS)] if with_grads else []), *states])

    def values(part: Part) -> Any:
        return shelved.pop(part).values(in_rescue)

    for part, module in zip(tensors, modules, strict=True):
        move_from_meta(module.layers, module.whole, module.optimizers, values(part))
    if with_grads:
        grads = values(Part(PartKind.GRADS))
        for name, parameter in layers.named_parameters():
            if (grad := grads[name]) is not None:
                parameter.grad = grad
    for part in states:
        optimizers.take_back(part.number, values(part))
    if mirror is not None:
        shelved = ShelvedPart.rescued(remote, [Part(PartKind.ATTRIBUTES), Part(PartKind.OBJECTS)])
        mirror.take_back(values(Part(PartKind.ATTRIBUTES)), values(Part(PartKind.OBJECTS)))
        shelved = ShelvedPart.rescued(remote, [Part(PartKind.EXTRA_STATE)])
        if extra := values(Part(PartKind.EXTRA_STATE)):
            layers.load_state_dict(extra, strict=False)
