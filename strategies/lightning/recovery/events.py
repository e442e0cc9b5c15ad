"""Events of a step: what callbacks and loggers are told, once, however often the step runs.

    first run of a step   training_step   log "loss"   on_before_backward   (a worker is lost)
    second run            training_step                                     on_after_backward   ...

An event that has ended before the loss is left out when the step runs again. Events within an event, such as what a
callback logs, count by themselves if the outer one has not ended.
"""

from collections.abc import Callable
from typing import Any


class Events:
    """Counts the events of a step."""

    def __init__(self) -> None:
        self._heard: set[tuple[int, ...]] = set()
        self._is_active = self._is_repeated = False
        self._path: list[int] = [0]
        self._on_end_of_silence: Callable[[], None] | None = None

    def begin_step(self) -> None:
        """Start a step that has delivered no event yet."""
        self._heard.clear()

    @property
    def has_heard(self) -> bool:
        """Whether the step has delivered an event."""
        return bool(self._heard)

    def begin_run(self, *, is_repeated: bool, on_end_of_silence: Callable[[], None] | None = None) -> None:
        """Start a run of the step.

        Args:
            is_repeated: Whether all events of the step have been delivered.
            on_end_of_silence: Called when the run has passed all events that have been delivered.
        """
        self._is_active, self._is_repeated, self._path = True, is_repeated, [0]
        self._on_end_of_silence = on_end_of_silence
        self._look_for_end_of_silence()

    def end_run(self) -> None:
        """End the run of the step, which has returned or raised an error."""
        self._is_active = self._is_repeated = False
        self._on_end_of_silence = None

    def __call__(self, tell: Callable[[], Any]) -> Any:
        """Call ``tell``, unless this event has been delivered; return its result, or ``None``."""
        if not self._is_active:
            return tell()
        if self._is_repeated:
            return None
        key = tuple(self._path)
        result = None
        if key not in self._heard:
            self._path.append(0)
            result = tell()  # if it raises an error, the path does not matter any more
            self._path.pop()
            self._heard.add(key)
        self._path[-1] += 1
        self._look_for_end_of_silence()
        return result

    def note(self) -> None:
        """Count an event that delivers nothing, so that a later run knows that it has passed the events before it."""
        self(_nothing)

    def _look_for_end_of_silence(self) -> None:
        if self._on_end_of_silence is None or self._is_repeated:
            return
        if tuple(self._path[:1]) not in self._heard:
            end, self._on_end_of_silence = self._on_end_of_silence, None
            end()


def _nothing() -> None:
    pass
