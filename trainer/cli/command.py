"""The command line ``python -m trainer {fit,validate,test,predict,plan,verify}``: LightningCLI with Relay's Trainer.

A mistake in the configuration ends the program with one line on stderr and exit status 2
(``trainer.cli.one_line_errors``). It is found while

1. parsing: unknown keys and classes, wrong types (``trainer.cli.parser``), interpolations of unknown keys;
2. building strategy, model, data and Trainer: arguments that a constructor refuses;
3. setting up the run: settings that a strategy refuses for this model.
"""

import sys
from argparse import SUPPRESS
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from jsonargparse import Namespace
from omegaconf.errors import OmegaConfBaseException

from strategies.common.names import PLUGINS
from strategies.lightning.compat import MisconfigurationException
from trainer.cli.lightning_cli import ArgsType, LightningArgumentParser, LightningCLI
from trainer.cli.model_class import longest_import
from trainer.cli.one_line_errors import (
    end_with,
    is_after_set_up,
    is_refused_argument,
    is_refused_in_set_up,
    not_weights_only,
)
from trainer.cli.parser import ConstructorRaised, Parser
from trainer.cli.parser_messages import of_other_package
from trainer.cli.saved_config import SaveConfigBesideCheckpoints
from trainer.trainer import Trainer, resolve_strategy

_EPILOG = "python -m trainer report RUN_FOLDER writes one HTML file that shows a run."
"""``report`` takes no configuration, and ``trainer.cli`` runs it before Lightning is imported."""

_ONLY_IN_SAVED = ("ckpt_path", "weights_only")
"""Keys of the configuration that ``fit`` saves which are not options of ``plan`` or ``verify``."""


def run(args: list[str] | None) -> None:
    """Run one command; see :func:`trainer.cli.main`."""
    _CLI(
        trainer_class=Trainer,
        parser_class=Parser,
        parser_kwargs={"parser_mode": "omegaconf", "prog": _program(), "epilog": _EPILOG},
        save_config_callback=SaveConfigBesideCheckpoints,
        args=args,
    )


def _program() -> str:
    """Return the name by which the user called the command line."""
    return "relay" if Path(sys.argv[0]).stem == "relay" else "python -m trainer"


class _CLI(LightningCLI):
    """LightningCLI that turns a refused configuration into one line, in each of the three steps above."""

    def __init__(self, args: list[str] | None, **kwargs: Any) -> None:
        self._args = sys.argv[1:] if args is None else args
        super().__init__(args=args, **kwargs)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the commands, each with the arguments of its method that are no options."""
        return {**LightningCLI.subcommands(), "plan": {"model", "datamodule"}, "verify": {"model", "datamodule"}}

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        others = set(self.subcommands()) - {subcommand}
        if self._args and self._args[0] in others:  # its parser is not used, and takes long to build
            return self.init_parser(**kwargs)
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand in ("plan", "verify"):
            for name in _ONLY_IN_SAVED:
                parser.add_argument(f"--{name}", help=SUPPRESS)
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        try:
            # LightningCLI's method warns about arguments that a caller passes.
            self.config = parser.parse_args(_spell_out_strategy(self._args))
            trainer = self.config[self.config.subcommand].trainer
            if not isinstance(trainer, Namespace):
                raise ValueError(f"trainer: expected the arguments of the Trainer, got {trainer}")
            strategy = trainer.strategy
            if isinstance(strategy, str):
                with suppress(ImportError):  # it may be a class path, which jsonargparse leaves alone here
                    longest_import(strategy)
                if (reason := of_other_package(strategy)) is not None:
                    raise ValueError(f"trainer.strategy: {reason}")
                resolve_strategy(strategy)
        except (OmegaConfBaseException, ValueError) as mistake:
            end_with(mistake)

    def _parse_ckpt_path(self) -> None:
        try:
            super()._parse_ckpt_path()
        except UnpicklingError as refused:
            given = self.config[self.config.subcommand]
            if given.get("weights_only") is not False:  # then hyperparameters come from the configuration
                end_with(refused, not_weights_only(given.ckpt_path, refused))

    def _add_instantiators(self) -> None:
        super()._add_instantiators()  # for model and data
        self.parser.add_instantiator(lambda cls, *args, **kwargs: cls(*args, **kwargs), object, subclasses=True)

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ConstructorRaised as raised:
            if not is_refused_argument(raised.error):
                raise raised.error from raised.error.__cause__
            end_with(raised.error)
        except (MisconfigurationException, ValueError, TypeError) as mistake:  # of the Trainer
            if not is_refused_argument(mistake):
                raise
            end_with(mistake)

    def verify(self, **arguments: Any) -> None:
        """Run the command ``verify`` in place of the Trainer's method. Exit status 1 means that results are wrong."""
        trainer: Any = self.trainer
        if not trainer.verify(**arguments).is_right:
            raise SystemExit(1)

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except UnpicklingError as refused:
            path = self.config[subcommand].get("ckpt_path")
            if path is None or is_after_set_up(refused):  # the user's code has read another file
                raise
            end_with(refused, not_weights_only(path, refused))
        except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
            if not is_refused_in_set_up(error, file=self.config[subcommand].get("ckpt_path")):
                raise
            end_with(error, f"ckpt_path: {error.strerror}: {error.filename}" if error.filename else "")
        except (MisconfigurationException, ValueError, TypeError) as mistake:
            if not is_refused_in_set_up(mistake):
                raise
            end_with(mistake)


def _spell_out_strategy(args: list[str]) -> list[str]:
    """Replace ``--trainer.strategy=ddp`` with a class path if other options set arguments of this strategy."""
    if not any(arg.startswith("--trainer.strategy.") for arg in args):
        return args
    spelled = {f"--trainer.strategy={name}": f"--trainer.strategy=strategies.{cls}" for name, cls in PLUGINS.items()}
    return [spelled.get(arg, arg) for arg in args]
