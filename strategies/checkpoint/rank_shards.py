"""A checkpoint in parts of ranks that run the same script: each writes its own, at the same time as the others.

every rank:  plan ──▶ rank 0: who writes what, and where ──▶ every rank: write ──▶ rank 0: meta.pt, or what failed
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.planner import SavePlan

from strategies.checkpoint import shards
from strategies.common.trees import flat
from strategies.sharding.ownership import assign_owners


def own_part(checkpoint: Mapping[str, Any], group: ProcessGroup) -> dict[str, Tensor]:
    """What this rank is to write, by flat names: the optimizer states that it has, and its share of the weights."""
    weights = flat({"state_dict": checkpoint["state_dict"]})
    owners = assign_owners([tensor.nbytes for tensor in weights.values()], [0] * group.size())
    states = flat({part: checkpoint[part] for part in shards.PARTS if part in checkpoint and part != "state_dict"})
    own = {name: value for (name, value), rank in zip(weights.items(), owners, strict=True) if rank == group.rank()}
    return {**own, **{name: value for name, value in states.items() if not value.is_meta}}


def save(checkpoint: Mapping[str, Any], path: Path, own: Mapping[str, Tensor], group: ProcessGroup) -> None:
    """Writes a checkpoint to ``path``; every rank calls this.

    Args:
        checkpoint: On rank 0 the checkpoint; in its parts only names, shapes and types are looked at.
        path: The directory, the same for all ranks.
        own: What this rank writes.
        group: The ranks, on gloo; nobody else uses it at the same time.

    Raises:
        RuntimeError: On every rank, if something went wrong on one; the checkpoint before is still there then.
    """
    if group.rank() == 0:
        failure = _lead(checkpoint, path, own, group)
        dist.broadcast_object_list([None if failure is None else _words(failure)], group=group, group_src=0)
        if failure is not None:
            raise failure
        return
    dist.gather_object(shards.plan(own), group=group, group_dst=0)
    order: list[tuple[Path, SavePlan] | None] = [None]
    dist.scatter_object_list(order, group=group, group_src=0)
    if order[0] is not None:
        dist.gather_object(_attempt(*order[0], own), group=group, group_dst=0)
    failed: list[str | None] = [None]
    dist.broadcast_object_list(failed, group=group, group_src=0)
    if failed[0] is not None:
        raise RuntimeError(f"the checkpoint {path} could not be saved: {failed[0]}")


def _lead(
    checkpoint: Mapping[str, Any], path: Path, own: Mapping[str, Tensor], group: ProcessGroup
) -> Exception | None:
    """Rank 0's part; returns what went wrong, so that the others can be told."""
    plans, size = _gathered(shards.plan(own), group), group.size()
    told = False

    def write_all(directory: Path, final: Sequence[SavePlan]) -> list[Any]:
        nonlocal told
        told = True
        dist.scatter_object_list([None], [(directory, plan) for plan in final], group=group, group_src=0)
        results = _gathered(_attempt(directory, final[0], own), group)
        if wrong := [f"rank {rank}: {result}" for rank, result in enumerate(results) if isinstance(result, str)]:
            raise RuntimeError(f"the checkpoint {path} could not be saved: {'; '.join(wrong)}")
        return results

    try:
        _check(checkpoint, plans)
        shards.save(path, checkpoint, plans, write_all)
    except Exception as error:  # of any kind: the others wait to be told
        if not told:
            dist.scatter_object_list([None], [None] * size, group=group, group_src=0)
        return error
    return None


def _check(checkpoint: Mapping[str, Any], plans: Sequence[SavePlan]) -> None:
    """Checks that ranks write what rank 0's checkpoint has."""
    wanted = flat({part: checkpoint[part] for part in shards.PARTS if part in checkpoint}).keys()
    planned = {item.index.fqn for plan in plans for item in plan.items}
    if wanted != planned:
        raise RuntimeError(
            "ranks do not agree on what is in the checkpoint, so it has not been written: only rank 0 has "
            f"{sorted(wanted - planned)}, only others have {sorted(planned - wanted)}. on_save_checkpoint must do the "
            "same on every rank."
        )


def _attempt(directory: Path, plan: SavePlan, own: Mapping[str, Tensor]) -> Any:
    """The results of writing, or what went wrong in words."""
    try:
        return shards.write(directory, plan, own)
    except Exception as error:  # of any kind: rank 0 tells all
        return _words(error)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _gathered(own: Any, group: ProcessGroup) -> list[Any]:
    everyone: list[Any] = [None] * group.size()
    dist.gather_object(own, everyone, group=group, group_dst=0)
    return everyone
