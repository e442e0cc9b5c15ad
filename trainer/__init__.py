"""``Trainer``: Lightning's ``Trainer`` with Relay's strategies, exact resumption, and a command line.

``trainer`` holds the class, ``monitor`` the callback ``PipelineMonitor``, ``plan_report`` the text of ``Trainer.plan``,
``verification`` compares a strategy with one process, ``cli`` is the command line ``python -m trainer``, ``resume`` the
exact resumption of a run, ``report`` the page that shows one. In: arguments, or a configuration. Out: a run of a
strategy. May import ``strategies``.

Names are imported on first use (PEP 562), because the import of ``Trainer`` decides which package of Lightning the
process uses, and ``python -m trainer`` imports the classes of the configuration before.
"""

from typing import TYPE_CHECKING

try:
    from strategies.common.names import imported_on_first_use
except ModuleNotFoundError as error:
    if error.name is None or not error.name.startswith("strategies"):
        raise
    import strategies

    raise ImportError(
        f"Relay's trainer needs Relay's package strategies, but Python has found {strategies.__file__}. Rename that "
        "module, or start the run with the command relay, which does not search the folder of a script."
    ) from error

if TYPE_CHECKING:
    from trainer.monitor import PipelineMonitor
    from trainer.trainer import Trainer, verify

_MODULE_OF = {"PipelineMonitor": "trainer.monitor", "Trainer": "trainer.trainer", "verify": "trainer.trainer"}

__all__ = ["PipelineMonitor", "Trainer", "verify"]


__getattr__, __dir__ = imported_on_first_use(__name__, _MODULE_OF)
