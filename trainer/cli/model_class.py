"""Import the model's class before Lightning's command line, because this import determines the Lightning package.

``strategies.lightning.compat`` uses the Lightning package that was imported first. Without a script, this must be the
package that the module of the model's class imports.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import fsspec
import yaml

_SUBCOMMANDS = ("fit", "validate", "test", "predict", "plan", "verify")


def import_model_class(args: list[str]) -> None:
    """Import the module of the model's class, if arguments and configuration files name one that can be imported.

    Args:
        args: The arguments after ``python -m trainer``.
    """
    with suppress(Exception):  # the parser reads the files and imports the class again, and explains what is wrong
        *_, class_path = ("", *class_paths_of_model(args))
        longest_import(class_path)


def longest_import(path: str) -> tuple[Any, str]:
    """Import the longest prefix of ``path`` that is a module; return the module, if any, and the next part of the path.

    Raises:
        ImportError: If a module imports something that is missing.
    """
    module, parts = None, path.split(".")
    for count in range(1, len(parts)):
        try:
            module = import_module(prefix := ".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if error.name != prefix:
                raise
            return module, parts[count - 1]
    return module, parts[-1]


def class_paths_of_model(args: list[str]) -> Iterator[str]:
    """Yield the class path of the model from each argument that sets it. The last one applies."""
    for position, argument in enumerate(args):
        option, _, value = argument.partition("=")
        value = value or next(iter(args[position + 1 :]), "")
        if option in ("-c", "--config"):
            config = _read(value)
            yield from _class_path(config.get("model"), os.path.dirname(value))
            for name in _SUBCOMMANDS:
                yield from _class_path((config.get(name) or {}).get("model"), os.path.dirname(value))
        elif option in ("--model", "--model.class_path"):
            yield from _class_path(value, "")


def _class_path(model: Any, directory: str) -> Iterator[str]:
    """Yield the class path of a value for ``model``: the path itself, a mapping with it, or a file with the mapping."""
    if isinstance(model, str) and Path(model).suffix in (".yaml", ".yml"):
        model = _read(os.path.join(directory, model))
    if isinstance(model, dict):
        model = model.get("class_path")
    if isinstance(model, str):
        yield model


def _read(path: str) -> Any:
    with fsspec.open(path, "r") as file:
        return yaml.safe_load(file) or {}
