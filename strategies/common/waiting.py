"""Waiting for messages of other processes."""

from collections.abc import Callable
from typing import Any

Wait = Callable[[Callable[[], Any]], Any]
"""Calls a function that waits, perhaps so that the wait can be given up."""


def wait_here(wait: Callable[[], Any]) -> Any:
    """Waits in the calling thread, for as long as it takes."""
    return wait()
