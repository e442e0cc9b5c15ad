"""The settings of ``schedule="auto"``: what the search may choose, and whether an earlier result can be used again."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.partition.sequential import even_balance
from strategies.pipeline.schedule.planned import AUTO, PlannedSchedule

DEFAULT_MICROBATCHES = 8
MAX_MICROBATCHES = 32
MAX_CHUNKS = 2


@dataclass(frozen=True)
class SearchSettings:
    """What ``schedule="auto"`` may choose; :class:`~strategies.rpc_sequential.RPCSequentialStrategy` documents it.

    Raises:
        ValueError: If a setting is invalid, or makes no sense with the schedule.
    """

    schedule: Any
    microbatches: int | Literal["auto"] = DEFAULT_MICROBATCHES
    max_microbatches: int | None = None
    memory_limit_bytes: int | None = None

    @property
    def finds_microbatches(self) -> bool:
        """Whether the search chooses the number of micro-batches."""
        return self.microbatches == AUTO

    @property
    def given_microbatches(self) -> int:
        """The number of micro-batches, or the default if the search chooses the number."""
        return DEFAULT_MICROBATCHES if self.microbatches == "auto" else self.microbatches

    def __post_init__(self) -> None:
        for name in ("max_microbatches", "memory_limit_bytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
        given = {
            "microbatches='auto'": self.finds_microbatches,
            f"memory_limit_bytes={self.memory_limit_bytes}": self.memory_limit_bytes is not None,
        }
        if self.schedule != AUTO and any(given.values()):
            name = next(name for name, is_given in given.items() if is_given)
            raise ValueError(
                f"{name} is for schedule='auto', which measures the layers; got schedule={self.schedule!r}. Set "
                "schedule='auto', or leave it out."
            )
        if self.max_microbatches is not None and not self.finds_microbatches:
            raise ValueError(
                f"max_microbatches={self.max_microbatches} is for microbatches='auto', got "
                f"microbatches={self.microbatches!r}. Leave one of them out."
            )


def with_schedule(settings: Settings, planned: PlannedSchedule) -> Settings:
    """Return settings with the schedule and the number of micro-batches that the search found."""
    return replace(settings, schedule=planned, chunks=None, microbatches=planned.microbatches)


def fits(
    planned: PlannedSchedule,
    num_stages: int,
    lengths: Sequence[int],
    given: Sequence[int] | Literal["even"] | None,
    settings: Settings,
    choices: SearchSettings,
    gradient_sets: int = 1,
) -> bool:
    """Return whether a schedule from an earlier search can be used again, because it obeys the settings of this run.

    Args:
        planned: The schedule.
        num_stages: Number of stages.
        lengths: The number of layers of each list.
        given: The balance that the user gave.
        settings: Settings of the pipeline.
        choices: What the search may choose.
        gradient_sets: Number of gradients of a parameter that exist at the same time.
    """
    chunks, limit = planned.chunks, choices.memory_limit_bytes
    if len(planned.table) != num_stages or planned.lengths != list(lengths):
        return False
    if len(planned.balance) != num_stages * chunks * len(lengths) or chunks > (settings.chunks or MAX_CHUNKS):
        return False
    if given is not None:
        numbers = even_balance(lengths, num_stages * chunks) if given == "even" else list(given)
        if planned.balance != numbers:
            return False
    if limit is not None and (planned.peak_bytes > limit or planned.gradient_sets < gradient_sets):
        return False
    if choices.finds_microbatches:
        return planned.microbatches <= (choices.max_microbatches or MAX_MICROBATCHES)
    return planned.microbatches == choices.microbatches
