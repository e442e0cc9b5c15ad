"""``trainer.verify``: whether a strategy gives the results of one process for the user's own model and data.

``record`` holds what a run came to, ``recorder`` is the callback that writes it down, ``reference`` makes one process
compute what a strategy must, ``process`` is a run in a process of its own, ``runner`` decides which runs are needed,
``compare`` and ``certificate`` find what differs and where it starts, ``certificate_report`` prints it.

In: a model, data, and the arguments of a Trainer with a strategy. Out: a
:class:`~trainer.verification.certificate.Certificate`. May import ``strategies``.
"""
