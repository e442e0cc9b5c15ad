"""How a worker runs its stage, without the state of the stage: the device and the other processes.

The set-up has no tensors. The driver sends it whenever a worker starts, with any carrier of the state
(:mod:`strategies.pipeline.state.carriers`).
"""

from dataclasses import dataclass, field

from strategies.launch.session import Peers
from strategies.pipeline.optim.replicas import Replicas
from strategies.pipeline.schedule.tables import Placement
from strategies.pipeline.stage.layers import CallLayers, call_one_by_one
from strategies.pipeline.transport.planes import GLOO
from strategies.pipeline.transport.ties import Tie


@dataclass(frozen=True)
class StageSetup:
    """How a worker runs a stage.

    Attributes:
        index: The number of the stage, which is the rank of the process.
        device: The device of the layers.
        deferred_batch_norm: See :class:`~strategies.pipeline.stage.layers.Layers`.
        ties: The parameters that several stages share.
        replicas: The other pipelines, if there are several.
        layer_peers: The pipelines that divide the layers of this stage, if there are several.
        call: How the layers are called; see :class:`~strategies.pipeline.stage.layers.Layers`.
        reports_side_outputs: Whether the stage reports which layers have side outputs.
        placement: The process of each chunk.
        plane: The data plane; see :mod:`strategies.pipeline.transport.planes`.
        is_verified: Whether the stage may have to compute steps a second time, and compare.
    """

    index: int
    device: str
    deferred_batch_norm: bool
    ties: list[Tie] = field(default_factory=list)
    replicas: Replicas | None = None
    layer_peers: Peers | None = None
    call: CallLayers = call_one_by_one
    reports_side_outputs: bool = False
    placement: Placement = field(default_factory=lambda: Placement((0,)))
    plane: str = GLOO
    is_verified: bool = False
