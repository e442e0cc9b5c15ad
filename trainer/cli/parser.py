"""The parser of the command line: LightningCLI's parser, whose errors are one line on stderr and exit status 2."""

import functools
import re
import sys
from argparse import SUPPRESS
from collections.abc import Callable
from typing import Any, NoReturn

from strategies.common.names import did_you_mean
from strategies.lightning.compat import type_of_argument
from trainer.cli.lightning_cli import LightningArgumentParser
from trainer.cli.parser_messages import (
    OF_CLASS_PATH,
    classes_in,
    condense,
    of_other_package,
    unknown_class,
    unknown_key,
)

_UNRECOGNIZED = "unrecognized arguments: "
_NO_MODEL = re.compile(r"the following arguments are required: \w+\.model")
_NOT_ACCEPTED = re.compile(
    r"(?:Group '(?P<group>[^']+)' does not accept o|.*does not accept o|O)ption '(?P<key>[^']*)'"
)
_CLASS_PATH = re.compile(r"Problem with given class_path '([^']+)'|Expected a dot import path string: (\S+)")
# The parser of a class's arguments passes its message to the outer parser, which puts it into its own message. The mark
# shows where the inner message, which is already one line, begins and ends.
_MARK = "\x02"


class ConstructorRaised(BaseException):
    """Carries an exception of a constructor through jsonargparse.

    If an argument accepts several types, jsonargparse takes any ``Exception`` of a constructor as a reason to try the
    next type, and finally reports that none fits. It does not catch a ``BaseException``.

    Args:
        error: The exception of the constructor.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Parser(LightningArgumentParser):
    """LightningCLI's parser without abbreviated options: ``--trainer.max_epoch`` is an error, not ``max_epochs``."""

    _described: type | None = None
    _reading: str = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def add_class_arguments(
        self, theclass: type, nested_key: str | None = None, *args: Any, **kwargs: Any
    ) -> list[str]:
        """Add arguments as jsonargparse does, with one inner parser (no ``nested_key``) for each class in a value."""
        if nested_key is None:
            self._described = theclass
        added: list[str] = super().add_class_arguments(theclass, nested_key, *args, **kwargs)
        return added

    def add_instantiator(self, instantiator: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Add an instantiator as jsonargparse does; an exception of a constructor becomes ``ConstructorRaised``."""

        @functools.wraps(instantiator)
        def carrying(*args: Any, **kwargs: Any) -> Any:
            try:
                return instantiator(*args, **kwargs)
            except Exception as error:
                raise ConstructorRaised(error) from error

        super().add_instantiator(carrying, *args, **kwargs)

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Parse a file as jsonargparse does; errors name the file."""
        self._reading = f"{path}: "
        try:
            return super().parse_path(path, *args, **kwargs)
        finally:
            self._reading = ""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End the program with one line, or pass that line to the outer parser."""
        line = message.split(_MARK)[1] if _MARK in message else self._explain(message, ex)
        if not self.exit_on_error:
            super().error(f"{_MARK}{line}{_MARK}", ex)
        sys.stderr.write(f"error: {self._reading}{line}\n")
        self.exit(2)

    def _explain(self, message: str, ex: Exception | None) -> str:
        if message.startswith(_UNRECOGNIZED):
            return self._unrecognized(message.removeprefix(_UNRECOGNIZED).split()[0])
        parser = getattr(ex, "subcommand_parser", self)
        if found := _NOT_ACCEPTED.match(message):
            key = ".".join(filter(None, (found["group"], found["key"])))
            valid = parser._keys()
            if self._described is not None and did_you_mean(key.partition(".")[0], OF_CLASS_PATH, or_list=False):
                valid |= set(OF_CLASS_PATH)  # jsonargparse takes a dict without these keys for arguments of the class
            return self._of_class(unknown_key(key, valid))
        typehint = self._typehint_at(message)
        line = condense(message, typehint)
        if _NO_MODEL.fullmatch(line):
            line += ". Give a configuration with --config=FILE, or a class with --model=PATH_OF_CLASS"
        found = _CLASS_PATH.search(message)
        wrong = of_other_package(message) or (found and unknown_class(found[1] or found[2], classes_in(typehint)))
        if wrong:
            where = line.partition(": ")[0] + ": " if message.startswith("Parser key") else ""
            line = where + wrong
        return self._of_class(line)

    def _of_class(self, line: str) -> str:
        if self._described is None:
            return line
        return f"{self._described.__module__}.{self._described.__qualname__}: {line}"

    def _unrecognized(self, argument: str) -> str:
        if not argument.startswith("--"):
            return f"unexpected argument {argument!r}"
        return unknown_key(argument.removeprefix("--").partition("=")[0], self._chosen()._keys())

    def _chosen(self) -> "Parser":
        """Return the parser of the subcommand that the arguments name, or this parser."""
        if not self._subcommands_action:
            return self
        subcommands: dict[str, Parser] = self._subcommands_action.choices
        return next((subcommands[arg] for arg in self.args if arg in subcommands), self)

    def _arguments(self) -> list[Any]:
        return list(self._actions)

    def _keys(self) -> set[str]:
        hidden = ("help", "print_config")
        return {action.dest for action in self._actions if action.dest not in hidden and action.help != SUPPRESS}

    def _typehint_at(self, message: str) -> Any:
        """Return the type of the argument that a message is about."""
        key = re.match(r'Parser key "([^"]*)"', message)
        actions = [*self._arguments(), *self._chosen()._arguments()]
        return next((type_of_argument(action) for action in actions if key and action.dest == key[1]), None)
