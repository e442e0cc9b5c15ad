"""``PipelineMonitor``: a callback that shows what the stages of a pipeline do, and when.

    on_train_batch_start ── start recording ──▶ every process
    on_train_batch_end   ── stop recording  ──▶ every process
    next on_train_batch_end  ◀── records ──  scalars, progress bar, picture, trace

The records of a step are taken at the end of the next step: by then every stage has sent them, so no stage waits. A
description of the pipeline, and the times of its start, repairs, checkpoints and end, go to ``pipeline/events.jsonl``.
"""

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, cast

from strategies.common.joined_lists import lengths_of
from strategies.lightning.compat import (
    Callback,
    LightningModule,
    MisconfigurationException,
    TensorBoardLogger,
    Trainer,
    TrainerFn,
    is_accumulating,
    logged_step,
    rank_zero_info,
    rank_zero_warn,
)
from strategies.lightning.hooks import Undo, add_to_progress_bar
from strategies.pipeline.control.batch_recording import BatchRecording
from strategies.pipeline.control.client import RemoteStage
from strategies.pipeline.control.clocks import Clock
from strategies.pipeline.driver import Pipeline
from strategies.pipeline.stage.records import ProcessRecords, Record
from strategies.planning.imbalance import STEPS_TO_ASSESS, LastSteps, assess, measured_step
from strategies.planning.measured import (
    from_first_forward,
    measured_timetable,
    parts_of,
    predicted_timetable,
    trace_of,
    uses_of,
)
from strategies.planning.picture import pixels, stacked_svg
from strategies.planning.simulator import Simulation
from strategies.rpc_sequential import RPCSequentialStrategy

WORTH_TELLING = 0.05
"""The share of a step's time that another balance must be predicted to save before the monitor names it."""

_OWN_FILES = re.compile(r"events\.jsonl|step-\d+\.(svg|trace\.json)")


@dataclass
class _RecordedStep:
    """A recorded step.

    Attributes:
        number: The number of the step in loggers.
        recording: The recording of all processes.
        end: When the driver had ended the step.
    """

    number: int
    recording: BatchRecording
    end: float = 0.0


@dataclass
class _Told:
    """The messages about a balance so far.

    Attributes:
        gain: The largest share of a step's time that another balance was predicted to save; 0 without a prediction.
        slow: The processes that were reported as slow.
    """

    gain: float = 0.0
    slow: set[int | None] = field(default_factory=set)


class PipelineMonitor(Callback):
    """Shows what every stage of a pipeline does: in the progress bar, in loggers, as pictures and as traces.

    Every ``every_n_steps``-th step of ``fit`` is recorded. For such a step,

    * loggers get the time that each stage spent in each part of the step, its memory, the measured bubble, and the
      bubble that the schedule predicts for the mean measured time of each action;
    * the progress bar shows the share of the passes in which each stage had work: ``use=83|91%``, with the driver last;
    * a picture of the measured and the predicted timetable goes to ``pipeline/step-N.svg`` in the run's folder, and to
      TensorBoard if that is a logger.

    If :data:`STEPS_TO_ASSESS` recorded steps show that another balance would save more than :data:`WORTH_TELLING` of a
    step, or that one process is much slower than other processes for layers of the same kind, the monitor prints one
    line. It names the process that other processes wait for, and the better balance with its predicted time. The line
    is repeated only if the imbalance gets much worse.

    For the steps in ``trace_steps``, the monitor also writes ``pipeline/step-N.trace.json``, which Perfetto
    (https://ui.perfetto.dev) and ``chrome://tracing`` show. Steps are counted from 0, as Lightning counts them for
    ``self.log``: training batches over all epochs; for accumulated batches, the last one. With several replicas, the
    first replica is recorded.

    ``pipeline/events.jsonl`` gets a line for each event: ``start`` (with balance, layers, schedule and number of
    micro-batches), ``rebalance`` (the same, after layers have moved), ``imbalance`` (the line), ``checkpoint``,
    ``repair`` (of a lost worker, by ``max_restarts``), ``end`` and ``error``, with the time, the epoch and the step. If
    training begins at step 0, files of an earlier run in the folder move to ``pipeline/earlier-1`` and so on.

    Args:
        every_n_steps: The interval of recorded steps.
        trace_steps: Numbers of the steps for which a trace is written.
        dirpath: The parent of the folder ``pipeline``; by default the logger's folder of this run, or
            ``default_root_dir`` if there is no logger.

    Raises:
        MisconfigurationException: If a number is wrong; in ``fit``, if the strategy is not ``RPCSequentialStrategy``.
    """

    def __init__(
        self, every_n_steps: int = 50, trace_steps: Sequence[int] = (), dirpath: str | Path | None = None
    ) -> None:
        if not _is_number(every_n_steps, 1):
            raise MisconfigurationException(
                f"every_n_steps must be a whole number of at least 1, got {every_n_steps!r}."
            )
        if isinstance(trace_steps, str) or not isinstance(trace_steps, Sequence):
            raise MisconfigurationException(f"trace_steps must be a list of numbers of steps, got {trace_steps!r}.")
        for number in trace_steps:
            if not _is_number(number, 0):
                raise MisconfigurationException(f"trace_steps must be whole numbers of at least 0, got {number!r}.")
        self.every_n_steps, self.trace_steps = every_n_steps, frozenset(trace_steps)
        self._dirpath = dirpath
        self._folder = Path()
        self._current: _RecordedStep | None = None
        self._waiting: _RecordedStep | None = None
        self._clocks: tuple[Sequence[RemoteStage], list[Clock]] | None = None
        self._use: dict[str, str] = {}
        self._undo: Undo | None = None
        self._draws_pixels = True
        self._is_training = False
        self._balance: list[int] = []
        self._costs = LastSteps(STEPS_TO_ASSESS)
        self._told: dict[tuple[int, ...], _Told] = {}
        self._num_repairs = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the strategy, before any process is started."""
        if not isinstance(trainer.strategy, RPCSequentialStrategy):
            raise MisconfigurationException(
                "PipelineMonitor shows the stages of a pipeline, but the strategy is "
                f"{type(trainer.strategy).__name__}. Set strategy='rpc_sequential', or leave the callback out."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the run's folder, and forget an earlier run, which may have ended with an error before ``teardown``."""
        self._forget()
        self._folder = Path(self._dirpath or trainer.log_dir or trainer.default_root_dir) / "pipeline"
        if (bar := trainer.progress_bar_callback) is not None:
            self._undo = add_to_progress_bar(bar, lambda: self._use)
        self._is_training = True
        if not logged_step(trainer) and trainer.is_global_zero:
            self._put_away()
        pipeline = _pipeline_of(trainer)
        self._balance = pipeline.balance
        self._note(trainer, "start", **_described(pipeline))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start to record, if this step is one of the recorded steps."""
        number = logged_step(trainer)
        if (number + 1) % self.every_n_steps and number not in self.trace_steps:
            return
        if not trainer.is_global_zero or is_accumulating(trainer):
            return
        recording = _pipeline_of(trainer).start_recording(trainer.fit_loop.epoch_loop.total_batch_idx)
        self._current = _RecordedStep(number, recording)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report the previous recorded step, and stop recording this step."""
        self._note_repairs(trainer)
        if (pipeline := _pipeline_of(trainer)).balance != self._balance:
            before, self._balance = self._balance, pipeline.balance
            self._note(trainer, "rebalance", before=before, **_described(pipeline))
        if self._waiting is not None:
            self._report(trainer)
        if self._current is not None:
            self._current.end = time.perf_counter()
            self._current.recording.stop()
            self._waiting, self._current = self._current, None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the last recorded step while the stages still run."""
        if self._waiting is not None:
            self._report(trainer)
        self._note_repairs(trainer)
        self._note(trainer, "end")
        self._is_training = False

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Record the event of a checkpoint."""
        if self._is_training:
            self._note(trainer, "checkpoint")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Record the error with which training ended."""
        if self._is_training:
            self._note_repairs(trainer)
            told = str(exception).strip().partition("\n")[0]
            self._note(trainer, "error", error=": ".join(filter(None, (type(exception).__name__, told))))
        self._is_training = False

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Record the last repairs, and forget steps that have not been reported."""
        if stage == TrainerFn.FITTING and self._folder != Path():
            self._note_repairs(trainer)
        self._forget()

    def _forget(self) -> None:
        self._current = self._waiting = self._clocks = None
        self._use = {}
        self._costs.clear()
        self._told.clear()
        self._num_repairs = 0
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _report(self, trainer: Trainer) -> None:
        step, self._waiting = self._waiting, None
        assert step is not None
        pipeline = _pipeline_of(trainer)
        if (recorded := step.recording.take()) is None:
            return  # a worker was lost with its records
        rows = self._on_one_clock(pipeline, recorded)
        names = [*(f"stage {i}" for i in range(len(rows) - 1)), "driver"]
        if step.number in self.trace_steps:
            self._write(f"step-{step.number}.trace.json", json.dumps(trace_of(rows, names)))
        if (step.number + 1) % self.every_n_steps:
            return
        end = max((record.end for row in rows for record in row), default=step.end)
        metrics = {"step_ms": 1e3 * (max(end, step.end) - step.recording.begin)}
        for name, row, own in zip(names, rows, recorded, strict=True):
            key = name.replace(" ", "_")
            metrics |= {f"{key}/{part}_ms": 1e3 * seconds for part, seconds in parts_of(row).items()}
            metrics[f"{key}/memory_mib"] = own.memory_bytes / 2**20
        whole = measured_timetable(rows, len(lengths_of(pipeline.module)))
        if whole is not None:
            timetable = from_first_forward(whole)
            uses = uses_of(timetable)
            self._use = {"use": "|".join(f"{use:.0%}".rstrip("%") for use in uses) + "%"}
            metrics |= {f"{name.replace(' ', '_')}/use": use for name, use in zip(names, uses, strict=True)}
            metrics["bubble"] = timetable.bubble_fraction
            title = f"step {step.number} measured: bubble {timetable.bubble_fraction:.1%}"
            timetables = [(title, timetable)]
            if (predicted := _predicted(pipeline, rows, whole)) is not None:
                metrics["bubble_predicted"] = predicted.bubble_fraction
                timetables.append((f"predicted: bubble {predicted.bubble_fraction:.1%}", predicted))
            self._draw(trainer, step, timetables, names)
            self._assess(trainer, step, recorded, rows, names)
        for logger in trainer.loggers:
            logger.log_metrics({f"pipeline/{name}": value for name, value in metrics.items()}, step.number)

    def _assess(
        self,
        trainer: Trainer,
        step: _RecordedStep,
        recorded: Sequence[ProcessRecords],
        rows: Sequence[Sequence[Record]],
        names: Sequence[str],
    ) -> None:
        """Print a line if another balance would be faster or if a process is slow, unless this has been reported."""
        pipeline = _pipeline_of(trainer)
        settings, balance = pipeline.settings, pipeline.balance
        if len(pipeline.stages) < 2 or not settings.pipelined_backward or step.recording.balance != balance:
            return
        lengths = lengths_of(pipeline.module)
        costs = measured_step(
            rows,
            recorded,
            balance,
            whole_batch=not settings.interleaves,
            checkpoint=settings.checkpoint,
            lengths=lengths,
        )
        if costs is None or not self._costs.add(costs) or len(self._costs.steps) < STEPS_TO_ASSESS:
            return
        found = assess(
            self._costs.steps,
            pipeline.kinds_of_layers(),
            pipeline.programs.actions_of_step,
            balance,
        )
        told = self._told.setdefault(tuple(balance), _Told())
        is_new = found.gain >= max(WORTH_TELLING, 2 * told.gain) or found.slowest not in (None, *told.slow)
        if is_new:
            told.gain, told.slow = max(told.gain, found.gain), {*told.slow, found.slowest}
            called = [*names[:-1], "the driver"]
            line = found.described(called, least_gain=WORTH_TELLING)
            self._note(trainer, "imbalance", line=line)
            rank_zero_info(f"PipelineMonitor: {line}")

    def _on_one_clock(self, pipeline: Pipeline, recorded: Sequence[ProcessRecords]) -> list[list[Record]]:
        """Return the records of each process with times on the driver's clock."""
        if self._clocks is None or self._clocks[0] is not pipeline.remotes:
            self._clocks = pipeline.remotes, [Clock(remote) for remote in pipeline.remotes]
        with pipeline.failures.explained():
            ahead = [*(clock.ahead() for clock in self._clocks[1]), 0.0]
        return [
            [record.shifted(seconds) for record in own.records] if seconds else own.records
            for own, seconds in zip(recorded, ahead, strict=True)
        ]

    def _draw(
        self, trainer: Trainer, step: _RecordedStep, timetables: Sequence[tuple[str, Simulation]], names: Sequence[str]
    ) -> None:
        self._write(f"step-{step.number}.svg", stacked_svg(timetables, names))
        boards = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if not boards or not self._draws_pixels:
            return
        try:
            image = pixels(timetables, names)
        except ImportError:
            self._draws_pixels = False
            rank_zero_warn(
                "PipelineMonitor shows no pictures in TensorBoard, because Pillow is not installed (pip install "
                f"pillow). The pictures in {self._folder} are not affected."
            )
            return
        for logger in boards:
            logger.experiment.add_image("pipeline/timetable", image, step.number, dataformats="HWC")

    def _write(self, name: str, text: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / name).write_text(text)

    def _put_away(self) -> None:
        """Move the files of an earlier run in the folder to a separate folder."""
        left = [path for path in self._folder.glob("*") if path.is_file() and _OWN_FILES.fullmatch(path.name)]
        if left:
            number = next(n for n in count(1) if not (self._folder / f"earlier-{n}").exists())
            (folder := self._folder / f"earlier-{number}").mkdir()
            for path in left:
                path.rename(folder / path.name)

    def _note_repairs(self, trainer: Trainer) -> None:
        """Record the repairs of lost workers since the last call."""
        repairs = cast(RPCSequentialStrategy, trainer.strategy).repairs
        for each in repairs[self._num_repairs :]:
            seconds = {name: round(getattr(each, name), 2) for name in ("seconds", "restart_seconds")}
            lost = each.lost.partition("\n")[0]
            self._note(trainer, "repair", time=each.time, lost=lost, **seconds, num_messages=each.num_messages)
        self._num_repairs = len(repairs)

    def _note(self, trainer: Trainer, event: str, **facts: Any) -> None:
        if not trainer.is_global_zero:
            return
        line = {"time": time.time(), "event": event, "epoch": trainer.current_epoch, "step": logged_step(trainer)}
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "events.jsonl").open("a") as file:  # one write of a whole line
            file.write(json.dumps({**line, **facts}) + "\n")


def _pipeline_of(trainer: Trainer) -> Pipeline:
    strategy = trainer.strategy
    assert isinstance(strategy, RPCSequentialStrategy) and strategy.pipeline is not None
    return strategy.pipeline


def _described(pipeline: Pipeline) -> dict[str, Any]:
    """Return a description of a pipeline for the file of events."""
    schedule = pipeline.settings.schedule
    return {
        "schedule": schedule if isinstance(schedule, str) else getattr(schedule, "__qualname__", str(schedule)),
        "microbatches": pipeline.settings.microbatches,
        "balance": pipeline.balance,
        "processes": [
            {
                "name": "driver" if i == len(pipeline.stages) - 1 else f"stage {i}",
                "layers": [
                    {
                        "place": place,
                        "name": name,
                        "class": type(layer).__name__,
                        "parameters": sum(parameter.numel() for parameter in layer.parameters()),
                    }
                    for place, (name, layer) in zip(
                        (place for span in stage.spans for place in span), stage._modules.items(), strict=True
                    )
                    if layer is not None
                ],
            }
            for i, stage in enumerate(pipeline.stages)
        ],
    }


def _predicted(pipeline: Pipeline, rows: Sequence[Sequence[Record]], measured: Simulation) -> Simulation | None:
    """Return the simulation of a pass with its measured costs; ``None`` if the pass did not run its table."""
    settings = pipeline.settings
    if not settings.pipelined_backward:
        return None  # the backward passes of all micro-batches were one action
    microbatches = 1 + max(step.microbatch for step in measured.end)
    table = pipeline.programs.actions_of_step(microbatches)
    return from_first_forward(predicted_timetable(rows, measured, table, whole_batch=not settings.interleaves))


def _is_number(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
