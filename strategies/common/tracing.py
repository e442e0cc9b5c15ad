"""Events in a trace of torch's profiler: one for each layer and micro-batch, and none for communication."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.profiler import record_function

from strategies.common.torch_compat import profiler_is_on, record_functions

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def unrecorded(function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
    """Call a function that starts to send or to receive, without an event of the profiler.

    torch ends the event of such an operation when the operation ends, on whichever thread notices this. The receive of
    the
    next message is posted ahead, so it may end after the profiler has collected and freed its events, and torch would
    write
    into freed memory.
    """
    if not profiler_is_on():
        return function(*args, **kwargs)
    record_functions(False)
    try:
        return function(*args, **kwargs)
    finally:
        record_functions(True)


class Labels:
    """Consecutive labels in a trace; each lasts from a call of :meth:`next` to the following one."""

    def __init__(self) -> None:
        self._current: record_function | None = None
        self._recorded = profiler_is_on()

    def next(self, label: str) -> None:
        """End the current label and start another one, if the profiler is on."""
        if self._recorded:
            self.end()
            self._current = record_function(label)
            self._current.__enter__()

    def end(self) -> None:
        """End the last label."""
        if self._current is not None:
            self._current.__exit__(None, None, None)
            self._current = None
