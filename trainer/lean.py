"""Lightning's training step without work that has no effect: hooks that nobody overrides, idle profilers, inspections.

Lightning's own functions run, over namespaces in which some of the functions that they call are replaced by lighter
ones. Nothing of Lightning's modules and classes changes, so a plain Trainer in the same process is not affected. Each
lighter function does what Lightning's does and leaves unusual cases to it. What a hook is, is looked up at every call,
so a hook runs that has been overridden or attached in the middle of a run.

Where the installed version of Lightning has other sources than those that the lighter functions stand for
(:func:`strategies.lightning.compat.has_known_sources`), Lightning's functions run as they are.
"""

import inspect
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from strategies.lightning.compat import (
    CURRENT_HOOK,
    AutomaticOptimization,
    Closure,
    ClosureResult,
    DataFetcher,
    DataHooks,
    EvaluationLoop,
    LightningModule,
    LoggerConnector,
    PassThroughProfiler,
    Precision,
    Profiler,
    ResultCollection,
    ResultMetric,
    RunningStage,
    Strategy,
    Trainer,
    TrainerFn,
    TrainingEpochLoop,
    call_batch_hook,
    datamodule_with_hooks,
    empty_hooks,
    has_known_sources,
    hook_calls,
    is_of_lightning,
    is_param_in_hook_signature,
    trainer_of,
)

_LIGHTNINGS = hook_calls()
_is_logged, _DEBUG = logging.getLogger(_LIGHTNINGS.__name__).isEnabledFor, logging.DEBUG
_EMPTY = empty_hooks()
_SETATTR = nn.Module.__setattr__
_CONFIGURE_CLIPPING = LightningModule.configure_gradient_clipping
_CLIP_MODEL, _CLIP_PRECISION = LightningModule.clip_gradients, Precision.clip_gradients
_CLOSURE, _ENABLED = Closure.closure, inspect.unwrap(Closure.closure)
_RESTARTING = cast(property, EvaluationLoop.restarting)

_OF_PRECISION = ("pre_backward", "post_backward", "_after_closure", "_clip_gradients", "train_step_context")
_OF_MODEL = ("_call_batch_hook", "log")
_OF_PROFILER = ("profile",)
"""Methods that call hooks, inspect signatures or enter contexts in every step, of objects that are not Relay's."""


# Calls of hooks. Lightning notes the name of the hook in the model, by two assignments that go through
# torch.nn.Module.__setattr__, and enters a context of the profiler, also if the hook does nothing.


def _function_of(holder: Any, name: str) -> Any:
    """Return the function behind a method, or ``None`` if there is none, as for what the user has attached."""
    return getattr(getattr(holder, name, None), "__func__", None)


def _is_followed(trainer: Any) -> bool:
    """Return whether a profiler or a log follows the calls of hooks."""
    return type(trainer.profiler) is not PassThroughProfiler or _is_logged(_DEBUG)


def _call_lightning_module_hook(
    trainer: Trainer, hook_name: str, *args: Any, pl_module: LightningModule | None = None, **kwargs: Any
) -> Any:
    module = pl_module or trainer.lightning_module
    hook = getattr(module, hook_name, None)
    if not callable(hook) or _is_followed(trainer):
        return _LIGHTNINGS._call_lightning_module_hook(trainer, hook_name, *args, pl_module=pl_module, **kwargs)
    function = getattr(hook, "__func__", None)
    if function in _EMPTY or (function is _CONFIGURE_CLIPPING and _clips_nothing(trainer, module, kwargs)):
        return None
    if type(module).__setattr__ is not _SETATTR:
        return _LIGHTNINGS._call_lightning_module_hook(trainer, hook_name, *args, pl_module=pl_module, **kwargs)
    attributes = module.__dict__
    before, attributes[CURRENT_HOOK] = attributes[CURRENT_HOOK], hook_name
    output = hook(*args, **kwargs)
    attributes[CURRENT_HOOK] = before
    return output


def _clips_nothing(trainer: Trainer, module: LightningModule, arguments: dict[str, Any]) -> bool:
    """Return whether Lightning's own ``configure_gradient_clipping`` would find that there is nothing to clip."""
    return (
        arguments == {"gradient_clip_val": None, "gradient_clip_algorithm": None}
        and trainer.gradient_clip_val is None
        and trainer.gradient_clip_algorithm is None
        and _function_of(module, "clip_gradients") is _CLIP_MODEL
        and _function_of(trainer.precision_plugin, "clip_gradients") is _CLIP_PRECISION
    )


def _call_strategy_hook(trainer: Trainer, hook_name: str, *args: Any, **kwargs: Any) -> Any:
    hook = getattr(trainer.strategy, hook_name, None)
    if not callable(hook) or _is_followed(trainer):
        return _LIGHTNINGS._call_strategy_hook(trainer, hook_name, *args, **kwargs)
    if getattr(hook, "__func__", None) in _EMPTY:
        return None
    module = trainer.lightning_module
    if type(module).__setattr__ is not _SETATTR:
        return _LIGHTNINGS._call_strategy_hook(trainer, hook_name, *args, **kwargs)
    attributes = module.__dict__
    before, attributes[CURRENT_HOOK] = attributes[CURRENT_HOOK], hook_name
    output = hook(*args, **kwargs)
    attributes[CURRENT_HOOK] = before
    return output


def _call_callback_hooks(
    trainer: Any, hook_name: str, *args: Any, monitoring_callbacks: bool | None = None, **kwargs: Any
) -> None:
    if monitoring_callbacks is not None or _is_followed(trainer):
        _LIGHTNINGS._call_callback_hooks(trainer, hook_name, *args, monitoring_callbacks=monitoring_callbacks, **kwargs)
        return
    attributes: dict[str, Any] | None = None
    before = None
    for callback in trainer.callbacks:
        hook = getattr(callback, hook_name)
        if getattr(hook, "__func__", None) in _EMPTY or not callable(hook):
            continue
        if attributes is None:
            module = trainer.lightning_module
            if not module or type(module).__setattr__ is not _SETATTR:
                _LIGHTNINGS._call_callback_hooks(trainer, hook_name, *args, **kwargs)
                return
            attributes = module.__dict__
            before, attributes[CURRENT_HOOK] = attributes[CURRENT_HOOK], hook_name
        hook(trainer, trainer.lightning_module, *args, **kwargs)
    if attributes is not None:
        attributes[CURRENT_HOOK] = before


_LIGHTER = {own.__name__: own for own in (_call_lightning_module_hook, _call_strategy_hook, _call_callback_hooks)}
_REPLACED = {name: getattr(_LIGHTNINGS, name) for name in _LIGHTER}


# Functions that stand in for a whole function of Lightning.

_BATCH_HOOKS = {
    name: getattr(DataHooks, name)
    for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
}


def _call_batch_hook(module: LightningModule, hook_name: str, *args: Any) -> Any:
    trainer, lightnings = trainer_of(module), _BATCH_HOOKS.get(hook_name)
    if trainer is None or lightnings is None or _is_followed(trainer):
        return call_batch_hook(module, hook_name, *args)
    datamodule = datamodule_with_hooks(trainer)
    if datamodule is not None and _function_of(datamodule, hook_name) is not lightnings:
        return call_batch_hook(module, hook_name, *args)
    if _function_of(module, hook_name) is lightnings:
        if hook_name != "transfer_batch_to_device":
            return args[0]
        if (moved := _without_move(*args)) is not None:
            return moved
    elif datamodule is not None:  # a warning if both override it
        return call_batch_hook(module, hook_name, *args)
    return _call_lightning_module_hook(trainer, hook_name, *args)


def _without_move(batch: Any, device: Any, dataloader_idx: int) -> Any:
    """Return what ``move_data_to_device`` makes of tensors that are on the device already; otherwise ``None``."""
    kind = type(batch)
    for value in batch if kind is list or kind is tuple else batch.values() if kind is dict else (batch,):
        if type(value) is not Tensor or value.device != device:
            return None
    return batch.copy() if kind is list or kind is dict else batch


def _train_step_context(precision: Precision) -> AbstractContextManager[Any]:
    return precision.forward_context()


def _profile(profiler: Profiler, action_name: str) -> AbstractContextManager[Any]:
    if type(profiler) is not PassThroughProfiler:
        return Profiler.profile(profiler, action_name)
    return nullcontext(action_name)


_STAND_INS: dict[Any, Callable[..., Any]] = {
    call_batch_hook: _call_batch_hook,
    Precision.train_step_context: _train_step_context,
    Profiler.profile: _profile,
}


class LeanClosure(Closure):
    """Lightning's closure; it enters no context to enable gradients where they are enabled."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        if not torch.is_grad_enabled() or Closure.closure is not _CLOSURE:
            return super().__call__(*args, **kwargs)
        try:
            self._result = _ENABLED(self, *args, **kwargs)
        finally:
            if not torch.is_grad_enabled():
                torch.set_grad_enabled(True)
        return self._result.loss


class _Signatures:
    """Answers ``is_param_in_hook_signature`` from memory if it asks about the same function as before."""

    def __init__(self) -> None:
        self._answers: dict[Any, tuple[Any, bool, bool]] = {}

    def __call__(
        self, hook_fx: Callable[..., Any], param: str, explicit: bool = False, min_args: int | None = None
    ) -> bool:
        asked, is_method = (param, explicit, min_args), type(hook_fx) is MethodType
        function = hook_fx.__func__ if isinstance(hook_fx, MethodType) else hook_fx
        known = self._answers.get(asked)
        if known is None or known[0] is not function or known[1] is not is_method:
            answer = is_param_in_hook_signature(hook_fx, param, explicit, min_args)
            self._answers[asked] = known = (function, is_method, answer)
        return known[2]


class LeanFunctions(dict[Any, Any]):
    """Functions of Lightning, and what runs in their place; anything else stands for itself.

    A function of Lightning runs over a namespace in which some of the functions that it calls are lighter ones, or
    another function stands in for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls, self._signatures = SimpleNamespace(), _Signatures()
        self._namespaces: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._methods: dict[str, Callable[..., Any]] = {}

    def __missing__(self, function: Any) -> Any:
        made = function
        if has_known_sources():
            if function in _STAND_INS:
                made = _STAND_INS[function]
            elif type(function) is FunctionType and is_of_lightning(function.__globals__["__name__"]):
                made = self._over_lighter(function)
        self[function] = made
        return made

    def refresh(self) -> None:
        """Take over what has been replaced in Lightning's modules since the last call, as tests of users do."""
        calls = vars(_LIGHTNINGS)
        vars(self._calls).update(calls)
        vars(self._calls).update({name: own for name, own in _LIGHTER.items() if calls[name] is _REPLACED[name]})
        for original, namespace in self._namespaces:
            namespace.update(original)
            for name, value in original.items():
                if value is _LIGHTNINGS:
                    namespace[name] = self._calls
                elif value is is_param_in_hook_signature:
                    namespace[name] = self._signatures
                elif value is Closure:
                    namespace[name] = LeanClosure

    def method(self, name: str) -> Callable[..., Any]:
        """Return a method that runs what stands for the method of that name of an object's class."""
        if name not in self._methods:
            self._methods[name] = _leaned_log(self) if name == "log" else _leaned_method(name, self)
        return self._methods[name]

    def _over_lighter(self, function: FunctionType) -> FunctionType:
        own = function.__globals__
        namespace = next((lighter for original, lighter in self._namespaces if original is own), None)
        if namespace is None:
            namespace = {}
            self._namespaces.append((own, namespace))
            self.refresh()
        made = FunctionType(
            function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
        )
        made.__kwdefaults__ = function.__kwdefaults__
        return made

    def __reduce__(self) -> Any:
        return LeanFunctions, ()  # modules can be neither pickled nor copied


def leaned(holder: Any, names: Iterable[str], lean: LeanFunctions) -> Callable[[], None]:
    """Make methods of one object call the lighter functions; returns a function that undoes this.

    Copies of the object, also pickled ones, have methods of their own.
    """
    own = vars(holder)
    methods = {name: MethodType(lean.method(name), holder) for name in names if name not in own}
    own.update(methods)

    def undo() -> None:
        for name, method in methods.items():
            if own.get(name) is method:  # the user may have attached another one
                del own[name]

    return undo


def _leaned_method(name: str, lean: LeanFunctions) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return lean[getattr(type(self), name)](self, *args, **kwargs)

    method.__name__ = name  # by which pickle finds the method of the copy
    return method


def _leaned_log(lean: LeanFunctions) -> Callable[..., Any]:
    def log(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = type(self).log
        is_compiling = torch.compiler.is_compiling()  # a step may be compiled
        return (function if is_compiling else lean[function])(self, *args, **kwargs)

    return log


def _functions(names: Iterable[str]) -> Callable[[Any], Any]:
    """Return a function that returns the functions behind methods of an object."""
    return attrgetter(*(f"{name}.__func__" for name in names))


# Functions between the training step and the end of its backward pass that could change the loss.
_FOR_STRATEGY = ("backward", "pre_backward", "post_backward")
_FOR_MODEL = ("backward", "on_before_backward", "on_before_zero_grad", "optimizer_zero_grad")
_FOR_PRECISION = ("pre_backward", "backward", "post_backward")
_functions_of_strategy, _STRATEGY_WITH_LOSS = _functions(_FOR_STRATEGY), attrgetter(*_FOR_STRATEGY)(Strategy)
_functions_of_model, _MODEL_WITH_LOSS = _functions(_FOR_MODEL), attrgetter(*_FOR_MODEL)(LightningModule)
_methods_of_precision = attrgetter(*_FOR_PRECISION)
_functions_of_precision, _PRECISION_WITH_LOSS = _functions(_FOR_PRECISION), _methods_of_precision(Precision)
_functions_of_callback = _functions(("on_before_backward", "on_before_zero_grad"))


class UndividedResult(ClosureResult):
    """The result of a step whose loss is not divided by the number of batches whose gradients are accumulated: one."""

    @classmethod
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> ClosureResult:
        if type(training_step_output) is Tensor and training_step_output.requires_grad and normalize == 1:
            return cls(training_step_output)
        return ClosureResult.from_training_step_output(training_step_output, normalize)


class LeanAutomaticOptimization(AutomaticOptimization):
    """Lightning's automatic optimization over the lighter functions."""

    def __init__(self, trainer: Trainer, lean: LeanFunctions) -> None:
        super().__init__(trainer)
        self._lean = lean

    def _result_class(self) -> type[ClosureResult]:
        return UndividedResult if has_known_sources() and self._is_loss_hidden() else ClosureResult

    output_result_cls: Any = property(_result_class)  # read after each training_step

    def _is_loss_hidden(self) -> bool:
        """Return whether only Lightning's own functions are between the training step and the end of its backward pass.

        Otherwise they would get the tensor that ``training_step`` returned, and not a quotient of it.
        """
        trainer: Any = self.trainer
        lean = self._lean
        precision = trainer.precision_plugin
        try:
            return (
                _functions_of_strategy(trainer.strategy) == _STRATEGY_WITH_LOSS
                and _functions_of_model(trainer.lightning_module) == _MODEL_WITH_LOSS
                and _functions_of_precision(precision)
                == (lean.method("pre_backward"), _PRECISION_WITH_LOSS[1], lean.method("post_backward"))
                and _methods_of_precision(type(precision)) == _PRECISION_WITH_LOSS
                and all(_EMPTY.issuperset(_functions_of_callback(callback)) for callback in trainer.callbacks)
            )
        except AttributeError:  # not a method
            return False

    def _make_closure(self, *args: Any) -> Any:
        return self._lean[AutomaticOptimization._make_closure](self, *args)

    def _make_backward_fn(self, *args: Any) -> Any:
        return self._lean[AutomaticOptimization._make_backward_fn](self, *args)

    def _optimizer_step(self, *args: Any) -> None:
        self._lean[AutomaticOptimization._optimizer_step](self, *args)

    def _on_before_zero_grad(self, *args: Any) -> None:
        self._lean[AutomaticOptimization._on_before_zero_grad](self, *args)

    def _optimizer_zero_grad(self, *args: Any) -> None:
        self._lean[AutomaticOptimization._optimizer_zero_grad](self, *args)

    def _training_step(self, *args: Any) -> Any:
        return self._lean[AutomaticOptimization._training_step](self, *args)


class LeanEvaluationLoop(EvaluationLoop):
    """Lightning's loop over the batches of a validation within a fit, which is told in every step not to restart."""

    def _set(self, restarting: bool) -> None:
        if restarting or self.restarting or not has_known_sources():
            cast(Any, _RESTARTING.fset)(self, restarting)

    restarting = _RESTARTING.setter(_set)


class LeanEpochLoop(TrainingEpochLoop):
    """Lightning's loop over the batches of an epoch, over the lighter functions."""

    def __init__(self, trainer: Trainer, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps=min_steps, max_steps=max_steps)
        self._lean = LeanFunctions()
        self._results: LeanResults = LeanResults(training=True)
        self.automatic_optimization = LeanAutomaticOptimization(trainer, self._lean)
        self.val_loop = LeanEvaluationLoop(
            trainer, TrainerFn.FITTING, RunningStage.VALIDATING, verbose=False, inference_mode=False
        )

    def run(self, data_fetcher: DataFetcher) -> None:
        self._lean.refresh()
        trainer: Any = self.trainer
        undo = [
            leaned(trainer.precision_plugin, _OF_PRECISION, self._lean),
            leaned(trainer.lightning_module, _OF_MODEL, self._lean),
            leaned(trainer.profiler, _OF_PROFILER, self._lean),
        ]
        try:
            super().run(data_fetcher)
        finally:
            for each in undo:
                each()

    def advance(self, data_fetcher: DataFetcher) -> None:
        self._lean[TrainingEpochLoop.advance](self, data_fetcher)

    def _build_kwargs(self, *args: Any) -> Any:
        return self._lean[TrainingEpochLoop._build_kwargs](self, *args)

    # What these return or do is settled by one setting in most runs.

    def _should_accumulate(self) -> bool:
        if self.trainer.accumulate_grad_batches == 1 and has_known_sources():
            return False
        return super()._should_accumulate()

    @property
    def _is_training_done(self) -> bool:
        if self.max_steps == -1 and has_known_sources():
            return self._num_ready_batches_reached()
        return super()._is_training_done

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        if self.trainer.lr_scheduler_configs or not has_known_sources():
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    def _on_before_fetch(self) -> None:
        trainer: Any = self.trainer
        if type(trainer.profiler) is not PassThroughProfiler:
            super()._on_before_fetch()

    def _on_after_fetch(self) -> None:
        trainer: Any = self.trainer
        if type(trainer.profiler) is not PassThroughProfiler:
            super()._on_after_fetch()


class LeanLoggerConnector(LoggerConnector):
    """Lightning's logger connector, which collects nothing where nothing has been logged."""

    def on_batch_end(self) -> None:
        results = self.trainer._results
        if results or results is None or not has_known_sources():
            super().on_batch_end()
            return
        results.batch = results.batch_size = None

    def update_train_step_metrics(self) -> None:
        if self.trainer.loggers or not has_known_sources():
            super().update_train_step_metrics()


class LeanResults(ResultCollection):
    """Lightning's logged values of an epoch; a tensor logged with the same arguments as before is only added.

    Lightning makes the description of the value at each call, compares it with the first, and looks for tensors to be
    moved to the value's device in all attributes of the metric, the description included.
    """

    def __init__(self, *, training: bool) -> None:
        super().__init__(training)
        self._logged: dict[str, tuple[ResultMetric, dict[str, Any]]] = {}

    def log(self, fx: str, name: str, value: Any, *arguments: Any, **keywords: Any) -> None:
        """Add a value; see ``LightningModule.log``."""
        if (
            torch.compiler.is_compiling()
            or arguments
            or type(value) is not Tensor
            or self.dataloader_idx is not None
            or not has_known_sources()
        ):
            super().log(fx, name, value, *arguments, **keywords)
            return
        key, batch_size = f"{fx}.{name}", keywords.pop("batch_size", None)
        logged = self._logged.get(key)
        if logged is not None and logged[0] is self.get(key) and logged[1] == keywords:
            metric = logged[0]
            if metric.value.device == value.device:
                value = value if metric.meta.enable_graph else value.detach()
                self.update_metrics(key, value, self._extract_batch_size(metric, batch_size, metric.meta))
                return
        super().log(fx, name, value, batch_size=batch_size, **keywords)
        if (kept := self.get(key)) is not None and kept.is_tensor:
            self._logged[key] = kept, keywords


# Profilers, warnings and errors print __name__, by which users know Lightning's classes; pickle goes by __qualname__.
for _class in (
    LeanAutomaticOptimization,
    LeanClosure,
    LeanEpochLoop,
    LeanEvaluationLoop,
    LeanLoggerConnector,
    LeanResults,
    UndividedResult,
):
    _class.__name__ = _class.__mro__[1].__name__
