"""What a run of a pipeline can do besides training: each feature is one module with its check, hooks and explanation.

:mod:`.feature` is the base class of all, and lists in the order of a run what a feature may do. The list of the
features that a strategy has is ``FEATURES`` in ``strategies.rpc_sequential``; nothing else names them, so that a
feature is added or removed by its file and its line there. In: the user's options, then what is known before workers
start (``Preparation``), then the run. Out: refusals before a process starts, arguments of the engine, hooks into
Lightning's objects that are removed when the run ends. May import every module of ``strategies.lightning``.
"""
