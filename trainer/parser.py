"""The parser of the command line: LightningCLI's, whose errors are one line on stderr and exit status 2."""

import functools
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from pytorch_lightning.cli import LightningArgumentParser

from trainer.messages import classes_in, condense, unknown_class, unknown_key

_UNRECOGNIZED = "unrecognized arguments: "
_NOT_ACCEPTED = re.compile(
    r"(?:Group '(?P<group>[^']+)' does not accept o|.*does not accept o|O)ption '(?P<key>[^']*)'"
)
_CLASS_PATH = re.compile(r"Problem with given class_path '([^']+)'|Expected a dot import path string: (\S+)")
# The parser of a class's arguments hands its message to the parser around it, which wraps it into its own; the mark
# shows where the inner message, already one line, begins and ends.
_MARK = "\x02"


class ConstructorRaised(BaseException):
    """Carries what a constructor raised past jsonargparse.

    Where an argument may be one of several types, jsonargparse takes any ``Exception`` of a constructor as a reason to
    try the next type, and in the end reports that none fits. It lets a ``BaseException`` through.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Parser(LightningArgumentParser):
    """LightningCLI's parser. Abbreviated options are off: ``--trainer.max_epoch`` is a mistake, not ``max_epochs``."""

    _described: type | None = None
    _reading: str = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def add_class_arguments(
        self, theclass: type, nested_key: str | None = None, *args: Any, **kwargs: Any
    ) -> list[str]:
        """As in jsonargparse, which makes one inner parser (no ``nested_key``) per class that a value names."""
        if nested_key is None:
            self._described = theclass
        added: list[str] = super().add_class_arguments(theclass, nested_key, *args, **kwargs)
        return added

    def add_instantiator(self, instantiator: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """As in jsonargparse; what the constructor raises arrives as ``ConstructorRaised``."""

        @functools.wraps(instantiator)
        def carrying(*args: Any, **kwargs: Any) -> Any:
            try:
                return instantiator(*args, **kwargs)
            except Exception as error:
                raise ConstructorRaised(error) from error

        super().add_instantiator(carrying, *args, **kwargs)

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in jsonargparse; errors name the file."""
        self._reading = f"{path}: "
        try:
            return super().parse_path(path, *args, **kwargs)
        finally:
            self._reading = ""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End the program with one line, or hand that line to the parser around this one."""
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
            return self._of_class(unknown_key(key, parser._keys()))
        typehint = self._typehint_at(message)
        line = condense(message, typehint)
        found = _CLASS_PATH.search(message)
        if found and (unknown := unknown_class(found[1] or found[2], classes_in(typehint))):
            where = line.partition(": ")[0] + ": " if message.startswith("Parser key") else ""
            line = where + unknown
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
        """The parser of the subcommand that the arguments name, else this one."""
        if not self._subcommands_action:
            return self
        subcommands: dict[str, Parser] = self._subcommands_action.choices
        return next((subcommands[arg] for arg in self.args if arg in subcommands), self)

    def _keys(self) -> set[str]:
        return {action.dest for action in self._actions if action.dest not in ("help", "print_config")}

    def _typehint_at(self, message: str) -> Any:
        """The type of the argument that the message is about."""
        key = re.match(r'Parser key "([^"]*)"', message)
        actions = [*self._actions, *self._chosen()._actions]
        return next((getattr(action, "_typehint", None) for action in actions if key and action.dest == key[1]), None)
