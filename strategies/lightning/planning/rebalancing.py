"""``rebalance="auto"``: records single steps, and decides after each epoch or n steps whether layers move.

batch      0    1    2    3    4    5    6    7  │ 0    1
recorded        ✓         ✓         ✓         ✓  │
                          └─────────┴─────────┘  ▲ the last three: is another balance clearly faster?
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from strategies.common.names import did_you_mean
from strategies.lightning.compat import MisconfigurationException
from strategies.pipeline.driver import Pipeline, Recording
from strategies.pipeline.executor.settings import Settings
from strategies.pipeline.schedule.imbalance import STEPS_TO_ASSESS, Imbalance, LastSteps, assess, step_costs

AUTO = "auto"

LEAST_GAIN = 0.1
"""The default of ``rebalance_threshold``: moving layers takes a second or more, and predictions are not exact."""

_RECORDED_PER_PERIOD = 8
"""How many steps are recorded in an epoch, or in n steps."""

_UNKNOWN_PERIOD = 200
"""The number of batches that an epoch of unknown length is taken to have."""


class Rebalancing:
    """Decides when layers move, by recorded steps.

    Args:
        every_n_steps: Decide whenever so many batches have run; ``None``: at the end of each epoch.
        least_gain: The share of the time of a step's passes that another balance must be predicted to save.
    """

    def __init__(self, every_n_steps: int | None, least_gain: float) -> None:
        self._every_n_steps, self._least_gain = every_n_steps, least_gain
        self.begin()

    def begin(self) -> None:
        """Forget an earlier run."""
        self._steps = LastSteps()
        self._recording: Recording | None = None
        self._epoch: int | None = None
        self._num_batches = 0

    def stop(self) -> None:
        """A batch is over: stop to record it."""
        if self._recording is not None:
            self._recording.stop()

    @property
    def has_recorded(self) -> bool:
        """Whether :meth:`before_batch` will wait for records."""
        return self._recording is not None

    def before_batch(self, pipeline: Pipeline, epoch: int) -> Imbalance | None:
        """Take what was recorded of the batch before; return what to do, if layers are to move now.

        Args:
            pipeline: The pipeline.
            epoch: The number of the epoch of the batch that begins.
        """
        self._take(pipeline)
        before, self._epoch = self._epoch, epoch
        is_due = before not in (None, epoch)
        if self._every_n_steps is not None:
            is_due = self._num_batches >= self._every_n_steps
        if not is_due:
            return None
        self._num_batches = 0
        if len(self._steps.steps) < STEPS_TO_ASSESS:
            return None
        found = assess(
            self._steps.steps,
            pipeline.kinds_of_layers(),
            lambda microbatches: pipeline.timetables.training[microbatches].rows,
            pipeline.balance,
        )
        return found if found.gain >= self._least_gain else None

    def begin_batch(self, pipeline: Pipeline, batch: int, batches_per_epoch: float) -> None:
        """Record the batch that begins, if it is its turn.

        Args:
            pipeline: The pipeline.
            batch: The number of the batch over all epochs.
            batches_per_epoch: The number of batches of an epoch.
        """
        self._num_batches += 1
        period = self._every_n_steps or min(batches_per_epoch, _UNKNOWN_PERIOD)
        spacing = max(1, int(period) // _RECORDED_PER_PERIOD)
        if self._num_batches % spacing == 0:
            self._recording = pipeline.start_recording(batch)

    def _take(self, pipeline: Pipeline) -> None:
        self.stop()
        recording, self._recording = self._recording, None
        if recording is None or recording.balance != pipeline.balance:  # the user has moved layers since
            return
        if (recorded := recording.take()) is None:
            return
        rows = [own.records for own in recorded]  # of one clock, because all processes are on one host
        costs = step_costs(rows, recorded, pipeline.balance, whole_batch=not pipeline.settings.interleaves)
        if costs is not None:
            self._steps.add(costs)


def moves(before: Sequence[int], after: Sequence[int], stage_of: Sequence[int]) -> str:
    """Return which layers move, such as ``layers 4 and 5 from stage 0 to the driver``.

    Args:
        before: The number of layers of each chunk before.
        after: The same afterwards.
        stage_of: The stage of each chunk; the driver has the last stage.
    """
    driver = max(stage_of)

    def stages(balance: Sequence[int]) -> list[int]:
        return [stage for stage, length in zip(stage_of, balance, strict=True) for _ in range(length)]

    def name(stage: int) -> str:
        return "the driver" if stage == driver else f"stage {stage}"

    found = []
    ways = [(old, new) for old, new in zip(stages(before), stages(after), strict=True)]
    for (old, new), group in groupby(enumerate(ways), key=lambda each: each[1]):
        places = [place for place, _ in group]
        if old != new:
            first, last = places[0], places[-1]
            what = f"layer {first}" if first == last else f"layers {first} to {last}"
            found.append(f"{what} from {name(old)} to {name(new)}")
    return ", ".join(found) or "no layer, between processes"


def check_rebalance(
    rebalance: Any,
    every_n_steps: Any,
    threshold: Any,
    settings: Settings,
) -> None:
    """Check the arguments about rebalancing.

    Args:
        rebalance: The argument of the strategy.
        every_n_steps: ``rebalance_every_n_steps``.
        threshold: ``rebalance_threshold``.
        settings: Settings of the pipeline.

    Raises:
        MisconfigurationException: If a value is wrong, or has no effect.
    """
    if rebalance not in (None, AUTO):
        raise MisconfigurationException(
            f"rebalance must be 'auto' or None, got {rebalance!r}{did_you_mean(str(rebalance), (AUTO,))}"
        )
    given = {"rebalance_every_n_steps": every_n_steps, "rebalance_threshold": threshold}
    for name, value in given.items():
        if value is not None and rebalance is None:
            raise MisconfigurationException(f"{name}={value!r} is for rebalance='auto'; set that, or leave it out.")
    if every_n_steps is not None and (
        not isinstance(every_n_steps, int) or isinstance(every_n_steps, bool) or every_n_steps < STEPS_TO_ASSESS
    ):
        raise MisconfigurationException(
            f"rebalance_every_n_steps must be a whole number of at least {STEPS_TO_ASSESS}, of which so many are "
            f"recorded, got {every_n_steps!r}."
        )
    if threshold is not None and (not isinstance(threshold, int | float) or not 0 < threshold < 1):
        raise MisconfigurationException(f"rebalance_threshold must be between 0 and 1, got {threshold!r}.")
    if rebalance is None:
        return
    reasons = {
        "measures the passes of each micro-batch, but pipelined_backward=False runs the backward passes of all at "
        "once": not settings.pipelined_backward,
        "keeps the order of passes, which schedule='auto' has chosen together with the balance": settings.is_auto,
    }
    refuse("rebalance='auto'", reasons)


def refuse(what: str, reasons: Mapping[str, bool]) -> None:
    """Raise an error with the first reason that applies.

    Raises:
        MisconfigurationException: If one does.
    """
    for reason, applies in reasons.items():
        if applies:
            raise MisconfigurationException(f"{what} {reason}. Leave one of them out.")


def check_movable(
    what: str, *, replicas: int, is_external: bool, devices: Sequence[torch.device], gathers: bool, profiles: bool
) -> None:
    """Check that layers can move to other stages.

    Args:
        what: What needs that.
        replicas: Number of pipelines.
        is_external: Whether torchrun, SLURM or the like have started the workers.
        devices: The device of each stage.
        gathers: Whether the driver may hold the whole model.
        profiles: Whether the workers record traces for ``PyTorchProfiler``.

    Raises:
        MisconfigurationException: If they cannot.
    """
    others = [device for device in devices if device.type != "cpu"]
    reasons = {
        "is for one pipeline, but data_parallel_size is larger than 1": replicas > 1,
        "starts workers, but torchrun, SLURM or the like have started those of this run": is_external,
        f"is for stages on CPUs, but one is on {', '.join(map(str, others[:1]))}": bool(others),
        "brings all weights to the driver for a moment, which gather_on_end=False avoids (it is the default for a "
        "model that was built in configure_model or init_module)": not gathers,
        "ends workers, whose traces PyTorchProfiler would lose": profiles,
    }
    refuse(what, reasons)
