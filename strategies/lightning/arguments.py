"""Checks the arguments of a strategy against its signature, and reports errors with Lightning's exception type."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch.distributed import Backend
from torch.nn.parallel import DistributedDataParallel

from strategies.common.errors import RemoteTraceback
from strategies.common.names import did_you_mean
from strategies.lightning.compat import MisconfigurationException, pl


@contextmanager
def as_misconfiguration() -> Iterator[None]:
    """Turn the engine's errors about a user's settings into Lightning's ``MisconfigurationException``.

    An error that a layer raises in another process keeps its type.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        if isinstance(error.__cause__, RemoteTraceback):
            raise
        raise MisconfigurationException(str(error)) from error


def check_whole_number(name: str, value: object, least: int) -> None:
    """Check that a value is a whole number of at least ``least``.

    Raises:
        MisconfigurationException: If it is not a whole number, or smaller than ``least``.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise MisconfigurationException(f"{name} must be a whole number of at least {least}, got {value!r}.")


def check_backend(backend: str | None) -> None:
    """Check that torch has the backend, or each backend of a list by device (``cpu:gloo,cuda:nccl``).

    Raises:
        MisconfigurationException: If torch has no such backend.
    """
    if backend is None:
        return
    for name in (part.rpartition(":")[2] for part in backend.split(",")):
        if name.lower() not in Backend.backend_list:
            raise MisconfigurationException(
                f"Unknown process_group_backend {backend!r}{did_you_mean(name, Backend.backend_list)}"
            )


def checked(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that also checks the types of its arguments.

    The types are checked after the constructor has run, because the checks in the constructor give better messages. A
    constructor only validates and stores. The object keeps the arguments as ``given_arguments``, so that a second
    object can be made with them.

    Raises:
        MisconfigurationException: If an argument does not have its declared type, if a number is not finite, or if a
            duration is not above 0.
    """

    @wraps(init)
    def init_and_check(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except (TypeError, AttributeError, ArithmeticError):  # it computed with a value of the wrong type
            _check(init, inspect.signature(init).bind_partial(self, *args, **kwargs).arguments)
            raise
        bound = inspect.signature(init).bind(self, *args, **kwargs).arguments
        _check(init, bound)
        given = {name: value for name, value in list(bound.items())[1:] if name != "kwargs"}
        self.given_arguments = {**given, **bound.get("kwargs", {})}

    return init_and_check


def _check(init: Callable[..., None], given: Mapping[str, Any]) -> None:
    hints = hints_of(init)
    given = {**given, **given.get("kwargs", {})}
    for name, value in given.items():
        wanted = hints.get(name, Any)
        if not _is(value, wanted):
            words = " or ".join(_words(kind) for kind in _alternatives(wanted))
            raise MisconfigurationException(f"{name} must be {words}, got {value!r}.")


def hints_of(init: Callable[..., None]) -> dict[str, Any]:
    """Return the declared type of each argument, including those that ``kwargs`` passes on to Lightning and torch."""
    hints = get_type_hints(init)
    if hints.pop("kwargs", None) is None:
        return hints
    torchs = inspect.signature(DistributedDataParallel).parameters.values()  # has no annotations, but defaults
    flags = {parameter.name: bool for parameter in torchs if isinstance(parameter.default, bool)}
    return {**flags, **get_type_hints(pl.strategies.DDPStrategy.__init__), **hints}


def _alternatives(wanted: Any) -> tuple[Any, ...]:
    return get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)


def _is(value: Any, wanted: Any) -> bool:
    """Return whether a value has a type; numbers must be finite, durations above 0."""
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
        return ("one of " if len(get_args(wanted)) > 1 else "") + ", ".join(map(repr, get_args(wanted)))
    if get_origin(wanted) is list:
        return f"a list, each item {_words(get_args(wanted)[0])}"
    words = {
        bool: "True or False",
        int: "a whole number",
        float: "a finite number",
        str: "a string",
        timedelta: "a timedelta above 0",
        NoneType: "None",
    }
    return words.get(wanted, f"an instance of {getattr(wanted, '__name__', wanted)}")
