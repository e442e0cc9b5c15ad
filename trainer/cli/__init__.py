"""The command line ``relay {fit,validate,test,predict,plan,verify,report}``, which is also ``python -m trainer``.

In: arguments and YAML files. Out: a call of the Trainer, or one line on stderr and exit status 2 for a mistake in the
configuration. ``model_class`` decides for a package of Lightning, ``lightning_cli`` imports the command line of that
package, ``command`` runs a command, ``parser`` and ``parser_messages`` explain mistakes, ``one_line_errors`` decides
which errors are mistakes, ``saved_config`` writes the configuration of a fit next to its checkpoints. ``report`` shows
a run and needs no Lightning. May import ``trainer.trainer``, ``trainer.report`` and ``strategies``.
"""

import os
import sys
from importlib import import_module

from trainer.cli.model_class import import_model_class


def main(args: list[str] | None = None) -> None:
    """Run one command.

    Args:
        args: The arguments after ``python -m trainer``; ``None`` takes them from ``sys.argv``.

    Raises:
        SystemExit: With status 2, after one line on stderr, if the configuration has a mistake.
    """
    # Class paths such as examples.gpt.GPT start here; an installed script does not search the working directory.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    given = sys.argv[1:] if args is None else args
    if given[:1] == ["report"]:
        import_module("trainer.cli.report").run(given[1:])
        return
    import_model_class(given)
    import_module("trainer.cli.command").run(args)  # imports Lightning


__all__ = ["main"]
