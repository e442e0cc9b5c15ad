"""Typed commands between processes: how a command is declared, and how a call of it is written on the wire.

A set of commands is a ``Protocol``. The caller names a command by the method of that class, so that mypy checks its
arguments and its result; an object on another process implements the ``Protocol``.

May import ``common``.
"""
