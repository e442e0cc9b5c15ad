"""Typed commands to an object on another process: their declaration, the host that runs them, failures on the way back.

A set of commands is a ``Protocol``. The caller names a command by the method of that class, so mypy checks its
arguments and its result. The object on the other process implements the ``Protocol``; a host runs its commands one at a
time on one thread, and no other thread touches the object. In: calls of a ``Protocol``'s methods. Out: their results,
or a ``Failure``. ``folding`` shortens the traceback of an error that a user sees.

May import ``common``.
"""
