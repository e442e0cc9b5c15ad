"""A schedule that a search has chosen, as a function of processes and micro-batches, and as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from strategies.pipeline.schedule.tables import SCHEDULES, Action, ActionTable

AUTO = "auto"
"""The name of the schedule that requests a search."""


@dataclass(frozen=True)
class PlannedSchedule:
    """A table for one number of micro-batches, and a named schedule for other numbers, such as of an incomplete batch.

    Attributes:
        name: The name of the schedule for other numbers of micro-batches.
        chunks: The number of stages per process in each list of layers.
        balance: The number of layers of each stage.
        microbatches: The number of micro-batches of ``table``.
        table: The actions of each process.
        peak_bytes: The predicted peak memory of a process for parameters and activations.
        gradient_sets: The number of gradients of a parameter that the prediction assumes to exist at the same time.
        num_lists: The number of lists of layers.
    """

    name: str
    chunks: int
    balance: list[int]
    microbatches: int
    table: ActionTable
    peak_bytes: float = 0.0
    gradient_sets: int = 1
    num_lists: int = 1

    @property
    def lengths(self) -> list[int]:
        """The number of layers of each list."""
        chunks = len(self.balance) // self.num_lists
        return [sum(self.balance[start : start + chunks]) for start in range(0, len(self.balance), chunks)]

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PlannedSchedule:
        """Return the schedule that :meth:`state` described."""
        return cls(**{**state, "table": [[Action.parse(text) for text in row] for row in state["table"]]})

    def state(self) -> dict[str, Any]:
        """Return the schedule as numbers, strings and lists."""
        return {**asdict(self), "table": [[str(action) for action in row] for row in self.table]}

    def __call__(self, processes: int, microbatches: int) -> ActionTable:
        """Return the table for a number of micro-batches."""
        if microbatches == self.microbatches:
            return self.table
        return SCHEDULES[self.name].of(processes, microbatches, self.chunks, self.num_lists)

    def __repr__(self) -> str:
        return repr(AUTO)  # messages show the user's choice
