"""What only Lightning needs: the parts that the strategies share, such as hooks into Lightning's objects and checks.

In: calls of the Trainer, its plug-ins and callbacks. Out: calls of the engine. ``compat`` alone uses private names of
Lightning, ``hooks`` replaces methods of its objects, ``checks`` and ``arguments`` refuse wrong settings.
``partitioning`` divides a model over processes, ``moving_layers`` says when layers can move to other stages, and
``search_settings`` what ``schedule="auto"`` may choose. ``per_microbatch`` and ``loss_weights`` run ``training_step``
on micro-batches and weight their losses; ``checkpoints``, ``weight_averaging``, ``profiler`` and ``summary`` have
Lightning's features of these names span all stages. ``launch`` has the launchers. May import every room but the
strategies themselves and ``planning``.
"""
