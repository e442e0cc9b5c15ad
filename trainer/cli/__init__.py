"""The command line ``python -m trainer {fit,validate,test,predict}``.

In: arguments and YAML files. Out: a call of the Trainer, or one line on stderr and exit status 2 for a mistake in the
configuration. ``command`` runs a command, ``parser`` and ``messages`` explain mistakes, ``saved_config`` writes the
configuration of a fit next to its checkpoints. May import ``trainer.trainer`` and ``strategies``.
"""

from trainer.cli.command import main

__all__ = ["main"]
