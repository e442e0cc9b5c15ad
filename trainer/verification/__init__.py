"""``trainer.verify``: whether a strategy gives the results of one process for the user's own model and data.

``record`` holds the results of a run, ``recorder`` is the callback that records them, ``reference`` makes one process
compute what a strategy must, ``process`` is a run in a separate process, ``runner`` decides which runs are needed,
``compare`` and ``certificate`` find differences and where they start, ``certificate_report`` prints them.

In: a model, data, and the arguments of a Trainer with a strategy. Out: a
:class:`~trainer.verification.certificate.Certificate`. May import ``strategies``.
"""
