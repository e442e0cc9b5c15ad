"""``RemoteModule``: a module on another process that is used, trained and saved like a local one.

In: a class and its arguments, or an ``RRef`` to a module. ``module`` and ``optimizer`` are what users see, ``commands``
declares what callers send to the owner, ``client`` sends it, ``host`` runs it. May import ``common``, ``commands``,
``optim``, ``launch`` and ``pipeline``.
"""
