"""``Trainer``: Lightning's ``Trainer`` with Relay's strategies, exact resumption, and a command line.

``trainer`` holds the class, ``monitor`` the callback ``PipelineMonitor``, ``cli`` the command line
``python -m trainer``, ``resume`` the exact resumption of a run, ``report`` the page that shows one. In: arguments, or a
configuration. Out: a run of a strategy. May import ``strategies``.

Names are imported on first access (PEP 562), because the import of ``Trainer`` decides which package of Lightning the
process uses, and ``python -m trainer`` imports the classes of the configuration before.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.monitor import PipelineMonitor
    from trainer.trainer import Trainer

_MODULE_OF = {"PipelineMonitor": "trainer.monitor", "Trainer": "trainer.trainer"}

__all__ = ["PipelineMonitor", "Trainer"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
