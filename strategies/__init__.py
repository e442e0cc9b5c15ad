"""Strategy plug-ins for PyTorch Lightning, imported on first use (PEP 562).

Importing ``strategies.pipeline`` (the engine, and every worker process) must not import Lightning: it costs a process
1.6 s to start. So the names below are resolved only when they are asked for.
"""

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "StrategyPlugin": "strategies.base",
    "DDPStrategy": "strategies.ddp",
    "DataParallelStrategy": "strategies.dp",
    "RPCSequentialStrategy": "strategies.rpc_sequential",
    "RemoteModule": "strategies.remote.module",
    "ZeROStrategy": "strategies.zero",
}

__all__ = [
    "DDPStrategy",
    "DataParallelStrategy",
    "RPCSequentialStrategy",
    "RemoteModule",
    "StrategyPlugin",
    "ZeROStrategy",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'strategies' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
