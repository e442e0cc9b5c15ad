"""ZeRO's engine: optimizer state divided over data-parallel ranks, in plain PyTorch.

In: optimizers and gradients of one rank. Out: steps in which each rank updates the parameters that it owns, and
states put together again. May import ``common`` and ``optim``; never Lightning.
"""
