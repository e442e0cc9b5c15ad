"""Collects messages that Lightning logs for the user."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Messages(logging.Handler):
    def __init__(self, lines: list[str], start: str) -> None:
        super().__init__()
        self._lines, self._start = lines, start

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(self._start):
            self._lines.append(record.getMessage())


@contextmanager
def told(start: str) -> Iterator[list[str]]:
    """Context in which messages with the given start are added to a list; no message is printed."""
    lines: list[str] = []
    handler, log = _Messages(lines, start), logging.getLogger("pytorch_lightning.utilities.rank_zero")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.propagate = True
        log.removeHandler(handler)
