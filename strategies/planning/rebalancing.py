"""``rebalance="auto"``: record single steps, and decide after each epoch or n steps whether layers move.

batch      0    1    2    3    4    5    6    7  │ 0    1
recorded        ✓         ✓         ✓         ✓  │
                          └─────────┴─────────┘  ▲ by the last three: is another balance clearly faster?
"""

from collections.abc import Iterable
from typing import Any

from strategies.common.joined_lists import lengths_of
from strategies.common.names import did_you_mean
from strategies.lightning.compat import MisconfigurationException, rank_zero_warn
from strategies.lightning.features.feature import Feature
from strategies.lightning.features.layers.moving_layers import check_can_move, check_movable, refuse
from strategies.lightning.hooks import Undo
from strategies.lightning.options import Options, Rebalance
from strategies.lightning.run import Preparation, Run
from strategies.pipeline.control.batch_recording import BatchRecording
from strategies.pipeline.driver import Pipeline, StepInProgress
from strategies.pipeline.executor.settings import Settings
from strategies.planning.imbalance import STEPS_TO_ASSESS, Imbalance, LastSteps, assess, measured_step

AUTO = "auto"

_RECORDED_PER_PERIOD = 8
"""The number of recorded steps in an epoch, or in n steps."""

_UNKNOWN_PERIOD = 200
"""The assumed number of batches of an epoch of unknown length."""


class Rebalancing(Feature):
    """Moves layers to other stages when recorded steps say that it is due and worthwhile.

    Args:
        every_n_steps: Decide whenever so many batches have run; ``None``: at the end of each epoch.
        least_gain: The share of the time of a step's passes that another balance must be predicted to save.
    """

    options = ("rebalance",)

    def __init__(self, every_n_steps: int | None, least_gain: float) -> None:
        self._decisions = Decisions(every_n_steps, least_gain)
        self._is_over = False

    @classmethod
    def of(cls, options: Options) -> "Rebalancing | None":
        """Return the feature if layers may move by themselves."""
        if options.rebalance is None:
            return None
        given = checked_rebalance(options.rebalance, options.settings)
        check_movable(
            "rebalance='auto'",
            num_pipelines=options.data_parallel_size,
            is_external=False,
            devices=[],
            gathers=options.gather_on_end is not False,
            profiles=False,
        )
        return cls(given.every_n_steps, given.threshold)

    def check(self, prepared: Preparation) -> None:
        """Check that layers can move in this run."""
        if prepared.is_fitting:
            check_can_move("rebalance='auto'", prepared)

    def begin(self, run: Run) -> Iterable[Undo]:
        """Forget an earlier run."""
        self._decisions.begin()
        yield self._decisions.begin  # an error may have ended a batch that is recorded

    def on_train_batch_start(self, run: Run) -> None:
        """Move layers to other stages if that is due and worthwhile; record the batch if it is its turn."""
        if self._is_over or run.num_stages < 2:
            return
        pipeline, trainer = run.pipeline, run.trainer
        found = self._decisions.before_batch(pipeline, run.model.current_epoch)
        if found is not None:
            names = [*(f"stage {i}" for i in range(run.num_stages - 1)), "the driver"]
            why = found.described(names, least_gain=0.0).removesuffix(".")
            try:
                run.move(found.better, f"; {why}")
            except StepInProgress as error:
                rank_zero_warn(f"The balance stays {found.balance} for now: {error}")
            except MisconfigurationException as error:
                rank_zero_warn(f"The balance stays {found.balance} from now on: {error}")
                self._is_over = True
                return
        batch = trainer.fit_loop.epoch_loop.total_batch_idx
        self._decisions.begin_batch(pipeline, batch, float(trainer.num_training_batches))

    def on_batches_end(self, run: Run) -> None:
        """Stop recording the last batch."""
        self._decisions.stop()


class Decisions:
    """Decides from recorded steps when layers move.

    Args:
        every_n_steps: The number of batches between decisions; ``None`` to decide at the end of each epoch.
        least_gain: The minimum share of the time of a step's passes that another balance must be predicted to save.
    """

    def __init__(self, every_n_steps: int | None, least_gain: float) -> None:
        self._every_n_steps, self._least_gain = every_n_steps, least_gain
        self.begin()

    def begin(self) -> None:
        """Forget an earlier run."""
        self._steps = LastSteps()
        self._recording: BatchRecording | None = None
        self._epoch: int | None = None
        self._num_batches = 0

    def stop(self) -> None:
        """Stop recording, because the batch has ended."""
        if self._recording is not None:
            self._recording.stop()

    def before_batch(self, pipeline: Pipeline, epoch: int) -> Imbalance | None:
        """Take the recording of the previous batch. Returns the assessment if layers must move now.

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
            pipeline.programs.actions_of_step,
            pipeline.balance,
        )
        return found if found.gain >= self._least_gain else None

    def begin_batch(self, pipeline: Pipeline, batch: int, batches_per_epoch: float) -> None:
        """Start to record the next batch, if it is one of the recorded batches.

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
        rows = [own.records for own in recorded]  # on one clock, because all processes are on one host
        costs = measured_step(
            rows,
            recorded,
            pipeline.balance,
            whole_batch=not pipeline.settings.interleaves,
            checkpoint=pipeline.settings.checkpoint,
            lengths=lengths_of(pipeline.module),
        )
        if costs is not None:
            self._steps.add(costs)


def checked_rebalance(rebalance: Any, settings: Settings) -> Rebalance:
    """Return when layers move.

    Args:
        rebalance: The argument of the strategy, which is given.
        settings: Settings of the pipeline.

    Raises:
        MisconfigurationException: If a value is wrong, or if layers cannot move under these settings.
    """
    if rebalance != AUTO and not isinstance(rebalance, Rebalance):
        raise MisconfigurationException(
            f"rebalance must be 'auto', Rebalance(...) or None, got {rebalance!r}"
            f"{did_you_mean(str(rebalance), (AUTO,))}"
        )
    given = Rebalance() if rebalance == AUTO else rebalance
    number, threshold = given.every_n_steps, given.threshold
    if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < STEPS_TO_ASSESS):
        raise MisconfigurationException(
            f"every_n_steps of rebalance must be a whole number of at least {STEPS_TO_ASSESS}, of which so many are "
            f"recorded, got {number!r}."
        )
    if not isinstance(threshold, int | float) or not 0 < threshold < 1:
        raise MisconfigurationException(f"threshold of rebalance must be between 0 and 1, got {threshold!r}.")
    reasons = {
        "measures the passes of each micro-batch, but pipelined_backward=False runs the backward passes of all at "
        "once": not settings.pipelined_backward,
        "keeps the order of passes, which schedule='auto' has chosen together with the balance": settings.is_auto,
    }
    refuse("rebalance='auto'", reasons)
    return given
