"""The ways to choose a schedule by name, and the computations of a row."""

from collections.abc import Sequence
from typing import Any

from strategies import Schedule
from strategies.pipeline.schedule.operations import Computation, Operation, UserCode
from strategies.pipeline.schedule.tables import Action

CHOICES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved"},
    "interleaved-3": {"schedule": "interleaved", "chunks": 3},
    "zb-h1": {"schedule": "zb-h1"},
    "zb-h1-2": {"schedule": "zb-h1", "chunks": 2},
    "zbv": {"schedule": "zbv"},
    "v-half": {"schedule": "v-half"},
}
"""Arguments of the settings of a pipeline, by name."""

SEVERAL_CHUNKS_OR_SPLIT = {
    name: Schedule(choice["schedule"], choice.get("chunks"))
    for name, choice in CHOICES.items()
    if name not in ("gpipe", "1f1b")
}
"""Those with several chunks of layers per stage, or backward passes in two parts, for the strategy."""


def computations_of(row: Sequence[Operation]) -> list[Computation]:
    """Return the operations of a row that compute, without sends, receives and other exchanges."""
    return [operation for operation in row if isinstance(operation, Action | UserCode)]
