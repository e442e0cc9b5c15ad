"""Return a stage from its worker to the driver's objects, which had stand-ins while the pipeline ran.

    worker ── capture ──▶ shelf ── one tensor at a time ──▶ parameters, buffers, optimizers, attributes

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
from strategies.pipeline.state.mirror import Mirror, set_extra_states
from strategies.pipeline.state.stand_ins import move_from_meta


class PartOfModule(NamedTuple):
    """The driver's objects for one module of a stage: for its layers, or for a copy of them.

    Attributes:
        layers: The layers.
        whole: The model that contains them. Another part of the model may share a parameter with them.
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
    """Return the state of a worker to the driver, even if another stage has failed.

    Values of tensors are fetched first. What may fail in a stage (states of optimizers, pickling of objects,
    ``get_extra_state`` of layers) is captured after that, so these values are not lost with it.

    Args:
        remote: The stage.
        modules: The layers of the stage, and the same layers of each copy of the model.
        optimizers: The user's optimizers.
        mirror: The attributes that were last sent to the worker; ``None`` if it has run nothing that may change them.
        with_grads: Whether to also fetch gradients.

    Raises:
        Exception: Any failure. Values that were fetched before it are on the driver.
    """
    tensors = [Part(PartKind.TENSORS, k) for k in range(len(modules))]
    states = [Part(PartKind.OPTIMIZER, k) for k in range(len(optimizers.optimizers))]
    layers = modules[0].layers
    if mirror is not None:
        mirror.send_buffers(remote)
    shelved = ShelvedPart.rescued(remote, [*tensors, *([Part(PartKind.GRADS)] if with_grads else [])])

    def values(part: Part) -> Any:
        return shelved.pop(part).values(in_rescue)

    for part, module in zip(tensors, modules, strict=True):
        move_from_meta(module.layers, module.whole, module.optimizers, values(part))
    if with_grads:
        grads = values(Part(PartKind.GRADS))
        for name, parameter in layers.named_parameters():
            if (grad := grads[name]) is not None:
                parameter.grad = grad
    shelved = ShelvedPart.rescued(remote, states)
    for part in states:
        optimizers.take_back(part.number, values(part))
    if mirror is not None:
        shelved = ShelvedPart.rescued(remote, [Part(PartKind.ATTRIBUTES), Part(PartKind.OBJECTS)])
        mirror.take_back(values(Part(PartKind.ATTRIBUTES)), values(Part(PartKind.OBJECTS)))
        shelved = ShelvedPart.rescued(remote, [Part(PartKind.EXTRA_STATE)])
        set_extra_states(layers, values(Part(PartKind.EXTRA_STATE)))
