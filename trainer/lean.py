"""Lightning's training step without work that has no effect: hooks that nobody overrides, idle profilers, inspections.

Lightning's own functions run, over namespaces in which some of the functions that they call are replaced by lighter
ones. Nothing of Lightning's modules and classes changes, so a plain Trainer in the same process is not affected. Each
lighter function does what Lightning's does and leaves unusual cases to it. What a hook is, is looked up at every call,
so a hook runs that has been overridden or attached in the middle of a run.

Where the installed version of Lightning has other sources than those that the lighter functions stand for
(:func:`strategies.lightning.compat.has_known_sources`), Lightning's functions run as they are.
"""

import logging
from collections.abc import Callable, Iterable
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from strategies.lightning.compat import (
    AutomaticOptimization,
    DataFetcher,
    LightningModule,
    PassThroughProfiler,
    Precision,
    ResultCollection,
    ResultMetric,
    Trainer,
    TrainingEpochLoop,
    current_hook,
    empty_hooks,
    has_known_sources,
    hook_calls,
    is_of_lightning,
    is_param_in_hook_signature,
    set_current_hook,
)

_LIGHTNINGS = hook_calls()
_LOG = logging.getLogger(_LIGHTNINGS.__name__)
_EMPTY = empty_hooks()
_CONFIGURE_CLIPPING = LightningModule.configure_gradient_clipping
_CLIP_MODEL, _CLIP_PRECISION = LightningModule.clip_gradients, Precision.clip_gradients

_OF_PRECISION = ("pre_backward", "post_backward", "_after_closure", "_clip_gradients")
_OF_MODEL = ("_call_batch_hook", "log")
"""Methods that call hooks or inspect signatures in every step, of objects that are not Relay's."""


# Calls of hooks. Lightning notes the name of the hook in the model, by two assignments that go through
# torch.nn.Module.__setattr__, and enters a context of the profiler, also if the hook does nothing.


def _is_followed(trainer: Any) -> bool:
    """Return whether a profiler or a log follows the calls of hooks."""
    return type(trainer.profiler) is not PassThroughProfiler or _LOG.isEnabledFor(logging.DEBUG)


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
    before = current_hook(module)
    set_current_hook(module, hook_name)
    output = hook(*args, **kwargs)
    set_current_hook(module, before)
    return output


def _clips_nothing(trainer: Trainer, module: LightningModule, arguments: dict[str, Any]) -> bool:
    """Return whether Lightning's own ``configure_gradient_clipping`` would find that there is nothing to clip."""
    return (
        arguments == {"gradient_clip_val": None, "gradient_clip_algorithm": None}
        and trainer.gradient_clip_val is None
        and trainer.gradient_clip_algorithm is None
        and getattr(module.clip_gradients, "__func__", None) is _CLIP_MODEL
        and getattr(trainer.precision_plugin.clip_gradients, "__func__", None) is _CLIP_PRECISION
    )


def _call_strategy_hook(trainer: Trainer, hook_name: str, *args: Any, **kwargs: Any) -> Any:
    hook = getattr(trainer.strategy, hook_name, None)
    if not callable(hook) or _is_followed(trainer):
        return _LIGHTNINGS._call_strategy_hook(trainer, hook_name, *args, **kwargs)
    if getattr(hook, "__func__", None) in _EMPTY:
        return None
    module = trainer.lightning_module
    before = current_hook(module)
    set_current_hook(module, hook_name)
    output = hook(*args, **kwargs)
    set_current_hook(module, before)
    return output


def _call_callback_hooks(
    trainer: Any, hook_name: str, *args: Any, monitoring_callbacks: bool | None = None, **kwargs: Any
) -> None:
    module = trainer.lightning_module
    if monitoring_callbacks is not None or not module or _is_followed(trainer):
        _LIGHTNINGS._call_callback_hooks(trainer, hook_name, *args, monitoring_callbacks=monitoring_callbacks, **kwargs)
        return
    before, is_noted = None, False
    for callback in trainer.callbacks:
        hook = getattr(callback, hook_name)
        if getattr(hook, "__func__", None) in _EMPTY or not callable(hook):
            continue
        if not is_noted:
            before, is_noted = current_hook(module), True
            set_current_hook(module, hook_name)
        hook(trainer, trainer.lightning_module, *args, **kwargs)
    if is_noted:
        set_current_hook(module, before)


_LIGHTER = {own.__name__: own for own in (_call_lightning_module_hook, _call_strategy_hook, _call_callback_hooks)}
_REPLACED = {name: getattr(_LIGHTNINGS, name) for name in _LIGHTER}


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


class LeanFunctions:
    """Lightning's functions, over namespaces in which some of the functions that they call are lighter ones."""

    def __init__(self) -> None:
        self._calls, self._signatures = SimpleNamespace(), _Signatures()
        self._namespaces: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._functions: dict[Any, Any] = {}

    def __call__(self, function: Any) -> Any:
        """Return a function of Lightning that calls the lighter functions; anything else is returned as it is."""
        try:
            return self._functions[function]
        except KeyError:
            is_lightnings = type(function) is FunctionType and is_of_lightning(function.__globals__["__name__"])
            made = self._over_lighter(function) if is_lightnings and has_known_sources() else function
            self._functions[function] = made
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
    methods = {name: MethodType(_leaned_method(name, lean), holder) for name in names if name not in own}
    own.update(methods)

    def undo() -> None:
        for name, method in methods.items():
            if own.get(name) is method:  # the user may have attached another one
                del own[name]

    return undo


def _leaned_method(name: str, lean: LeanFunctions) -> Callable[..., Any]:
    is_called_in_step = name == "log"  # a step may be compiled

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = getattr(type(self), name)
        if is_called_in_step and torch.compiler.is_compiling():
            return function(self, *args, **kwargs)
        return lean(function)(self, *args, **kwargs)

    method.__name__ = name  # by which pickle finds the method of the copy
    return method


class LeanAutomaticOptimization(AutomaticOptimization):
    """Lightning's automatic optimization over the lighter functions."""

    def __init__(self, trainer: Trainer, lean: LeanFunctions) -> None:
        super().__init__(trainer)
        self._lean = lean

    def _make_backward_fn(self, *args: Any) -> Any:
        return self._lean(AutomaticOptimization._make_backward_fn)(self, *args)

    def _optimizer_step(self, *args: Any) -> None:
        self._lean(AutomaticOptimization._optimizer_step)(self, *args)

    def _on_before_zero_grad(self, *args: Any) -> None:
        self._lean(AutomaticOptimization._on_before_zero_grad)(self, *args)

    def _optimizer_zero_grad(self, *args: Any) -> None:
        self._lean(AutomaticOptimization._optimizer_zero_grad)(self, *args)

    def _training_step(self, *args: Any) -> Any:
        return self._lean(AutomaticOptimization._training_step)(self, *args)


class LeanEpochLoop(TrainingEpochLoop):
    """Lightning's loop over the batches of an epoch, over the lighter functions."""

    def __init__(self, trainer: Trainer, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps=min_steps, max_steps=max_steps)
        self._lean = LeanFunctions()
        self._results: LeanResults = LeanResults(training=True)
        self.automatic_optimization = LeanAutomaticOptimization(trainer, self._lean)

    def run(self, data_fetcher: DataFetcher) -> None:
        self._lean.refresh()
        undo = [
            leaned(self.trainer.precision_plugin, _OF_PRECISION, self._lean),
            leaned(self.trainer.lightning_module, _OF_MODEL, self._lean),
        ]
        try:
            super().run(data_fetcher)
        finally:
            for each in undo:
                each()

    def advance(self, data_fetcher: DataFetcher) -> None:
        self._lean(TrainingEpochLoop.advance)(self, data_fetcher)

    def _build_kwargs(self, *args: Any) -> Any:
        return self._lean(TrainingEpochLoop._build_kwargs)(self, *args)


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
for _class in (LeanAutomaticOptimization, LeanEpochLoop, LeanResults):
    _class.__name__ = _class.__mro__[1].__name__
