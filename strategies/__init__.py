"""Strategy plug-ins for PyTorch Lightning: one module for each strategy that a user can choose, imported on first use.

``base`` holds the contract that the strategies fulfil. The names below are resolved on first access (PEP 562), because
``strategies.pipeline``, which every worker process imports, must not import Lightning, whose import takes 1.6 s.
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
