"""Return an exception of a command to the caller, with its type, its origin and its traceback."""

import os
import pickle
import socket
import traceback
from contextlib import suppress
from dataclasses import dataclass

import cloudpickle

from strategies.commands.folding import folded
from strategies.common.errors import RemoteTraceback, is_consequence


@dataclass(frozen=True)
class Failure:
    """What a host returns instead of a result when a command raises an exception.

    Attributes:
        where: The object, its process and host, and what the object was doing.
        pickled: The exception, pickled with cloudpickle; empty if it cannot be pickled.
        traceback: The formatted traceback, without frames of libraries.
        consequence: Whether a failure of another process caused the exception.
    """

    where: str
    pickled: bytes
    traceback: str
    consequence: bool

    @classmethod
    def of(cls, error: BaseException, what: str, doing: str) -> "Failure":
        """Describe an exception to the caller of a command.

        Args:
            error: The exception. It is included if it can be pickled.
            what: The object whose command raised it.
            doing: What the object was doing.
        """
        pickled = b""
        if isinstance(error, Exception):  # SystemExit, raised again, would end the caller's process
            with suppress(Exception):  # attributes of a user's exception may not be picklable
                pickled = cloudpickle.dumps(error)
        where = f"{what}, process {os.getpid()} on {socket.gethostname()}, in {doing}"
        shown = "".join(traceback.format_exception(type(error), error, folded(error)[0]))
        return cls(where, pickled, shown, is_consequence(error))

    def exception(self) -> BaseException:
        """Return the exception. Its ``__cause__`` is the traceback of the other process.

        Returns:
            The exception itself if it can be unpickled here, otherwise a ``RuntimeError`` that quotes it.
        """
        try:
            error = pickle.loads(self.pickled)
            assert isinstance(error, BaseException)
        except Exception:  # unpickling runs code of the exception's class
            error = RuntimeError(f"{self.where} failed: {self.traceback.strip().splitlines()[-1]}")
        error.__cause__ = RemoteTraceback(self.where, self.traceback)
        return error
