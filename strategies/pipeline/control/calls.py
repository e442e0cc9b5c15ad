"""Calls of the control plane, and what a worker answers instead of a result when it fails."""

import os
import socket
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import cloudpickle
from torch.distributed import rpc
from torch.futures import Future

from strategies.commands.declaration import Call
from strategies.common.activity import Progress
from strategies.common.errors import is_consequence


@dataclass(frozen=True)
class Failure:
    """What a worker reports instead of a result.

    Attributes:
        where: Stage, its layers, host and process id, and what it was doing.
        pickled: The exception, by cloudpickle; empty if it cannot be pickled.
        traceback: The formatted traceback.
        consequence: Whether it only follows from another process's failure.
    """

    where: str
    pickled: bytes
    traceback: str
    consequence: bool


def failure_of(error: BaseException, what: str, doing: str) -> Failure:
    """Describes an exception for whoever has asked.

    Args:
        error: The exception, which goes along if it can be pickled.
        what: What it happened to.
        doing: What that was doing.
    """
    pickled = b""
    if isinstance(error, Exception):  # an exit, raised again, would end the driver
        with suppress(Exception):  # what a user's exception holds need not survive pickling; its traceback does
            pickled = cloudpickle.dumps(error)
    where = f"{what}, process {os.getpid()} on {socket.gethostname()}, in {doing}"
    return Failure(where, pickled, "".join(traceback.format_exception(error)), is_consequence(error))


@rpc.functions.async_execution
def perform(stage: Any, number: int, calls: list[Call]) -> Future:
    """Runs commands on the stage behind the ``RRef``; see :meth:`Host.submit`."""
    return stage.local_value().submit(number, calls)


def progress(stage: Any) -> Progress:
    """Asks the stage behind the ``RRef`` how far it is, while it computes; see :meth:`Host.progress`."""
    answer: Progress = stage.local_value().progress()
    return answer
