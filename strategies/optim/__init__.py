"""The user's optimizer over several processes, for whatever divides it: a pipeline, ZeRO or a remote module.

In: the user's ``torch.optim.Optimizer``. Out: copies restricted to some of its parameters (``restricted``), the calls
that other processes follow (``calls``), norms and scaling of gradients (``gradients``), a trial that finds out whether
an optimizer can be divided (``trial``: steps of ``small_copies`` with the same ``trial_results``), and what a step
costs (``costs``). May import ``common``.
"""
