"""Run user code, suspend it where it calls the pipelined module, and resume it with the module's output.

    lead   begin ─┐                 ┌─ sends the input ... has the output ─┐                   ┌─ backward pass
    step          └─ x = before() ──┘                                      └─ loss = after(y) ─┘

The lead is the driver's code that runs a pass. Each step is a greenlet: it has a separate call stack, and runs on the
thread of the lead until it calls the module or ends. Each step also has separate context variables, a separate random
state and default dtype (global to the process), separate thread-local settings of torch, and separate values of the
attributes of modules that its code sets. Code that runs in between does not affect these.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from strategies.common.patching import ABSENT, set_entry
from strategies.common.random_seeds import PythonGenerator, random_state, seed_device, set_random_state
from strategies.common.torch_compat import (
    num_dispatch_modes,
    num_function_modes,
    pop_dispatch_mode,
    pop_function_mode,
    pop_saved_tensors_hooks,
    push_dispatch_mode,
    push_function_mode,
    push_saved_tensors_hooks,
    top_saved_tensors_hooks,
)
from strategies.pipeline.stage.layers import OF_EVERY_MODULE, PassContext, has_same_entries


class Abandoned(BaseException):
    """Ends a step that gets no output. Not an ``Exception``, so that user code does not catch it."""


Modes = tuple[list[Any], list[Any], list[Any]]
"""Function modes, dispatch modes, and pairs of saved-tensor hooks. Each list begins with the outermost one."""


def take_modes() -> Modes:
    """Remove and return all torch modes of this thread, such as ``torch.device`` and ``saved_tensors_hooks``."""
    modes: Modes = [], [], []
    while num_function_modes():
        modes[0].insert(0, pop_function_mode())
    while num_dispatch_modes():
        modes[1].insert(0, pop_dispatch_mode())
    while (hooks := top_saved_tensors_hooks()) is not None:
        pop_saved_tensors_hooks()
        modes[2].insert(0, hooks)
    return modes


def _add_modes(modes: Modes) -> None:
    """Add modes that :func:`take_modes` returned to the modes of this thread."""
    for mode in modes[0]:
        push_function_mode(mode)
    for mode in modes[1]:
        push_dispatch_mode(mode)
    for hooks in modes[2]:
        push_saved_tensors_hooks(*hooks)


@dataclass
class _ThreadSettings:
    """The thread-local settings of torch that user code may have changed when it is suspended.

    Attributes:
        modes: The active modes.
        grad: Whether autograd records.
        autocast: For each device type, whether autocast is enabled, and its dtype.
        autocast_cache: Whether autocast caches converted weights.
        autocast_depth: Number of open autocast contexts. The outermost context clears the cache.
    """

    modes: Modes
    grad: bool = True
    autocast: tuple[tuple[str, bool, torch.dtype], ...] = ()
    autocast_cache: bool = True
    autocast_depth: int = 0

    @classmethod
    def taken(cls, device_types: tuple[str, ...]) -> "_ThreadSettings":
        """Read the settings of this thread, and remove the modes."""
        depth = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        return cls(
            take_modes(),
            torch.is_grad_enabled(),
            tuple([(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in device_types]),
            torch.is_autocast_cache_enabled(),
            depth,
        )

    def put(self, now: "_ThreadSettings | None" = None) -> None:
        """Apply the settings to this thread, which has no modes.

        Args:
            now: The current settings of the thread, so that only different ones are set; ``None`` if not known.
        """
        if now is None or now.grad != self.grad:
            torch.set_grad_enabled(self.grad)
        if now is None or now.autocast != self.autocast:
            for kind, enabled, dtype in self.autocast:
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, dtype)
        if now is None or now.autocast_cache != self.autocast_cache:
            torch.set_autocast_cache_enabled(self.autocast_cache)
        if now is None or now.autocast_depth != self.autocast_depth:
            depth = torch.autocast_increment_nesting()
            while depth <= self.autocast_depth:
                depth = torch.autocast_increment_nesting()
            while depth > self.autocast_depth:
                depth = torch.autocast_decrement_nesting()
        _add_modes(self.modes)  # last, because some of the above would call function modes


_Places = dict[tuple[int, str], tuple[dict[str, Any], Any]]
"""Names in dicts, with their values: by the address of the dict and the name."""

_MANY = 1000
"""A dict in an attribute with more entries is a store rather than the values of one step."""


class _ChangingDict(NamedTuple):
    """A dict that steps may change: attributes of a module, its buffers, or a dict in an attribute.

    Attributes:
        own: The dict.
        fixed: Names that do not belong to a step: the attributes that torch gives to every module, except ``training``.
    """

    own: dict[str, Any]
    fixed: frozenset[str]


_FIXED = OF_EVERY_MODULE - {"training"}


def _changing_dicts_of(modules: Iterable[nn.Module]) -> Iterator[_ChangingDict]:
    for module in modules:
        own = vars(module)
        yield _ChangingDict(own, _FIXED)
        for name, value in own.items():
            if type(value) is dict and len(value) <= _MANY and name not in _FIXED:
                yield _ChangingDict(value, frozenset())
        if module._buffers and isinstance(module._buffers, dict):  # those of a ScriptModule are none
            yield _ChangingDict(module._buffers, frozenset())


class _OwnAttributes:
    """The attributes of modules that belong to one step: those that its code sets up to its last call.

    While code or layers run for the step, they see these values. Otherwise the values are those that were set last.

    Args:
        parts: Where the attributes are.
        suspended: The attributes of all suspended steps.
    """

    def __init__(self, parts: Sequence[_ChangingDict], suspended: "set[_OwnAttributes]") -> None:
        self._parts, self._suspended, self._own = parts, suspended, _Places()
        self._last, self._before = _Places(), list[dict[str, Any]]()

    def put(self) -> None:
        """Set the values of the step."""
        self._suspended.discard(self)
        self._last = {key: (own, own.get(key[1], ABSENT)) for key, (own, _) in self._own.items()}
        _set(self._own)
        self._before = [own.copy() for own, _ in self._parts]

    def take(self, *, is_suspended: bool, in_first_call: bool = False) -> None:
        """Note what has been set for the step. Other values become those that were set last.

        Other suspended steps keep the values that they have had if the code up to the first call has set others: all
        steps run this code. They also keep those of which this step has its own, unless it may have added to a sum.

        Args:
            is_suspended: Whether the step goes on later.
            in_first_call: Whether the code up to the step's first call has run.
        """
        changed = _Places()
        for before, (own, fixed) in zip(self._before, self._parts, strict=True):
            if has_same_entries(own, before):
                continue
            for name in (before.keys() | own.keys()) - fixed:
                was, value = before.get(name, ABSENT), own.get(name, ABSENT)
                key = id(own), name
                if was is not value:
                    changed[key] = own, value
                    if in_first_call or (key in self._own and not _may_be_sum(was, value)):
                        for other in self._suspended:
                            other._own.setdefault(key, self._last.get(key, (own, was)))
        _set({key: value for key, value in self._last.items() if key not in changed})
        self._own.update(changed)
        self._before = []
        if is_suspended:
            self._suspended.add(self)


def _may_be_sum(*values: Any) -> bool:
    """Return whether these are the value of a sum before and after an addition."""
    return all(isinstance(value, int | float | Tensor) and not isinstance(value, bool) for value in values)


def _set(values: _Places) -> None:
    for (_, name), (own, value) in values.items():
        set_entry(own, name, value)


class SuspendedStep:
    """One run of a function, started by :meth:`Steps.begin`.

    Args:
        function: The function.
        seed: The seed of its random numbers.
        device: The device of this process.
        python: The state of Python's generator.
        lists: A description of each list of layers that the function has to call, in this order.
        attributes: The attributes of modules that the function may set.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        seed: int,
        device: torch.device,
        python: PythonGenerator,
        lists: Sequence[str],
        attributes: _OwnAttributes,
    ) -> None:
        self.has_called = False
        """Whether the function has called the module and is suspended until it gets the output."""
        self.input: Any = None
        """The argument of that call. The caller of :meth:`Steps.begin` sets it to ``None`` to free the memory."""
        self.context: PassContext | None = None
        """The settings of the thread during that call."""
        self.result: Any = None
        """The return value of the function."""
        self._device, self._seed, self._python = device, seed, python
        self._lists, self._num_calls = lists, 0
        self._device_types = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
        self._random_state: list[Any] | None = None
        self._default_dtype: torch.dtype | None = None
        self._settings: _ThreadSettings | None = None
        self._attributes = attributes
        self._runs = _StepGreenlet(self, function)
        self._suspended: greenlet = self._runs
        self._lead = getcurrent()

    def resume(self, output: Any = None) -> None:
        """Return ``output`` from the function's call of the module, and wait until it calls another list or ends.

        Raises:
            Exception: Any exception that the function raises.
        """
        self.has_called = False
        self._hand_over(True, output)

    @contextmanager
    def own_attributes(self) -> Iterator[None]:
        """Context in which layers of this process run for the step."""
        self._attributes.put()
        try:
            yield
        finally:
            self._attributes.take(is_suspended=True)

    def abandon(self) -> None:
        """End the function if it is suspended."""
        if not self._runs.dead:
            with suppress(BaseException):
                self._hand_over(False, None)

    def _hand_over(self, go_on: bool, output: Any) -> None:
        dtype_of_lead, settings_of_lead = torch.get_default_dtype(), _ThreadSettings.taken(self._device_types)
        now: _ThreadSettings | None = None
        try:
            if self._settings is None or self._random_state is None or self._default_dtype is None:
                off = tuple([(kind, False, dtype) for kind, _, dtype in settings_of_lead.autocast])
                _ThreadSettings(settings_of_lead.modes, autocast=off).put(settings_of_lead)
                seed_device(self._seed, self._device)
            else:
                self._settings.put(settings_of_lead)
                if self._default_dtype != dtype_of_lead:
                    torch.set_default_dtype(self._default_dtype)
                set_random_state(self._random_state, self._device, self._python)
            self._attributes.put()
            error = self._suspended.switch(go_on, output)
            del output
            is_suspended = not self._runs.dead
            self._attributes.take(is_suspended=is_suspended, in_first_call=is_suspended and self._num_calls == 1)
            self._settings = now = _ThreadSettings.taken(self._device_types)
            if not self._runs.dead:
                self._random_state = random_state(self._device, self._python)
                self._default_dtype = torch.get_default_dtype()
        finally:
            settings_of_lead.put(now)
            if torch.get_default_dtype() != dtype_of_lead:
                torch.set_default_dtype(dtype_of_lead)
        if error is not None:
            raise error

    def call(self, input: Any, list_number: int = 0) -> Any:
        """Suspend the step in its call of a list of layers, and return the list's output when the step is resumed."""
        if not torch.is_grad_enabled():
            raise RuntimeError(
                f"training_step called {self._lists[list_number]} under no_grad, but schedule='1f1b' runs its backward "
                "pass within the same call. Use schedule='gpipe'."
            )
        if list_number < self._num_calls:
            raise RuntimeError(
                f"training_step called {self._lists[list_number]} twice; schedule='1f1b' runs it once per micro-batch, "
                "with one call in each. Use schedule='gpipe'."
            )
        if list_number > self._num_calls:
            raise RuntimeError(
                f"training_step called {self._lists[list_number]} before {self._lists[self._num_calls]}, but schedules "
                "that run it once per micro-batch, such as '1f1b', run the lists of layers in the order of "
                f"module=[{', '.join(self._lists)}]. Name them in the order of their calls, or use schedule='gpipe'."
            )
        self.input, self.has_called, self._num_calls = input, True, self._num_calls + 1
        self.context = PassContext.capture(self._device.type)
        del input
        self._suspended = getcurrent()  # a greenlet of the user if training_step calls the module in one
        go_on, output = self._lead.switch(None)
        if not go_on:
            raise Abandoned
        return output


class _StepGreenlet(greenlet):
    """Runs the function of a step, and returns its exception."""

    def __init__(self, step: SuspendedStep, function: Callable[[], Any]) -> None:
        super().__init__()
        self.gr_context = copy_context()
        self.step: SuspendedStep | None = step
        self._function: Callable[[], Any] | None = function

    def run(self, go_on: bool, _: Any) -> BaseException | None:
        step, function = self.step, self._function
        self._function = None
        assert step is not None and function is not None
        try:
            if go_on:
                step.result = function()
        except BaseException as error:
            return error
        finally:
            self.step = None
        return None


class Steps:
    """Starts steps.

    A step leaves the global random state as its code has changed it. The lead restores the state of the process at the
    end.

    Args:
        device: The device of this process.
        lists: A description of each list of layers that a step has to call, in this order.
        modules: The modules whose attributes a step may set. It then has its own values of them.
    """

    def __init__(
        self,
        device: torch.device,
        lists: Sequence[str] = ("the pipelined module",),
        modules: Sequence[nn.Module] = (),
    ) -> None:
        self._device, self._python, self.lists, self._modules = device, PythonGenerator(), lists, modules
        self._suspended: set[_OwnAttributes] = set()
        self._parts: list[_ChangingDict] = []

    @property
    def current(self) -> SuspendedStep | None:
        """The step that runs on this thread."""
        running: greenlet | None = getcurrent()
        while running is not None:  # training_step may start further greenlets
            if isinstance(running, _StepGreenlet):
                return running.step
            running = running.parent
        return None

    def begin(self, function: Callable[[], Any], seed: int) -> SuspendedStep:
        """Run a function until it calls the module or ends.

        Args:
            function: The function.
            seed: The seed of its random numbers.

        Raises:
            Exception: Any exception that the function raises.
        """
        if not self._suspended:
            self._parts = [*_changing_dicts_of(self._modules)]
        attributes = _OwnAttributes(self._parts, self._suspended)
        step = SuspendedStep(function, seed, self._device, self._python, self.lists, attributes)
        try:
            step.resume()
        except BaseException:  # including KeyboardInterrupt, while the function still runs
            step.abandon()
            raise
        return step
