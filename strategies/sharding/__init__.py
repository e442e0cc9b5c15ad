"""ZeRO's engine: optimizer states, gradients and parameters divided over data-parallel ranks, in plain PyTorch.

In: optimizers and gradients of one rank. Out: steps in which each rank updates the parameters that it owns
(``optimizers``, ``ownership``), gradients reduced to their owners (``reducer``, ``bucket``, ``transfer``), and states
gathered on one rank (``states``). Under stage 3 each rank has rows of every parameter instead (``model``,
``row_optimizers``, ``rows``), and each block gets its values when it is divided (``initialise``). May import ``common``
and ``optim``, never Lightning.
"""
