"""The options of a pipeline, as the user gives them in Python or YAML. A dataclass groups options of one theme.

``RPCSequentialStrategy`` documents its arguments; the dataclasses document their fields.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from strategies.common.names import did_you_mean
from strategies.lightning.arguments import as_misconfiguration
from strategies.lightning.compat import MisconfigurationException
from strategies.lightning.search_settings import SearchSettings
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.recovery.repairs import Recovery

BALANCES = ("even", "by_size", "by_time")
"""The named ways to balance stages."""

DEFAULT_THRESHOLD = 0.1
"""A smaller saving may not pay: moving layers takes a second or more, and predictions are not exact."""


@dataclass(frozen=True)
class Schedule:
    """An order of the passes, with its options.

    Args:
        name: The name of the order, the path of a table, or a function, as for the strategy's argument ``schedule``.
        chunks: Number of chunks of consecutive layers in each stage, under ``"interleaved"`` (default: 2) and
            ``"zb-h1"`` (default: 1). The model needs at least one layer per chunk. Under ``"auto"``, the largest number
            that the search may choose (default: 2).
        pipelined_backward: If ``True`` (default), a stage runs the backward passes of the micro-batches one after
            another, so that stages overlap. If ``False``, it runs them in one call of autograd, after the following
            stage has finished its backward passes. ``False`` is for ``"gpipe"`` only.
        max_microbatches: With ``microbatches="auto"``, the largest number that the search may choose. Default: 32.
        memory_limit_bytes: Under ``"auto"``, the memory that each process may use for activations and parameters. Each
            parameter counts four times, for the parameter, its gradient and the two states of Adam. It counts five
            times where a run holds two sets of gradients (``docs/decisions/098-two-sets-of-gradients.md``). A fifth is
            added for memory that allocators keep. Default: no limit.

    Raises:
        MisconfigurationException: If ``pipelined_backward`` is neither ``True`` nor ``False``. The strategy checks the
            other fields, together with its own arguments.
    """

    name: str | Path | Callable[[int, int], Any] = "gpipe"
    chunks: int | None = None
    pipelined_backward: bool = True
    max_microbatches: int | None = None
    memory_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pipelined_backward, bool):
            value = self.pipelined_backward
            raise MisconfigurationException(f"pipelined_backward must be True or False, got {value!r}.")


@dataclass(frozen=True)
class Rebalance:
    """When layers move to other stages.

    Args:
        every_n_steps: The number of batches after which layers may move. Default: at the end of each epoch.
        threshold: The share of the time of the passes that a move must save, as recorded steps predict. Default: 0.1.
    """

    every_n_steps: int | None = None
    threshold: float = DEFAULT_THRESHOLD


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


@dataclass(frozen=True)
class Options:
    """The arguments of :class:`~strategies.rpc_sequential.RPCSequentialStrategy`, except Lightning's arguments."""

    balance: list[int] | Literal["even", "by_size", "by_time"]
    microbatches: int | Literal["auto"]
    checkpoint: str
    schedule: Schedule | str | Path | Callable[[int, int], Any]
    rpc_timeout_sec: float
    data_plane: str
    deferred_batch_norm: bool
    module: str | list[str] | None
    loss_weight: Literal["rows", "tokens"]
    microbatch_tokens: int | None
    data_parallel_size: int
    tensor_parallel_size: int
    zero_stage: Literal[0, 1, 2, 3]
    state_dict_type: str
    async_save: bool
    recovery: Recovery | None
    rebalance: Rebalance | Literal["auto"] | None
    gather_on_end: bool | None

    def __post_init__(self) -> None:
        if isinstance(self.balance, str) and self.balance not in BALANCES:
            raise MisconfigurationException(f"Unknown balance {self.balance!r}{did_you_mean(self.balance, BALANCES)}")
        names = [self.module] if isinstance(self.module, str) else self.module
        if self.module is not None and not (isinstance(names, list | tuple) and names and all(map(_is_name, names))):
            raise MisconfigurationException(
                f"module must be the path of a list of layers, or a list of such paths, got {self.module!r}."
            )

    @property
    def given_balance(self) -> list[int] | Literal["even"] | None:
        """The number of layers of each chunk, or ``"even"``, as given; ``None`` if layers must be measured."""
        if self.balance == "by_size" or self.balance == "by_time":
            return None
        return self.balance

    @property
    def balances_by_time(self) -> bool:
        """Whether the layers are balanced by measured time."""
        return self.balance == "by_time"

    @property
    def order(self) -> Schedule:
        """The schedule with its options."""
        return self.schedule if isinstance(self.schedule, Schedule) else Schedule(self.schedule)

    @cached_property
    def search(self) -> SearchSettings:
        """What ``schedule="auto"`` may choose.

        Raises:
            MisconfigurationException: If an option is wrong, or makes no sense with the schedule.
        """
        with as_misconfiguration():
            order = self.order
            return SearchSettings(order.name, self.microbatches, order.max_microbatches, order.memory_limit_bytes)

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
                schedule=self.order.name,
                chunks=self.order.chunks,
                pipelined_backward=self.order.pipelined_backward,
                deferred_batch_norm=self.deferred_batch_norm,
                rpc_timeout_sec=self.rpc_timeout_sec,
                data_plane=self.data_plane,
            )
