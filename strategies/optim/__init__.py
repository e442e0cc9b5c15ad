"""The user's optimizer over several processes, for whatever divides it: a pipeline, ZeRO or a remote module.

In: the user's ``torch.optim.Optimizer``. Out: copies restricted to some of its parameters (``restricted``), the calls
that other processes follow (``calls``), norms and scaling of gradients (``gradients``), a trial that finds out whether
an optimizer can be divided (``trial``: each ``trial_process`` steps one of the ``small_copies``), and what a step costs
(``costs``). May import ``common``.
"""
