"""The pipeline engine, in plain PyTorch: what starts a pipeline, leads batches through its stages, and ends it.

``driver`` is the pipeline as the strategy sees it. The packages are its rooms: ``executor`` and ``worker`` run the
stages on the driver and on workers, ``recovery`` replaces lost workers, ``pipe`` is the class ``Pipe``, ``partition``
divides layers, ``state`` and ``optim`` hold what a stage has, ``control`` and ``transport`` connect the processes, and
``stage``, ``schedule`` and ``construction`` know one process only. In: layers, batches, optimizers. Out: outputs and
gradients of one process. May import ``strategies.launch`` and what is below it, and never Lightning.

The names below are imported on first use (PEP 562), so that a worker imports only the rooms that it runs.
"""

from strategies.common.names import imported_on_first_use

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


__getattr__, __dir__ = imported_on_first_use(__name__, _MODULE_OF)
