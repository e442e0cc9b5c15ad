"""What only Lightning needs: the parts that the strategies share, such as hooks into Lightning's objects.

In: calls of the Trainer, its plug-ins and callbacks. Out: calls of the engine. ``compat`` alone uses private names of
Lightning, ``hooks`` replaces methods of its objects, and ``arguments`` refuses wrong arguments of any strategy.
``options`` has those of a pipeline, and ``search_settings`` what ``schedule="auto"`` may choose. ``run`` is a run of a
pipeline, ``partitioning`` divides its model over processes, ``whole_batch`` runs ``training_step``, and ``features``
has what a run can do besides. ``checkpoints`` is for every strategy; ``launch`` has the launchers. May import every
room but the strategies themselves and ``planning``.
"""
