"""One user's optimizer over several processes, whatever divides it: a pipeline, ZeRO or a remote module.

In: the user's ``torch.optim.Optimizer``. Out: copies restricted to some of its parameters, calls of its methods
carried to other processes, and a trial that tells whether an optimizer can be divided at all. May import ``common``.
"""
