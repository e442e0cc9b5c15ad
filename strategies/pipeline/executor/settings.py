"""The settings of a pipeline, validated."""

import threading
from dataclasses import dataclass

from strategies.common.names import did_you_mean
from strategies.launch.session import BUSY_FACTOR
from strategies.pipeline.schedule.tables import SCHEDULES
from strategies.pipeline.stage.layers import RECOMPUTE_MODES


@dataclass(frozen=True)
class Settings:
    """How a pipeline runs; :class:`~strategies.rpc_sequential.RPCSequentialStrategy` documents each setting.

    Raises:
        ValueError: If a setting is invalid.
    """

    microbatches: int = 8
    checkpoint: str = "except_last"
    schedule: str = "gpipe"
    pipelined_backward: bool = True
    deferred_batch_norm: bool = False
    rpc_timeout_sec: float = 60.0

    @property
    def patience_seconds(self) -> float:
        """How long a process waits for another one that has not been declared hung."""
        return BUSY_FACTOR * self.rpc_timeout_sec

    @property
    def interleaves(self) -> bool:
        """Whether ``training_step`` runs once per micro-batch, with forward and backward passes in turn."""
        return self.schedule != "gpipe"

    def __post_init__(self) -> None:
        for name, valid in (("checkpoint", RECOMPUTE_MODES), ("schedule", tuple(SCHEDULES))):
            value = getattr(self, name)
            if value not in valid:
                raise ValueError(f"Unknown {name} {value!r}{did_you_mean(str(value), valid)}")
        if not isinstance(self.microbatches, int) or isinstance(self.microbatches, bool) or self.microbatches < 1:
            raise ValueError(f"microbatches must be a whole number of at least 1, got {self.microbatches!r}.")
        seconds = self.rpc_timeout_sec
        if not isinstance(seconds, int | float) or not 0 < seconds < threading.TIMEOUT_MAX:
            raise ValueError(f"rpc_timeout_sec must be a finite number of seconds above 0, got {seconds!r}.")
        if self.schedule != "gpipe" and not self.pipelined_backward:
            raise ValueError(
                f"pipelined_backward=False waits for all forward passes, which schedule={self.schedule!r} does not do; "
                "leave it out, or use schedule='gpipe'."
            )
