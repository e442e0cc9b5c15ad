"""``RemoteModule``: a module on another process that is used, trained and saved like a local one.

In: a class and its arguments, or an ``RRef`` to a module. ``module`` and ``optimizer`` are the caller's half, ``host``
    is
the owner's. May import ``common``, ``optim``, ``launch`` and ``pipeline``.
"""
