"""Error messages of the command line: condense jsonargparse's message, often ten lines long, into one line.

jsonargparse reports that a name is wrong. This module adds the nearest valid names, from the parser and from modules
that can be imported.
"""

import ast
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from strategies.common.names import PLUGINS, did_you_mean
from strategies.lightning.compat import explain_other_package
from trainer.cli.model_class import longest_import

_CLASS = re.compile(r"<class '(?:[\w.]*\.)?(\w+)'>")
_LITERAL = r"typing\.Literal\[(?P<literals>.*)\]"
_EXPECTED_TYPE = re.compile(rf"Expected an? (?:{_CLASS.pattern}|{_LITERAL})(?:\. Got value: (?P<value>.*))?$")
_FRAME = ("Does not validate against any of the Union subtypes", "Subtypes:", "Errors:", "Given value type:")
OF_CLASS_PATH = ["class_path", "init_args", "dict_kwargs"]


def unknown_key(key: str, valid: Iterable[str]) -> str:
    """Return the message for a key such as ``trainer.max_epoch``: the wrong part of it, and the valid names there.

    Args:
        key: The unknown key.
        valid: All keys of the parser.
    """
    names = {name for name in valid if not name.endswith(".help")}
    good, levels = "", key.split(".")
    for level in levels:
        here = {name[len(good) :].split(".")[0] for name in names if name.startswith(good)}
        if level not in here or not any(name.startswith(f"{good}{level}.") for name in names):
            return f"unknown key {good + level!r}{did_you_mean(level, here - {'help'})}"
        good += level + "."
    return f"unknown key {key!r}"


def unknown_class(path: str, base_types: Iterable[type]) -> str | None:
    """Return the message for a class path: the first wrong part of it, and the valid names there.

    Args:
        path: The class path.
        base_types: Classes of which the argument expects a subclass.

    Returns:
        The message, or ``None`` if the path can be imported, so that something else is wrong.
    """
    if path in PLUGINS:
        return f"the name {path!r} takes no arguments; to give some, write class_path: strategies.{PLUGINS[path]}"
    if "." not in path:
        names = [cls.__name__ for base in base_types for cls in _subclasses(base)]
        return f"unknown class {path!r}{did_you_mean(path, names)}"
    try:
        module, wrong = longest_import(path)
    except ImportError as error:  # the module imports something that is missing
        return f"cannot import {path!r}: {error}"
    if module is None:
        return f"cannot import {path!r}: no module {wrong!r}{did_you_mean(wrong, _top_level_modules(), or_list=False)}"
    if hasattr(module, wrong):
        return None
    classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
    public = [*classes, *getattr(module, "__all__", []), *_submodules(module)]
    return f"cannot import {path!r}: {module.__name__} has no {wrong!r}{did_you_mean(wrong, public)}"


def of_other_package(message: str) -> str | None:
    """Return why a class that a message names cannot be used, if it is of the other package of Lightning.

    Args:
        message: A message of jsonargparse, which has imported the class, or a class path.
    """
    for module, name in re.findall(r"\b([\w.]+)\.(\w+)", message):
        found = getattr(sys.modules.get(module), name, None)
        if inspect.isclass(found) and (reason := explain_other_package(found)) is not None:
            return reason
    return None


def condense(message: str, typehint: Any = None) -> str:
    """Return a message of jsonargparse as one line: the wrong key, the expected type, and the value given.

    Args:
        message: The message.
        typehint: The declared type of the argument, if known. jsonargparse's message may name only a part of it
            (``int`` for ``list[int]``).
    """
    key, _, rest = message.partition(":") if message.startswith("Parser key ") else ("", "", message)
    lines = [line.strip().removeprefix("- ") for line in rest.splitlines()]
    value = next((line.removeprefix("Given value: ") for line in lines if line.startswith("Given value: ")), None)
    # With a key misspelt, jsonargparse takes the dict for arguments of the declared type, which may be abstract.
    is_abstract = any(line.endswith(" is abstract") for line in lines)
    if value is not None and ("Subclass types expect one of:" in lines or (is_abstract and _wrong_keys(value))):
        told = _not_a_class_path(value)
    else:
        told = _expected(lines, value, typehint)
    where = key.removeprefix("Parser key ").strip('"')
    return _CLASS.sub(r"\1", f"{where}: {told}" if where else told)


def classes_in(typehint: Any) -> Iterator[type]:
    """Yield the classes that a type hint such as ``list[Callback] | Callback | None`` names."""
    if inspect.isclass(typehint) and not get_args(typehint):
        yield typehint
    for part in get_args(typehint):
        yield from classes_in(part)


def _null_last(name: str) -> tuple[bool, str]:
    return name == "NoneType", name


def _expected(lines: list[str], value: str | None, typehint: Any) -> str:
    lines = [line for line in lines if line and not line.startswith((*_FRAME, "Given value: "))]
    types = [match for line in lines if (match := _EXPECTED_TYPE.match(line))]
    if types and len(types) == len(lines):
        # Sorted, because the order of types in a Union depends on where the process used that Union first.
        names = sorted(
            set(_type_names(typehint) if typehint else [match[1] or match["literals"] for match in types]),
            key=_null_last,
        )
        got = (
            value if value is not None else next((match["value"] for match in types if match["value"]), "another type")
        )
        return f"expected {' or '.join(names).replace('NoneType', 'null')}, got {got}"
    # "Expected a str" next to another reason only says that the argument accepts other types too.
    reasons = [line for line in lines if not _EXPECTED_TYPE.match(line) and not line.startswith("Expected a path but")]
    return "; ".join(dict.fromkeys(reasons or lines)) + (f" (got {value})" if value is not None else "")


def _type_names(typehint: Any) -> list[str]:
    if isinstance(typehint, UnionType) or get_origin(typehint) is Union:
        return [name for part in get_args(typehint) for name in _type_names(part)]
    if get_origin(typehint) is Literal:
        return [repr(value) for value in get_args(typehint)]
    whole = typehint.__name__ if inspect.isclass(typehint) and not get_args(typehint) else str(typehint)
    return [re.sub(r"\b(?:\w+\.)+(?=\w)", "", whole)]


def _not_a_class_path(value: str) -> str:
    keys = _wrong_keys(value)
    if not keys:
        return f"expected class_path and init_args, got {value}"
    return f"expected class_path and init_args, got {keys[0]!r}{did_you_mean(keys[0], OF_CLASS_PATH)}"


def _wrong_keys(value: str) -> list[str]:
    """Return the keys of a value, as jsonargparse quotes it, that a dict with a class path does not have."""
    try:
        given = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return []
    return [key for key in given if key not in OF_CLASS_PATH] if isinstance(given, dict) else []


def _subclasses(base: type) -> Iterator[type]:
    if base.__module__ != "builtins":
        yield base
        below: list[type] = type.__subclasses__(base)
        for derived in below:
            yield from _subclasses(derived)


def _submodules(module: Any) -> list[str]:
    return [found.name for found in pkgutil.iter_modules(getattr(module, "__path__", []))]


def _top_level_modules() -> list[str]:
    return [found.name for found in pkgutil.iter_modules()]
