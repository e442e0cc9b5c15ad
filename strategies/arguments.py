"""Every argument of a strategy's constructor is of the type that its signature says: checked in one place for all."""

import inspect
import math
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pytorch_lightning.utilities.exceptions import MisconfigurationException


def checked(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that checks its arguments first.

    Raises:
        MisconfigurationException: For one of another type, or a number or duration that is none.
    """

    @wraps(init)
    def check_and_init(self: Any, *args: Any, **kwargs: Any) -> None:
        hints = get_type_hints(init)
        given = inspect.signature(init).bind(self, *args, **kwargs).arguments
        for name, value in given.items():
            wanted = hints.get(name, Any)
            if name != "kwargs" and not _is(value, wanted):
                words = " or ".join(_words(kind) for kind in _alternatives(wanted))
                raise MisconfigurationException(f"{name} must be {words}, got {value!r}.")
        init(self, *args, **kwargs)

    return check_and_init


def _alternatives(wanted: Any) -> tuple[Any, ...]:
    return get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)


def _is(value: Any, wanted: Any) -> bool:
    """Whether a value is of a type; numbers must be finite, durations above 0."""
    kinds = _alternatives(wanted)
    if len(kinds) > 1:
        return any(_is(value, kind) for kind in kinds)
    if wanted is Any:
        return True
    if get_origin(wanted) is Literal:
        return value in get_args(wanted)
    if get_origin(wanted) is list:
        return isinstance(value, list | tuple) and all(_is(item, get_args(wanted)[0]) for item in value)
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if wanted is timedelta:
        return isinstance(value, timedelta) and value > timedelta()
    return isinstance(value, get_origin(wanted) or wanted)


def _words(wanted: Any) -> str:
    if get_origin(wanted) is Literal:
        return "one of " + ", ".join(map(repr, get_args(wanted)))
    if get_origin(wanted) is list:
        return f"a list, each of it {_words(get_args(wanted)[0])}"
    words = {
        bool: "True or False",
        int: "a whole number",
        float: "a finite number",
        str: "a text",
        timedelta: "a timedelta above 0",
        NoneType: "None",
    }
    return words.get(wanted, f"an instance of {getattr(wanted, '__name__', wanted)}")
