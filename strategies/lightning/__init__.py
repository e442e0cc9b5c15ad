"""Code that connects the strategies to Lightning, such as hooks into Lightning's objects.

In: calls of the Trainer, its plug-ins and callbacks. Out: calls of the engine. ``compat`` alone uses private names of
Lightning, ``hooks`` replaces methods of Lightning's objects, and ``arguments`` refuses wrong arguments of any strategy.
``options`` holds the arguments of a pipeline, and ``search_settings`` what ``schedule="auto"`` may choose. ``run``
holds the state of one run of a pipeline, ``finding_blocks`` finds the layers to pipeline, ``partitioning`` divides them
over processes, ``whole_batch`` runs ``training_step``, and ``features`` holds what a run can do besides training.
``model_copies`` finds averages of weights, and ``loader_order`` what decides the order of batches; ``checkpoints``
serves every strategy; ``launch`` holds the launchers, and ``registry`` tells Lightning the names of the strategies. May
import every room except the strategies themselves and ``planning``.
"""
