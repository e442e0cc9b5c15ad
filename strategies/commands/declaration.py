"""Commands: methods of a ``Protocol`` that one process calls and an object in another process implements.

class StageCommands(Protocol):
    @command(only_reads=True)
    def num_kept(self) -> int: ...

kept = remote.ask(StageCommands.num_kept).wait()   # the caller: mypy knows the arguments and the result
class HostedStage(StageCommands): ...              # the process that runs it
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A call of a command as it is sent: the name of the method, its positional and its keyword arguments."""

_ATTRIBUTE = "relay_command"


@dataclass(frozen=True)
class Declaration:
    """Properties of a command that both sides know besides its signature.

    Attributes:
        changes_values: Whether the command may change parameters, buffers or gradients.
        doing: What the process reports as its activity while the command runs; empty if the command reports it itself.
        collective: Whether the command runs once for all callers: when each of them has called it, with the arguments
            of the last call.
        can_wait: Whether the command has no result and is sent together with the next command that cannot wait.
        only_reads: Whether the command has a result and no effect.
    """

    changes_values: bool
    doing: str
    collective: bool
    can_wait: bool
    only_reads: bool


def command(
    *,
    changes_values: bool = True,
    doing: str = "",
    collective: bool = False,
    can_wait: bool = False,
    only_reads: bool = False,
) -> Callable[[F], F]:
    """Declare a method of a ``Protocol`` as a command. Classes that implement the ``Protocol`` must define it.

    Args:
        changes_values: Whether the command may change parameters, buffers or gradients.
        doing: What the process reports as its activity while the command runs; empty if the command reports it itself.
        collective: Whether the command runs once for all callers, when each of them has called it.
        can_wait: Whether the command has no result and is sent together with the next command that cannot wait.
        only_reads: Whether the command has a result and no effect.
    """

    def declare(method: F) -> F:
        changes = changes_values and not only_reads
        vars(method)[_ATTRIBUTE] = Declaration(changes, doing, collective, can_wait, only_reads)
        vars(method)["__isabstractmethod__"] = True
        return method

    return declare


def declarations_of(protocol: type) -> dict[str, Declaration]:
    """Return the commands of a ``Protocol`` by name."""
    methods = {name: getattr(protocol, name) for name in dir(protocol)}
    return {name: vars(m)[_ATTRIBUTE] for name, m in methods.items() if _ATTRIBUTE in getattr(m, "__dict__", ())}
