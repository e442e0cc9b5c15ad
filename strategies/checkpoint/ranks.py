"""Checkpoints of ranks that run the same script and have divided the optimizer states: ZeRO.

full      every rank ──optimizer states──▶ rank 0, which has the checkpoint of one process
sharded   every rank: its share ──▶ torch.distributed.checkpoint.save ──▶ its own file;  rank 0: meta.pt
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from strategies.checkpoint.references import Unread, with_values
from strategies.checkpoint.save_and_load import sharded_tensors, writing_shards
from strategies.common.trees import layouts, take_over, with_meta_tensors
from strategies.optim.restricted import in_order
from strategies.sharding.divided_optimizers import Ownership, assign_owners
from strategies.sharding.gathered_states import gather_state_dict, gather_states


class DividedStates(ABC):
    """The optimizer states that ranks have divided, gathered for checkpoints and loaded from them.

    Args:
        group: The ranks, on gloo.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._gathered: dict[Optimizer, dict[Any, Any]] = {}

    def state_dict(self, optimizer: Optimizer, *, values: bool) -> dict[str, Any]:
        """The state dict that one process would have. Every rank calls this.

        Args:
            optimizer: A divided optimizer.
            values: If ``True``, rank 0 gathers the values and all other ranks return an empty dict. If ``False``, each
                rank returns what it writes to a sharded checkpoint. Rank 0 also returns what the other ranks write,
                without values.
        """
        if not values:
            return self._parts(optimizer)
        state = self._whole(optimizer)
        self._gathered[optimizer] = state.get("state", {})
        return state

    def refresh(self, optimizer: Optimizer) -> None:
        """Update the most recent result of :meth:`state_dict` after a method of the optimizer was called.

        In one process, a state dict shares its tensors with the optimizer. It therefore reflects what a hook such as
        ``on_save_checkpoint`` changes through the optimizer. Every rank calls this.
        """
        if optimizer in self._gathered:
            take_over(self._gathered[optimizer], self._whole(optimizer).get("state", {}))

    def forget(self) -> None:
        """Release the states that have been gathered."""
        self._gathered.clear()

    def load(
        self, optimizers: Sequence[Optimizer | None], states: Sequence[Mapping[str, Any]], unread: Unread | None
    ) -> None:
        """Load this rank's part of the optimizer states of a checkpoint that any number of ranks wrote.

        Args:
            optimizers: The divided optimizers, in the order of ``states``; ``None`` for a state that is not loaded.
            states: The state dicts in the checkpoint, which ``on_load_checkpoint`` may have changed.
            unread: The tensors of a sharded checkpoint that have not been read.
        """
        own = []
        for k, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
            if optimizer is not None:
                whole = state["state"]
                located = whole if unread is None else unread.located(whole, f"optimizer_states.{k}.state")
                own.append((optimizer, {**state, "state": self._own_part(optimizer, located)}))
        for optimizer, state in own:  # only after everything has been read
            optimizer.load_state_dict(state)

    @abstractmethod
    def _whole(self, optimizer: Optimizer) -> dict[str, Any]:
        """Gather the state dict on rank 0, and return an empty dict on the other ranks."""

    @abstractmethod
    def _parts(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return what this rank writes. On rank 0, also return what the other ranks write, without values."""

    @abstractmethod
    def _own_part(self, optimizer: Optimizer, states: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return this rank's part of the states of a checkpoint. Reads the values of its references."""


class RankStates(DividedStates):
    """Optimizer states of whole parameters: one rank has the state of each parameter.

    Args:
        ownership: Which rank has the state of which parameter.
        group: The ranks, on gloo.
    """

    def __init__(self, ownership: Ownership, group: ProcessGroup) -> None:
        super().__init__(group)
        self._ownership = ownership

    def _whole(self, optimizer: Optimizer) -> dict[str, Any]:
        return gather_state_dict(self._own_state_dict(optimizer), self._group)

    def _parts(self, optimizer: Optimizer) -> dict[str, Any]:
        state = self._own_state_dict(optimizer)
        others = with_meta_tensors(gather_states(layouts(state["state"]), self._group))
        return {**state, "state": in_order({**others, **state["state"]})}

    def _own_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict without states of other ranks' parameters, which user code may have read or loaded."""
        state = optimizer.state_dict()
        return {**state, "state": self._ownership.own_part(optimizer, state["state"])}

    def _own_part(self, optimizer: Optimizer, states: Mapping[Any, Any]) -> dict[Any, Any]:
        part: dict[Any, Any] = with_values(self._ownership.own_part(optimizer, states))
        return part


def own_tensors(checkpoint: Mapping[str, Any], parameters: Collection[str], group: ProcessGroup) -> dict[str, Tensor]:
    """Return the tensors that this rank writes, by key: its optimizer states and its share of the parameters.

    Every rank writes its rows of a ``DTensor``. Rank 0 writes the rest of the model's state dict, such as buffers and
    metrics, which may differ between ranks.

    Args:
        checkpoint: The checkpoint of this rank.
        parameters: The names of the model's parameters.
        group: The process group of the ranks.
    """
    everything = sharded_tensors(checkpoint)
    divided = {key: value for key, value in everything.items() if isinstance(value, DTensor)}
    tensors = {key: value for key, value in everything.items() if key not in divided}
    weights = {key: value for key, value in tensors.items() if key.startswith("state_dict.")}
    shared = [key for key in weights if key.removeprefix("state_dict.") in parameters]
    owners = assign_owners([weights[key].nbytes for key in shared], [0] * group.size())
    owner_of = dict(zip(shared, owners, strict=True))
    own = {key: value for key, value in weights.items() if owner_of.get(key, 0) == group.rank()}
    own.update({key: value for key, value in tensors.items() if key not in weights and not value.is_meta})
    return {**own, **{key: value for key, value in divided.items() if value.to_local().numel()}}


def save_over_ranks(checkpoint: Mapping[str, Any], path: Path, own: Mapping[str, Tensor], group: ProcessGroup) -> None:
    """Write a sharded checkpoint. Every rank calls this.

    Args:
        checkpoint: The checkpoint. Only rank 0's is used, and only the shapes and dtypes of its sharded tensors.
        path: The directory, the same on all ranks.
        own: The tensors that this rank writes; see :func:`own_tensors`.
        group: The process group of the ranks, on gloo. Nothing else may use the group at the same time.

    Raises:
        RuntimeError: On every rank, if one rank fails. A previous checkpoint at ``path`` is then unchanged.
    """
    failure, cause = None, None
    if group.rank() > 0:
        if (shards := _broadcast(None, group)) is not None:
            _save_shards(own, shards, group, ())
        failure = _broadcast(None, group)
    else:
        has_told = False
        try:
            with writing_shards(checkpoint, path) as shards:
                has_told = True
                _broadcast(shards, group)
                if failure := _save_shards(own, shards, group, sharded_tensors(checkpoint)):
                    raise RuntimeError(failure)
        except Exception as error:  # of any kind: the other ranks wait for the outcome
            failure, cause = failure or f"rank 0: {_described(error)}", error
        if not has_told:
            _broadcast(None, group)
        _broadcast(failure, group)
    if failure is not None:
        raise RuntimeError(f"the checkpoint {path} could not be saved: {failure}") from cause


def _save_shards(own: Mapping[str, Tensor], shards: Path, group: ProcessGroup, wanted: Iterable[str]) -> str | None:
    """Write this rank's file and, on rank 0, the metadata. Returns a description of the failures of all ranks."""
    try:
        dcp.save(
            dict(own),
            storage_writer=dcp.FileSystemWriter(shards),
            planner=_CheckingPlanner(wanted),
            process_group=group,
        )
    except CheckpointException as error:  # raised on every rank
        for cause, _ in error.failures.values():
            if not isinstance(cause, Exception):
                raise cause from None  # Ctrl-C
        return "; ".join(f"rank {rank}: {_described(cause)}" for rank, (cause, _) in error.failures.items())
    return None


class _CheckingPlanner(dcp.DefaultSavePlanner):
    """Checks on rank 0 that all ranks together write exactly the tensors of rank 0's checkpoint."""

    def __init__(self, wanted: Iterable[str]) -> None:
        super().__init__()
        self._wanted = set(wanted)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        planned = {item.index.fqn for plan in all_plans for item in plan.items}
        if self._wanted != planned:
            raise RuntimeError(
                "ranks do not agree on the tensors of the checkpoint, so it has not been written: only rank 0 has "
                f"{sorted(self._wanted - planned)}, only other ranks have {sorted(planned - self._wanted)}. "
                "on_save_checkpoint must do the same on every rank."
            )
        return super().create_global_plan(all_plans)


def _broadcast(value: Any, group: ProcessGroup) -> Any:
    """Return the value of rank 0 on every rank."""
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
