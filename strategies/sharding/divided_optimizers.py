"""Optimizers divided over ranks: each rank steps its share of every optimizer's parameters, and has only their states.

This is ZeRO, stages 1 and 2, and ``zero_stage`` of a pipeline; stage 3 divides rows
(:mod:`strategies.sharding.row_optimizers`). Outside of a step, the groups of an optimizer are whole, as schedulers and
training loops expect. Within a step, the groups contain only the parameters of this rank.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from strategies.optim.restricted import narrowed, parameters_of


class Ownership:
    """Divides the parameters of optimizers among ranks. Every rank computes the same result without communication.

    Parameters on the ``meta`` device belong to another stage and to none of these ranks.

    Args:
        optimizers: The same optimizers on every rank.
        rank: The number of this rank.
        size: Number of ranks.
        owners: Owners that have been assigned before. Further parameters may have been added since.
    """

    def __init__(
        self, optimizers: Iterable[Optimizer], rank: int, size: int, owners: Mapping[Tensor, int] | None = None
    ) -> None:
        self.optimizers, self.rank, self._size = list(optimizers), rank, size
        self.owners: dict[Tensor, int] = dict(owners or {})
        self.optimizer_of: dict[Tensor, int] = {
            p: number for number, own in enumerate(self.optimizers) for p in parameters_of(own) if p in self.owners
        }
        """For each parameter, the number of its optimizer."""
        self._narrowed: dict[Optimizer, ExitStack] = {}
        self.take_in()
        for optimizer in self.optimizers:  # some create states in their constructor
            for parameter in [p for p in optimizer.state if self.owners.get(p, rank) != rank]:
                del optimizer.state[parameter]

    def take_in(self) -> list[Tensor]:
        """Assign owners to parameters that have none yet, and return these parameters."""
        taken_in = []
        for number, optimizer in enumerate(self.optimizers):
            new = [p for p in parameters_of(optimizer) if p not in self.owners and not p.is_meta]
            for trained in (True, False):  # frozen parameters have no states and must not count as load
                self._assign(number, [p for p in new if p.requires_grad is trained])
            taken_in += new
        return taken_in

    def owned(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the parameters of an optimizer whose states this rank has."""
        return [p for p in parameters_of(optimizer) if self.owners.get(p) == self.rank]

    def narrow(self, optimizer: Optimizer, done: Collection[Tensor] = ()) -> None:
        """Reduce the groups to this rank's parameters, without those in ``done``, which have already been stepped."""
        self.widen(optimizer)  # after a step that failed
        scope = self._narrowed[optimizer] = ExitStack()
        scope.enter_context(narrowed(optimizer, [p for p in self.owned(optimizer) if p not in done]))

    def is_narrowed(self, optimizer: Optimizer) -> bool:
        """Return whether a step is in progress or has failed."""
        return optimizer in self._narrowed

    def widen(self, optimizer: Optimizer) -> None:
        """Restore the whole groups."""
        if (scope := self._narrowed.pop(optimizer, None)) is not None:
            scope.close()

    def widen_all(self) -> None:
        """Restore the whole groups of all optimizers."""
        for optimizer in list(self._narrowed):
            self.widen(optimizer)

    def own_part(self, optimizer: Optimizer, states: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the states of an optimizer, by the number of the parameter, without those that other ranks own."""
        parameters = parameters_of(optimizer)
        others = {number for number, p in enumerate(parameters) if self.owners.get(p, self.rank) != self.rank}
        return {number: value for number, value in states.items() if number not in others}

    def _assign(self, number: int, parameters: list[Tensor]) -> None:
        loads = [0] * self._size
        for parameter, owner in self.owners.items():
            # Balanced for each optimizer, because optimizers differ in the size of states for a parameter.
            loads[owner] += parameter.nbytes * (self.optimizer_of[parameter] == number and parameter.requires_grad)
        owners = assign_owners([parameter.nbytes for parameter in parameters], loads)
        self.owners.update(zip(parameters, owners, strict=True))
        self.optimizer_of.update(dict.fromkeys(parameters, number))


def assign_owners(sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Assign each item, largest first, to the rank with the smallest load (sorted-greedy).

    The largest load is at most 4/3 of the largest load of the best partition (Graham, 1969). All loads are nearly equal
    if items are small compared with a share.

    Args:
        sizes: Size of each item.
        loads: The initial load of each rank.

    Returns:
        The rank of each item.
    """
    filled, owners = list(loads), [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        owners[item] = min(range(len(filled)), key=lambda rank: filled[rank])
        filled[owners[item]] += sizes[item]
    return owners
