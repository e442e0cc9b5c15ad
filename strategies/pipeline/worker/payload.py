"""What is shipped to a worker: the layers of a stage, and its part of the optimizers."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from strategies.pipeline.optim.replicas import Replicas
from strategies.pipeline.stage.calling import CallLayers, call_in_turn
from strategies.pipeline.transport.ties import Tie


@dataclass
class Cargo:
    """What is shipped to a worker, pickled as one object so that what is shared stays shared.

    Attributes:
        index: The stage's number.
        layers: The stage's layers, named as in the whole module.
        first_layer: The first one's place in the whole module.
        device: Where they are to live.
        deferred_batch_norm: See :class:`~strategies.pipeline.stage.stage.Stage`.
        optimizers: Class and attributes of each of the user's optimizers, restricted to this stage's parameters.
        numbers: For each optimizer, the numbers that the whole optimizer gives to the parameters of this stage.
        ties: The parameters that several stages share.
        replicas: The other pipelines, if there are several.
        call: How the layers are called; see :class:`~strategies.pipeline.stage.layers.Layers`.
        notes_side_outputs: Whether the stage says which layers have side outputs.
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
    notes_side_outputs: bool = False
    copies: list[nn.Sequential] = field(default_factory=list)
