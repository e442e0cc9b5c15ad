"""What torch's profiler records of a pipeline: which layer runs for which micro-batch, and no communication."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.profiler import record_function

from strategies.common.torch_compat import profiler_is_on, record_functions

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def unrecorded(function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
    """Calls a function that begins to send or to receive, without an event of the profiler.

    torch gives such work an event that ends when the work does, on whichever thread that notices. The receive of the
    next message is posted ahead, so it ends when the profiler has collected its events and freed them: torch would
    write the end into freed memory.
    """
    if not profiler_is_on():
        return function(*args, **kwargs)
    record_functions(False)
    try:
        return function(*args, **kwargs)
    finally:
        record_functions(True)


class Labels:
    """Consecutive labels in a trace, each from one call of :meth:`next` to the following one, if the profiler is on."""

    def __init__(self) -> None:
        self._current: record_function | None = None
        self._recorded = profiler_is_on()

    def next(self, label: str) -> None:
        """Ends one label and begins another."""
        if self._recorded:
            self.end()
            self._current = record_function(label)
            self._current.__enter__()

    def end(self) -> None:
        """Ends the last label."""
        if self._current is not None:
            self._current.__exit__(None, None, None)
            self._current = None
