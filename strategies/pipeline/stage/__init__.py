"""One stage: consecutive layers and what happens to them in a pass.

Forward and backward passes of micro-batches, recomputation, deferred BatchNorm, random states, skips, side outputs.
The same code runs on driver and workers. May import ``common``, ``microbatch``, ``schedule`` and ``transport``.
"""
