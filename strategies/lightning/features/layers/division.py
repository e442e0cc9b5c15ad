"""How layers are divided among stages. The strategy keeps schedules from a search, and moved layers, for later runs.

A run takes the first of these that fits it:

    schedule="auto"   the schedule that an earlier search has found, in this process or before the checkpoint; a search
    moved layers      the balance to which layers have moved in an earlier run
    otherwise         the balance that the user gives, or the balance found by measuring the layers
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import nn

from strategies.common.joined_lists import lengths_of
from strategies.lightning.features.feature import Feature
from strategies.lightning.features.per_microbatch import num_gradient_sets
from strategies.lightning.finding_blocks import Where, described, find_path, warn_of_compiled_model, warn_of_time_first
from strategies.lightning.options import Options
from strategies.lightning.partitioning import find_balance
from strategies.lightning.run import Preparation, stages_of_chunks
from strategies.lightning.search_settings import fits, with_schedule
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.schedule.planned import PlannedSchedule


class Division(Feature):
    """Divides the layers of a run, and keeps the schedule from a search and the balance after a move.

    Args:
        options: The options.
        search: Searches for a schedule: :func:`strategies.planning.automatic.find_schedule`, imported when it is
            called.

    Attributes:
        balance: The number of layers of each chunk in the present or last run; before the first run, the user's value.
        where: The dotted path of the layers in the present or last run, or those of several lists; before the first
            run, the user's value.
    """

    def __init__(self, options: Options, search: Callable[..., PlannedSchedule]) -> None:
        self._options, self._search = options, search
        self.balance: Sequence[int] | Literal["even", "by_size", "by_time"] = options.balance
        self.where: Where = options.module if isinstance(options.module, str) else "sequential_module"
        self._planned: PlannedSchedule | None = None
        self._moved: list[int] = []

    def check(self, prepared: Preparation) -> None:
        """Warn about layers that a pipeline would split along the wrong dimension, and about a compiled model."""
        _ = prepared.stage_of_chunk  # refuses a schedule that cannot run several lists
        if isinstance(prepared.module, nn.Sequential):
            warn_of_time_first(prepared.module, prepared.path)
        elif prepared.is_fitting:
            warn_of_compiled_model(prepared.path)

    def find(self, model: nn.Module, num_stages: int) -> Where:
        """Return the dotted path of the pipelined part of a model, or those of several lists."""
        settings = self._options.settings
        num_chunks = len(stages_of_chunks(settings, num_stages))
        self.where = find_path(model, self._options.module, num_stages, num_chunks, several=settings.runs_several_lists)
        return self.where

    def move_to(self, balance: Sequence[int]) -> None:
        """Keep a balance to which layers have moved."""
        self.balance = self._moved = list(balance)

    def divide(self, prepared: Preparation, *, is_reversed: bool) -> tuple[Settings, list[int]]:
        """Return the settings with a schedule, and the number of layers of each chunk. All replicas get the same.

        Args:
            prepared: The prepared run. The parts of the model outside the layers are on the driver's device.
            is_reversed: Whether the first stage has the last layers.
        """
        settings, balance = self._divide(prepared, is_reversed)
        self.balance = balance
        return settings, balance

    def _divide(self, prepared: Preparation, is_reversed: bool) -> tuple[Settings, list[int]]:
        options, settings, model, module = self._options, prepared.settings, prepared.model, prepared.module
        ranks, given = prepared.ranks, options.given_balance
        measuring: dict[str, Any] = {
            "num_stages": prepared.num_stages,
            "device": ranks.root_device,
            "precision": prepared.precision,
            "in_reverse": is_reversed,
            "num_processes": len(ranks.stages_on_host()),
        }
        if settings.is_auto and (planned := self._plan(prepared, measuring)) is not None:
            return with_schedule(settings, planned), planned.balance
        num_chunks = len(prepared.stage_of_chunk)
        if len(self._moved) == num_chunks and sum(self._moved) == len(module):
            return settings, self._moved
        if settings.is_auto and given is not None and len(given) != num_chunks:
            given = "even"  # this run does not train, and the given numbers are for more chunks
        balance = find_balance(
            model,
            module,
            path=described(self.where),
            num_chunks=num_chunks,
            given=given,
            by_time=options.balances_by_time,
            settings=settings,
            **measuring,
        )
        return settings, ranks.broadcast(balance)  # each replica has measured different times

    def _plan(self, prepared: Preparation, measuring: Mapping[str, Any]) -> PlannedSchedule | None:
        """Return the schedule for ``schedule="auto"``; ``None`` if none fits and the run needs no search."""
        options, settings, module = self._options, prepared.settings, prepared.module
        sets = round(num_gradient_sets(prepared.trainer, prepared.model)) if prepared.is_fitting else 1
        planned, num_stages, given = self._planned, prepared.num_stages, options.given_balance
        lengths = lengths_of(module)
        if planned is not None and fits(planned, num_stages, lengths, given, settings, options.search, sets):
            return planned
        if not prepared.is_fitting or num_stages == 1:
            return None
        planned = self._search(
            prepared.model,
            module,
            given=given,
            settings=settings,
            choices=options.search,
            gradient_sets=sets,
            **measuring,
        )
        self._planned = prepared.ranks.broadcast(planned)
        return self._planned

    def state(self) -> dict[str, Any]:
        """Return the schedule that the search found."""
        return {} if self._planned is None else {"schedule": self._planned.state()}

    def load_state(self, state: Mapping[str, Any], *, is_running: bool) -> None:
        """Use the schedule of a checkpoint from which training resumes."""
        if (found := state.get("schedule")) is not None and not is_running:
            self._planned = PlannedSchedule.from_state(found)
