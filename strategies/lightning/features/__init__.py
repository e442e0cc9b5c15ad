"""What a run of a pipeline can do besides training: each feature is one module with its check, hooks and explanation.

:mod:`.feature` has the base class, whose methods are in the order of a run. ``FEATURES`` in
``strategies.rpc_sequential`` lists the features of the strategy. Nothing else names them, so adding or removing a
feature takes its file and its line in this list. In: the user's options, then what is known before workers start
(``Preparation``), then the run. Out: errors before a process starts, arguments of the engine, and hooks into
Lightning's objects, which are removed when the run ends. May import every module of ``strategies.lightning``.
"""
