"""``Trainer``: Lightning's ``Trainer`` with Relay's strategies, exact resumption, and a command line.

``trainer`` holds the class, ``cli`` the command line ``python -m trainer``, ``resume`` the exact resumption of a run.
In: arguments, or a configuration. Out: a run of a strategy. May import ``strategies``.

``Trainer`` is imported on first access (PEP 562), because its import decides which package of Lightning the process
uses, and ``python -m trainer`` imports the classes of the configuration before.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.trainer import Trainer

__all__ = ["Trainer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    return getattr(import_module("trainer.trainer"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
