"""Recovery within a step: after a worker is lost, training goes back to a snapshot and runs the steps since then again.

In: the training steps of Lightning's loops, and the moments at which the state of all stages is needed. Out: snapshots
and recoveries of the engine, and steps that are run again, visible to the model only. ``steps`` does that, ``moment``
holds what a step begins with, ``marks`` notices changes that no step has made, ``values`` copies Python objects,
``events`` counts what callbacks and loggers have been told, ``together`` connects the drivers of several replicas. May
import ``hooks``, ``checks`` and ``compat`` of the room above, and what that room may import.
"""
