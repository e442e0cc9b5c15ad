"""The control plane, seen from the driver: calls to the stages on workers, their failures, and the watch over them.

May import ``common``, ``launch`` and ``stage``.
"""
