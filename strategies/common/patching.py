"""Methods of one object, replaced for a while."""

from collections.abc import Callable
from typing import Any


def replaced(holder: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method of one object; returns a function that undoes this."""
    own = vars(holder)
    had, before = name in own, own.get(name)
    own[name] = method

    def undo() -> None:
        if had:
            own[name] = before
        else:
            own.pop(name, None)

    return undo
