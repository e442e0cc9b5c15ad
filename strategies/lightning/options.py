"""The options of a pipeline, as the user gives them; ``RPCSequentialStrategy`` documents each."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from strategies.lightning.arguments import as_misconfiguration
from strategies.lightning.search_settings import SearchSettings
from strategies.pipeline.executor.settings import Settings


@dataclass(frozen=True)
class Options:
    """The arguments of :class:`~strategies.rpc_sequential.RPCSequentialStrategy` but for those of Lightning."""

    balance: list[int] | Literal["even"] | None
    microbatches: int | Literal["auto"]
    checkpoint: str
    balance_mode: str
    pipelined_backward: bool
    rpc_timeout_sec: float
    schedule: str | Path | Callable[[int, int], Any]
    chunks_per_stage: int | None
    data_plane: str
    max_microbatches: int | None
    memory_limit_bytes: int | None
    deferred_batch_norm: bool
    module: str | None
    loss_weight: Literal["rows", "tokens"]
    data_parallel_size: int
    shard_optimizer_states: bool
    state_dict_type: str
    async_save: bool
    max_restarts: int
    snapshot_every_n_steps: int
    rebalance: Literal["auto"] | None
    rebalance_every_n_steps: int | None
    rebalance_threshold: float | None
    gather_on_end: bool | None

    @cached_property
    def search(self) -> SearchSettings:
        """What ``schedule="auto"`` may choose.

        Raises:
            MisconfigurationException: If an option is wrong, or makes no sense with the schedule.
        """
        with as_misconfiguration():
            return SearchSettings(self.schedule, self.microbatches, self.max_microbatches, self.memory_limit_bytes)

    @cached_property
    def settings(self) -> Settings:
        """Settings of the engine.

        Raises:
            MisconfigurationException: If an option is wrong.
        """
        with as_misconfiguration():
            return Settings(
                microbatches=self.search.given_microbatches,
                checkpoint=self.checkpoint,
                schedule=self.schedule,
                chunks_per_stage=self.chunks_per_stage,
                pipelined_backward=self.pipelined_backward,
                deferred_batch_norm=self.deferred_batch_norm,
                rpc_timeout_sec=self.rpc_timeout_sec,
                data_plane=self.data_plane,
            )
