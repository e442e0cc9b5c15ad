"""Logged values that each rank must have, computed from the calls of ``self.log`` in one process by Lightning's rules.

One process runs the batches of all ranks, one after another (see :mod:`trainer.verification.observed_run`)::

                         of a step                              of an epoch
    sync_dist=False      the value of the rank's own batch      the mean over the rank's own batches
    sync_dist=True       the mean over the batches of ranks     the mean over all batches
    torchmetrics         the value of the rank's own batch      the value of all batches

A mean over batches is weighted by ``batch_size``. ``reduce_fx`` may replace the mean by a sum, a minimum or a maximum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ValuesByName = dict[str, Any]


@dataclass(frozen=True)
class LoggedCall:
    """One call of ``self.log``.

    Attributes:
        name: The name of the value.
        value: The value; ``None`` if a metric of torchmetrics was logged.
        batch_size: The weight of the value in a mean over batches.
        reduce_fx: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``.
        is_synchronised: Whether the value is reduced over the ranks.
        on_step: Whether the value of each step is logged.
        on_epoch: Whether the value of the epoch is logged.
    """

    name: str
    value: float | None
    batch_size: float = 1
    reduce_fx: str = "mean"
    is_synchronised: bool = False
    on_step: bool = True
    on_epoch: bool = False

    def named(self, kind: str) -> list[str]:
        """Return the names under which callbacks find the value of a ``"step"`` or an ``"epoch"``."""
        return [self.name, f"{self.name}_{kind}"] if self.on_step and self.on_epoch else [self.name]


@dataclass(frozen=True)
class LoggedOfRanks:
    """Logged values of all ranks.

    Attributes:
        of_batches: The values after each batch, in the order of one process.
        of_epoch: The values of the epoch, of each rank.
    """

    of_batches: list[ValuesByName]
    of_epoch: list[ValuesByName]


def logged_of_ranks(
    calls: Sequence[Sequence[LoggedCall]], ranks: int, of_batches: Sequence[ValuesByName], of_epoch: Mapping[str, Any]
) -> LoggedOfRanks:
    """Return the values that the ranks must have logged.

    Args:
        calls: The calls during each batch of one process.
        ranks: The number of ranks.
        of_batches: The values that one process has after each batch.
        of_epoch: The values that one process has after the epoch.
    """
    now: list[ValuesByName] = [{} for _ in range(ranks)]  # a value remains until its name is logged again
    found = []
    for first in range(0, len(calls), ranks):
        together = calls[first : first + ranks]
        for rank, own in enumerate(together):
            for call in own:
                if not call.on_step:
                    continue
                value: Any = call.value
                if value is None:
                    value = of_batches[first + rank].get(call.name)
                elif call.is_synchronised:
                    of_name = [each for batch in together for each in batch if each.name == call.name]
                    value = _reduced([each.value or 0.0 for each in of_name], call.reduce_fx)
                now[rank].update(dict.fromkeys(call.named("step"), value))
        found += [dict(now[rank]) for rank in range(len(together))]
    for numbered in _of_epoch(calls).values():
        sample = numbered[0][1]
        names = sample.named("epoch")
        divided = [[each for batch, each in numbered if batch % ranks == rank] for rank in range(ranks)]
        for rank, logged in enumerate(now):
            value = of_epoch.get(names[-1]) if sample.value is None else _over_epoch(divided, rank)
            logged.update(dict.fromkeys(names, value))
    return LoggedOfRanks(found, now)


def _of_epoch(calls: Sequence[Sequence[LoggedCall]]) -> dict[str, list[tuple[int, LoggedCall]]]:
    """Return the calls that log values of an epoch, with the number of their batch, by name."""
    found: dict[str, list[tuple[int, LoggedCall]]] = {}
    for batch, own in enumerate(calls):
        for call in own:
            if call.on_epoch:
                found.setdefault(call.name, []).append((batch, call))
    return found


def _over_epoch(of_ranks: Sequence[Sequence[LoggedCall]], rank: int) -> float | None:
    """Return the value of an epoch on one rank, given the calls of all ranks for one name."""
    sample = next(call for own in of_ranks for call in own)
    kept = of_ranks if sample.is_synchronised else [of_ranks[rank]]
    if not all(kept):  # a rank has not logged it
        return None
    if sample.reduce_fx != "mean":
        return _reduced([each.value or 0.0 for own in kept for each in own], sample.reduce_fx)
    totals = [sum((each.value or 0.0) * each.batch_size for each in own) for own in kept]
    sizes = [sum(each.batch_size for each in own) for own in kept]
    size = sum(sizes) / len(kept)
    if all(isinstance(each, int) for each in sizes):
        size = float(int(size))  # Lightning keeps the mean of whole numbers in an integer
    return sum(totals) / len(kept) / size if size else None


def _reduced(values: Sequence[float], reduce_fx: str) -> float:
    if reduce_fx == "mean":
        return sum(values) / len(values)
    if reduce_fx == "sum":
        return sum(values)
    return min(values) if reduce_fx == "min" else max(values)
