"""Traces every stage of a pipeline whenever Lightning's ``PyTorchProfiler`` traces the driver.

The trace of each worker is written to ``NAME.stage-I.TIME.pt.trace.json`` next to the driver's
``NAME.TIME.pt.trace.json``. All traces use absolute times of the hosts' clocks, so a viewer shows them aligned.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.profiler import ProfilerAction

from strategies.lightning.compat import (
    ModuleLabels,
    PyTorchProfiler,
    emits_nvtx,
    exports_to_chrome,
    profile_arguments,
    profile_filename,
)
from strategies.lightning.features.feature import Feature
from strategies.lightning.hooks import Undo, around_stop
from strategies.lightning.run import Preparation, Run
from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.driver import Pipeline

_OPTIONS = ("activities", "record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")
"""Arguments of ``torch.profiler.profile`` that apply to every stage."""


class ProfilerOnStages(Feature):
    """Traces all stages if the Trainer has a ``PyTorchProfiler``."""

    def prepare(self, prepared: Preparation) -> Iterable[Undo]:
        """Remove the labels of modules; :class:`ProfiledStages` explains why."""
        if prepared.is_profiled:
            labels = ModuleLabels(cast(Any, prepared.trainer).profiler, prepared.model)
            labels.remove()
            yield labels.allow

    def begin(self, run: Run) -> Iterable[Undo]:
        """Trace the stages until the run ends."""
        if run.is_profiled:
            yield ProfiledStages(cast(Any, run.trainer).profiler, run.model, run.pipeline).end


class ProfiledStages:
    """Traces the stages of a pipeline whenever the Trainer's profiler traces the driver.

    Lightning labels every module with hooks that refer to the whole model, so a labelled module can neither be copied
    nor sent to another process. These labels are therefore removed before layers are measured and sent. This class
    labels the driver's modules again, and each stage labels its layers.

    Args:
        profiler: The Trainer's profiler.
        model: The model.
        pipeline: The pipeline, whose workers have started.
    """

    def __init__(self, profiler: PyTorchProfiler, model: nn.Module, pipeline: Pipeline) -> None:
        self._profiler, self._pipeline = profiler, pipeline
        self._undo: list[Undo] = []
        self._traces_stages, self._action = False, ""
        elsewhere = {pipeline.module, *(module for layers in pipeline.stages[:-1] for module in layers.modules())}
        ModuleLabels(profiler, model).add(lambda module: module not in elsewhere)
        if pipeline.remotes and not emits_nvtx(profiler):
            self._undo.append(around_stop(profiler, self._stop))
            if self._traces_driver():
                self._start()

    def end(self) -> None:
        """Write the current traces and stop following the profiler; called while the workers still run."""
        for undo in self._undo:
            undo()
        self._save()

    def _stop(self, stop: Callable[[str], None], action_name: str) -> None:
        """Follow the profiler's schedule, which advances when Lightning reports the end of a step."""
        is_step = action_name.endswith(tuple(self._profiler.STEP_FUNCTIONS))
        ends = is_step and self._current_action() == ProfilerAction.RECORD_AND_SAVE
        self._action = action_name if is_step else self._action
        stop(action_name)
        if ends:
            self._save()
        if self._traces_driver() and not self._traces_stages:
            self._start()

    def _current_action(self) -> Any:
        return getattr(self._profiler.profiler, "current_action", None)

    def _traces_driver(self) -> bool:
        return self._current_action() in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)

    def _start(self) -> None:
        given = profile_arguments(self._profiler)
        for remote in self._pipeline.remotes:
            options = {name: given[name] for name in _OPTIONS if name in given}
            remote.ask(StageCommands.trace, options)  # the answer is empty
        self._traces_stages = True

    def _save(self) -> None:
        """Fetch the traces of the workers and write each into a file."""
        pipeline, profiler = self._pipeline, self._profiler
        if not self._traces_stages or pipeline.failures.any:
            return
        self._traces_stages = False
        answers = [remote.ask(StageCommands.trace, None) for remote in pipeline.remotes]
        for i, answer in enumerate(answers):
            trace = answer.wait()
            if trace is not None and profiler.dirpath is not None and exports_to_chrome(profiler):
                name = profile_filename(profiler, self._action or None, f".stage-{i}")
                path = Path(profiler.dirpath) / f"{name}.{time.time_ns()}.pt.trace.json"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(trace)
