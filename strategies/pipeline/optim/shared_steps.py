"""ZeRO within a pipeline: the replicas of a stage divide its optimizer state, and the steps, among them.

gradients, the same in all ──▶ each steps its share ──▶ new values to all
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from strategies.optim.restricted import parameters_of, within_a_step
from strategies.pipeline.optim.replicas import Averaging
from strategies.sharding.ownership import Ownership


class SharedSteps:
    """One process's part in the steps of its stage.

    Args:
        optimizers: Over the parameters that live in this process; what is on the ``meta`` device is another stage's.
        averaging: Reaches the same stage of the other replicas.
    """

    def __init__(self, optimizers: Iterable[Optimizer], averaging: Averaging) -> None:
        self._averaging = averaging
        self._ownership = Ownership(optimizers, averaging.replica, averaging.count)

    def before_step(self, optimizer: Optimizer) -> None:
        """Leaves this process's share in the groups; gradients are averages by now."""
        self._ownership.narrow(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Makes the groups whole again, and brings the new values to all replicas."""
        if within_a_step(optimizer) or not self._ownership.is_narrowed(optimizer):
            return
        self._ownership.widen(optimizer)
        for owner in range(self._averaging.count):
            own = [p for p in parameters_of(optimizer) if self._ownership.owners.get(p) == owner]
            self._averaging.spread(own, owner)

    def gathered(self, states: dict[int, Any]) -> dict[int, Any]:
        """On the first replica the states of the stage's parameters, put together from all; on the others nothing."""
        return self._averaging.gathered(states)

    def own_part(self, optimizer: Optimizer, states: Mapping[Any, Any]) -> dict[Any, Any]:
        """Out of the states of an optimizer, those that this process keeps."""
        return self._ownership.own_part(optimizer, states)

    def close(self) -> None:
        """Leaves the optimizers whole, but for their state."""
        self._ownership.widen_all()
