"""One stage: consecutive layers, and how a pass runs them.

Forward and backward passes of micro-batches, recomputation, deferred BatchNorm, random states, skips, side outputs,
records of what a process did; ``microbatch`` splits batches. The same code runs on the driver and on workers. May
import ``common``, ``schedule`` and ``transport``.
"""
