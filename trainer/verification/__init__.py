"""``trainer.verify``: checks whether a strategy gives the results of one process for the user's model and data.

``observed_run`` holds what is observed of a run, ``logged`` computes the logged values of ranks, and ``observer`` is
the callback that observes a run. ``reference`` makes one process compute what a strategy must compute, and ``process``
is a run in a separate process. ``runner`` decides which runs are needed, and ``launched_ranks`` makes all ranks of
torchrun take part in them. ``compare`` and ``certificate`` find the differences and where they start, and
``certificate_report`` prints them.

In: a model, data, and the arguments of a Trainer with a strategy. Out: a
:class:`~trainer.verification.certificate.Certificate`. May import ``strategies``.
"""
