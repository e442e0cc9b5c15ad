"""Waiting for messages of other processes."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup

Wait = Callable[[Callable[[], Any]], Any]
"""Calls a function that waits, perhaps so that the wait can be given up."""


def wait_here(wait: Callable[[], Any]) -> Any:
    """Waits in the calling thread, for as long as it takes."""
    return wait()


def timeout_of(group: ProcessGroup) -> timedelta:
    """The group's time-out, of which gloo's sends and receives know only the one with which it connected."""
    backend: Any = group._get_backend(torch.device("cpu"))
    timeout: timedelta = backend.options._timeout
    return timeout
