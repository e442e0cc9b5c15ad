"""The validated settings of a pipeline."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from strategies.common.names import did_you_mean
from strategies.launch.session import BUSY_FACTOR, check_timeout
from strategies.pipeline.schedule.custom import CustomTable, custom_table
from strategies.pipeline.schedule.planned import AUTO as AUTO_SCHEDULE
from strategies.pipeline.schedule.planned import PlannedSchedule
from strategies.pipeline.schedule.posting import direct_order, posting_order
from strategies.pipeline.schedule.program import Programs
from strategies.pipeline.schedule.tables import SCHEDULES, Placement
from strategies.pipeline.stage.layers import RECOMPUTE_MODES
from strategies.pipeline.transport.planes import AUTO, GLOO, PLANES, chosen_plane

ScheduleChoice = str | Path | Callable[[int, int], CustomTable]
"""The name of a schedule, the file of a table, or a function ``(processes, microbatches)`` that returns a table."""


@dataclass(frozen=True)
class Settings:
    """How a pipeline runs; :class:`~strategies.rpc_sequential.RPCSequentialStrategy` documents each setting.

    Raises:
        ValueError: If a setting is invalid.
    """

    microbatches: int = 8
    checkpoint: str = "except_last"
    schedule: ScheduleChoice = "gpipe"
    chunks: int | None = None
    pipelined_backward: bool = True
    deferred_batch_norm: bool = False
    rpc_timeout_sec: float = 60.0
    data_plane: str = AUTO

    @property
    def patience_seconds(self) -> float:
        """How long a process waits for another process that is not known to hang."""
        return BUSY_FACTOR * self.rpc_timeout_sec

    @property
    def interleaves(self) -> bool:
        """Whether ``training_step`` runs once per micro-batch, with interleaved forward and backward passes."""
        return self.schedule != "gpipe"

    @property
    def runs_several_lists(self) -> bool:
        """Whether the schedule can run several lists of layers one after another."""
        if isinstance(self.schedule, PlannedSchedule):
            return self.schedule.num_lists > 1
        named = SCHEDULES.get(self.schedule) if isinstance(self.schedule, str) else None
        return self.is_auto or (named is not None and named.lists is not None)

    def check_lists(self, num_lists: int) -> None:
        """Check that the schedule can run a number of lists of layers.

        Raises:
            ValueError: If it is for one list.
        """
        if num_lists > 1 and not self.runs_several_lists:
            known = ", ".join(repr(name) for name, named in SCHEDULES.items() if named.lists is not None)
            raise ValueError(
                f"schedule={self.schedule!r} is for one list of layers, but {num_lists} lists are to be pipelined. Use "
                f"one of {known}, or name one list by module=..."
            )

    @property
    def is_auto(self) -> bool:
        """Whether the schedule still has to be chosen."""
        return self.schedule == AUTO_SCHEDULE

    def plane(self, devices: Sequence[torch.device], hosts: Sequence[Hashable]) -> str:
        """Return the data plane for stages on these devices of these hosts.

        Raises:
            ValueError: If these devices cannot use the data plane that the user chose.
        """
        return chosen_plane(self.data_plane, devices, hosts)

    def programs(self, processes: int, *, ordered: bool = False, num_lists: int = 1) -> Programs:
        """Return the operations of each process in a pass; under ``"auto"``, those of a pass without training.

        Args:
            processes: The number of stages.
            ordered: Whether all processes agree on one order of sends and receives; see
                :func:`~strategies.pipeline.schedule.posting.posting_order`.
            num_lists: Number of lists of layers, which run one after another.

        Raises:
            ValueError: If the file of a table cannot be read, or a custom table cannot run on this number of
                processes.
        """
        self.check_lists(num_lists)
        if num_lists > 1 and ordered:
            raise ValueError(
                f"{num_lists} lists of layers are pipelined one after another under data_plane='gloo' only. Use it, or "
                "name one list by module=..."
            )
        add_posts = posting_order if ordered else direct_order
        schedule = "1f1b" if self.is_auto else self.schedule
        if isinstance(schedule, str) and schedule in SCHEDULES:
            named = SCHEDULES[schedule]
            chunks = 1 if self.is_auto else self.chunks or named.chunks[1]
            placement, at_once = named.placement(processes, chunks), not self.pipelined_backward
            return Programs(
                lambda m: named.table(processes, m, chunks),
                placement,
                add_posts,
                at_once=at_once,
                num_lists=num_lists,
                lists=(lambda m: named.of(processes, m, chunks, num_lists)) if self.interleaves else None,
            )
        if isinstance(schedule, PlannedSchedule) and num_lists > 1:
            named, chunks = SCHEDULES[schedule.name], schedule.chunks
            return Programs(
                lambda m: named.table(processes, m, chunks),
                named.placement(processes, chunks),
                add_posts,
                num_lists=num_lists,
                lists=lambda m: custom_table(schedule, processes, m),
            )
        try:
            placement = Placement.of(custom_table(schedule, processes, self.microbatches))
        except OSError as error:
            raise ValueError(f"schedule={str(schedule)!r} is the path of a table, but: {error}.") from error
        tables = Programs(lambda m: custom_table(schedule, processes, m), placement, add_posts)
        tables["training", self.microbatches, 0]  # raises an error if the table cannot run
        return tables

    def __post_init__(self) -> None:
        if self.checkpoint not in RECOMPUTE_MODES:
            raise ValueError(
                f"Unknown checkpoint {self.checkpoint!r}{did_you_mean(str(self.checkpoint), RECOMPUTE_MODES)}"
            )
        self._check_schedule()
        if not isinstance(self.microbatches, int) or isinstance(self.microbatches, bool) or self.microbatches < 1:
            raise ValueError(f"microbatches must be a whole number of at least 1, got {self.microbatches!r}.")
        check_timeout(self.rpc_timeout_sec)
        if self.schedule != "gpipe" and not self.pipelined_backward:
            raise ValueError(
                f"pipelined_backward=False waits for all forward passes, which schedule={self.schedule!r} does not do; "
                "leave it out, or use schedule='gpipe'."
            )
        if self.data_plane not in PLANES:
            raise ValueError(f"Unknown data_plane {self.data_plane!r}{did_you_mean(str(self.data_plane), PLANES)}")
        if self.data_plane not in (AUTO, GLOO) and not self.pipelined_backward:
            raise ValueError(
                f"data_plane={self.data_plane!r} sends values in the order of a schedule, but pipelined_backward=False "
                "runs all backward passes of a stage at once. Leave pipelined_backward out, or use data_plane='gloo'."
            )

    def _check_schedule(self) -> None:
        schedule, chunks, names = self.schedule, self.chunks, (*SCHEDULES, AUTO_SCHEDULE)
        if chunks is not None and (not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1):
            raise ValueError(f"chunks must be a whole number of at least 1, got {chunks!r}.")
        if isinstance(schedule, str) and schedule in SCHEDULES:
            least, _, most = SCHEDULES[schedule].chunks
            if chunks is not None and not least <= chunks <= most:
                number = f"{least}" if least == most else f"at least {least}"
                instead = "" if most > 1 else "; schedule='interleaved' has several"
                raise ValueError(
                    f"schedule={schedule!r} has {number} chunk{'s' if least > 1 else ''} of layers per stage, got "
                    f"chunks={chunks}{instead}."
                )
            return
        if self.is_auto:
            return
        if callable(schedule) or isinstance(schedule, Path):
            pass
        elif not isinstance(schedule, str):
            raise ValueError(
                f"schedule must be a name ({', '.join(map(repr, names))}), the path of a CSV file with a table, or a "
                f"function (processes, microbatches) -> table, got {schedule!r}."
            )
        elif not schedule.endswith(".csv"):
            raise ValueError(
                f"Unknown schedule {schedule!r}{did_you_mean(schedule, names)} (The name of a file with a custom "
                "table ends with .csv.)"
            )
        if chunks is not None:
            raise ValueError(f"A custom table determines the chunks of layers, so leave chunks={chunks} out.")
