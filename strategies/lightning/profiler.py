"""Lightning's ``PyTorchProfiler`` over the stages of a pipeline: one trace a stage, recorded at the same time.

The driver's own trace is Lightning's. Whenever the profiler records there, each worker records as well, and writes
``NAME.stage-I.TIME.pt.trace.json`` beside the driver's ``NAME.TIME.pt.trace.json``. The times of all of them count from
the same moment by the hosts' clocks, so that a viewer shows them one below the other.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pytorch_lightning.profilers import PyTorchProfiler
from pytorch_lightning.profilers.pytorch import RegisterRecordFunction
from torch import nn
from torch.profiler import ProfilerAction

from strategies.pipeline.control.commands import StageCommands
from strategies.pipeline.driver import Pipeline

_OPTIONS = ("activities", "record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")
"""Arguments of ``torch.profiler.profile`` that hold for every stage."""


class ProfiledStages:
    """Has the stages of a pipeline recorded along with the driver.

    Lightning labels every module by hooks that refer to the model, which can neither be copied nor sent to another
    process. From now on only modules of the driver have them; a stage labels each layer by itself.

    Args:
        profiler: The Trainer's.
        model: The model, whose layers are about to be measured and sent to workers.
    """

    def __init__(self, profiler: PyTorchProfiler, model: nn.Module) -> None:
        self._profiler, self._model = profiler, model
        self._pipeline: Pipeline | None = None
        self._records, self._action = False, ""
        for module in model.modules():
            hooks: list[dict[int, Any]] = [module._forward_pre_hooks, module._forward_hooks]
            for own in hooks:
                for key in [key for key, hook in own.items() if _labels(hook)]:
                    del own[key]
        profiler._register = _labels_of(model, lambda module: False)  # or it would label all of them again

    def follow(self, pipeline: Pipeline) -> None:
        """Begins, when the workers have started."""
        self._pipeline = pipeline
        elsewhere = {pipeline.module, *(module for layers in pipeline.stages[:-1] for module in layers.modules())}
        if self._profiler._record_module_names:
            self._profiler._register = _labels_of(self._model, lambda module: module not in elsewhere)
            self._profiler._register.__enter__()
        if pipeline.remotes and not self._profiler._emit_nvtx:
            vars(self._profiler)["stop"] = partial(self._stop, self._profiler.stop)
            if self._is_recording():
                self._start()

    def end(self) -> None:
        """Ends, while the workers are still there; what is being recorded is written."""
        if self._pipeline is not None:
            vars(self._profiler).pop("stop", None)
            self._save()
            self._pipeline = None
        elif isinstance(self._profiler._register, RegisterRecordFunction):
            self._profiler._register = None

    def _stop(self, stop: Callable[[str], None], action_name: str) -> None:
        """Stands for the profiler's ``stop``, which goes on in its schedule after each step."""
        is_step = action_name.endswith(tuple(self._profiler.STEP_FUNCTIONS))
        ends = is_step and self._action_of_now() == ProfilerAction.RECORD_AND_SAVE
        self._action = action_name if is_step else self._action
        stop(action_name)
        if ends:
            self._save()
        if self._is_recording() and not self._records:
            self._start()

    def _action_of_now(self) -> Any:
        return getattr(self._profiler.profiler, "current_action", None)

    def _is_recording(self) -> bool:
        return self._action_of_now() in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)

    def _start(self) -> None:
        assert self._pipeline is not None
        given = self._profiler._profiler_kwargs
        for remote in self._pipeline.remotes:
            options = {name: given[name] for name in _OPTIONS if name in given}
            remote.queue(StageCommands.start_trace, options)
        self._records = True

    def _save(self) -> None:
        """Writes what the workers have recorded."""
        pipeline, profiler = self._pipeline, self._profiler
        if not self._records or pipeline is None or pipeline.failures.any:
            return
        self._records = False
        answers = [(remote, remote.start(StageCommands.stop_trace)) for remote in pipeline.remotes]
        for i, (remote, answer) in enumerate(answers):
            trace = remote.result(answer)
            if trace is not None and profiler.dirpath is not None and profiler._export_to_chrome:
                name = profiler._prepare_filename(action_name=self._action or None, extension=f".stage-{i}")
                path = Path(profiler.dirpath) / f"{name}.{time.time_ns()}.pt.trace.json"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(trace)


def _labels_of(model: nn.Module, is_labelled: Callable[[nn.Module], bool]) -> RegisterRecordFunction:
    """Lightning's labels of some modules; they are there when this is entered."""
    some: Any = SimpleNamespace(
        named_modules=lambda: [(name, module) for name, module in model.named_modules() if is_labelled(module)]
    )
    return RegisterRecordFunction(some)


def _labels(hook: Any) -> bool:
    return isinstance(hook, partial) and isinstance(getattr(hook.func, "__self__", None), RegisterRecordFunction)
