"""Checkpoints under ZeRO: what ranks hold becomes one process's checkpoint, and the other way round."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning_fabric.utilities.optimizer import _optimizers_to_device
from torch import Tensor
from torch.optim import Optimizer

from strategies.base import StrategyPlugin
from strategies.checkpoint import rank_shards, shards
from strategies.checkpoint.background import snapshot
from strategies.common.trees import flat, layouts, take_over, with_meta_tensors
from strategies.lightning.compat import is_stand_in, unwrapped
from strategies.optim.restricted import check_optimizer_states, in_order
from strategies.sharding.optimizers import ShardedOptimizers
from strategies.sharding.states import gathered, whole_state_dict


class ZeROCheckpoints(StrategyPlugin):
    """The part of :class:`~strategies.ZeROStrategy` that saves and loads."""

    _groups: tuple[Any, Any] | None
    _sharded: ShardedOptimizers | None
    _shards: Path | None = None
    _saving: Any | None = None
    _gathered: dict[Optimizer, dict[Any, Any]]
    """The states that rank 0 has gathered for the next checkpoint."""

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state put together from all ranks, on rank 0; the others have nothing. Every rank calls it.

        For a checkpoint in parts each rank has its own, and rank 0 those of the others without values.
        """
        plain = unwrapped(optimizer)
        if self._sharded is None or self._groups is None or plain not in self._sharded.optimizers:
            return super().optimizer_state(optimizer)
        if self._state_dict_type == "full":
            state = whole_state_dict(plain, self._groups[1])
            self._gathered[plain] = state.get("state", {})
            return state
        state = plain.state_dict()
        others = with_meta_tensors(gathered(layouts(state["state"]), self._groups[1]))
        return {**state, "state": in_order({**others, **state["state"]})}

    def _refresh_gathered(self, optimizer: Optimizer) -> None:
        """Bring what has been gathered up to date, after a method of the optimizer was called.

        In one process a state dict shares its tensors with the optimizer, so it shows what a hook such as
        ``on_save_checkpoint`` has changed.
        """
        if optimizer in self._gathered and self._groups is not None:
            now = whole_state_dict(optimizer, self._groups[1])
            take_over(self._gathered[optimizer], now.get("state", {}))

    def _save_in_parts(self, checkpoint: dict[str, Any], path: Path) -> None:
        if not dist.is_initialized():
            if self.is_global_zero:
                super()._save_in_parts(checkpoint, path)
            return
        if self._saving is None:  # of its own: a thread may use it while training goes on
            self._saving = dist.new_group(backend="gloo")
        own: Mapping[str, Tensor] = rank_shards.own_part(checkpoint, self._saving)
        if self._background is None:
            rank_shards.save(checkpoint, path, own, self._saving)
            return
        self._background.wait()
        bare = snapshot(shards.without_values(checkpoint))
        self._background.save(partial(rank_shards.save, bare, path, snapshot(dict(own)), self._saving))

    def load_checkpoint(self, checkpoint_path: str | Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; of one in parts each rank reads its own optimizer states, when it knows which they are."""
        self._shards = None
        return super().load_checkpoint(checkpoint_path, weights_only)

    def _load_in_parts(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        checkpoint, self._shards = shards.load(path, ["state_dict"], weights_only)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this rank's part of each optimizer's state, whoever saved it and on however many ranks."""
        if self._sharded is None:
            raise RuntimeError("optimizers are divided only within fit")
        states = checkpoint["optimizer_states"]
        check_optimizer_states([unwrapped(own) for own in self.optimizers], states)
        own = []
        for k, (optimizer, state) in enumerate(zip(map(unwrapped, self.optimizers), states, strict=True)):
            if is_stand_in(optimizer):
                continue
            mine = self._sharded.ownership.own_part(optimizer, state["state"])
            if self._shards is not None:
                prefix = f"optimizer_states.{k}.state"
                mine = shards.replaced(mine, shards.fill(self._shards, flat(mine, prefix)), prefix)
            own.append((optimizer, {**state, "state": mine}))
        for optimizer, state in own:  # now that all has been read
            optimizer.load_state_dict(state)
        _optimizers_to_device(self.optimizers, self.root_device)
