"""``RemoteModule``: a module on another process that is used, trained and saved as if it were local.

``module`` is the caller's half, ``host`` the owner's. May import the rooms ``common``, ``optim``, ``launch`` and
``pipeline``.
"""
