"""The pipeline engine: plain PyTorch, no Lightning import. Names are imported on first use (PEP 562)."""

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "Namespace": "strategies.pipeline.stage.skip",
    "NoChunk": "strategies.pipeline.stage.microbatch.split",
    "Pipe": "strategies.pipeline.pipe.pipe",
    "WithDevice": "strategies.pipeline.pipe.with_device",
    "balance_by_size": "strategies.pipeline.partition.balance",
    "balance_by_time": "strategies.pipeline.partition.balance",
    "is_checkpointing": "strategies.pipeline.stage.layers",
    "is_recomputing": "strategies.pipeline.stage.layers",
    "pop": "strategies.pipeline.stage.skip",
    "skippable": "strategies.pipeline.stage.skip",
    "stash": "strategies.pipeline.stage.skip",
    "verify_skippables": "strategies.pipeline.stage.skip",
}

__all__ = [
    "Namespace",
    "NoChunk",
    "Pipe",
    "WithDevice",
    "balance_by_size",
    "balance_by_time",
    "is_checkpointing",
    "is_recomputing",
    "pop",
    "skippable",
    "stash",
    "verify_skippables",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'strategies.pipeline' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
