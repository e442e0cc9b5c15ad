"""Functions that wait for other processes."""

from collections.abc import Callable
from typing import Any

Wait = Callable[[Callable[[], Any]], Any]
"""Calls a function that waits for another process; some implementations can interrupt the wait."""


def wait_here(wait: Callable[[], Any]) -> Any:
    """Wait in the calling thread, without a time limit."""
    return wait()
