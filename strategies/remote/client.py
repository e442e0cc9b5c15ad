"""The caller's end of a module on another process: it sends commands and receives results or exceptions."""

from collections import deque
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch.distributed import rpc
from torch.futures import Future

from strategies.commands.declaration import Call
from strategies.commands.failure import Failure
from strategies.commands.host import perform
from strategies.remote.commands import ModuleCommands

P = ParamSpec("P")
R = TypeVar("R")
ModuleCommand = Callable[Concatenate[ModuleCommands, P], R]
"""A method of :class:`ModuleCommands`, such as ``ModuleCommands.forward``."""


class ModuleClient:
    """Sends commands to a module on another process.

    Args:
        host: The ``RRef`` to the :class:`~strategies.commands.host.Host` of the module.
        address: The process and device of the module, for error messages.
        num_callers: The number of processes that train the module.
    """

    def __init__(self, host: Any, address: str, num_callers: int = 1) -> None:
        self.host, self.address, self.num_callers = host, address, num_callers
        self._forgotten: deque[int] = deque()  # the garbage collector may append from any thread

    def forget(self, number: int) -> None:
        """With the next command, free the graph of a ``forward`` call that will have no backward pass."""
        self._forgotten.append(number)

    def start(self, command: ModuleCommand[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[Any]:
        """Send a command without waiting. :meth:`answer` takes the returned future."""
        numbers = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
        calls: list[Call] = [(ModuleCommands.forget.__name__, (number,), {}) for number in numbers]
        calls.append((command.__name__, args, kwargs))
        reply: Future[Any] = rpc.rpc_async(self.host.owner(), perform, args=(self.host, calls))
        return reply

    def answer(self, reply: Future[Any]) -> Any:
        """Wait for the result of a command.

        Raises:
            Exception: The exception of the command, with the traceback of the other process as its cause.
            RuntimeError: If the process does not answer.
        """
        try:
            value = reply.wait()
        except RuntimeError as error:  # raised by RPC; the answer contains errors of the module
            others = f" (optimizer, zero_grad and step wait for all {self.num_callers} callers)"
            raise RuntimeError(
                f"the remote module on {self.address} did not answer: {error}{others if self.num_callers > 1 else ''}"
            ) from error
        if isinstance(value, Failure):
            raise value.exception()
        return value

    def call(self, command: ModuleCommand[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Send a command and wait for its result; see :meth:`answer`."""
        result: R = self.answer(self.start(command, *args, **kwargs))
        return result
