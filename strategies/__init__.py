"""Strategy plug-ins for PyTorch Lightning, and what they share.

``rpc_sequential`` and the modules of ``data_parallel`` are the strategies, and ``ray`` has them for Ray Train. The
other packages are the rooms beneath them, from ``planning`` and ``lightning`` down to ``common``;
``docs/architecture.md`` draws their layers.

In: the arguments of a strategy, and calls of the Trainer. Out: processes that train together, and checkpoints with the
contents that one process would write. Imports nothing of ``trainer``.

The names below are imported on first use (PEP 562), because ``strategies.pipeline``, which every worker process
imports, must not import Lightning, whose import takes 1.6 s. ``lightning.registry`` tells Lightning the names of the
strategies.
"""

from strategies.common.names import imported_on_first_use
from strategies.lightning.registry import register_names

_MODULE_OF = {
    "StrategyPlugin": "strategies.lightning.strategy_plugin",
    "DDPStrategy": "strategies.data_parallel.ddp",
    "DataParallelStrategy": "strategies.data_parallel.dp",
    "RPCSequentialStrategy": "strategies.rpc_sequential",
    "Rebalance": "strategies.lightning.options",
    "Recovery": "strategies.pipeline.recovery.repairs",
    "RemoteModule": "strategies.remote.module",
    "Schedule": "strategies.lightning.options",
    "ZeROStrategy": "strategies.data_parallel.zero",
}

__all__ = [
    "DDPStrategy",
    "DataParallelStrategy",
    "RPCSequentialStrategy",
    "Rebalance",
    "Recovery",
    "RemoteModule",
    "Schedule",
    "StrategyPlugin",
    "ZeROStrategy",
]


__getattr__, __dir__ = imported_on_first_use(__name__, _MODULE_OF)
register_names()
