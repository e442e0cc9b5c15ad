"""The user's optimizer over several processes, for a pipeline, ZeRO or a remote module.

In: the user's ``torch.optim.Optimizer``. Out: copies restricted to some of its parameters (``restricted``), the calls
that other processes repeat (``calls``), norms and scaling of gradients (``gradients``), and the cost of a step
(``costs``). ``trial`` finds out whether an optimizer can be divided: each ``trial_process`` steps one of the
``small_copies``. May import ``common``.
"""
