"""``Trainer``: ``pytorch_lightning.Trainer`` with Relay's strategies, exact resumption, and a command line.

``trainer`` holds the class, ``cli`` the command line ``python -m trainer``, ``resume`` the exact resumption of a run.
In: arguments, or a configuration. Out: a run of a strategy. May import ``strategies``.
"""

from trainer.trainer import Trainer

__all__ = ["Trainer"]
