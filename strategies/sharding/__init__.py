"""Models divided over ranks, in plain PyTorch: ZeRO over data-parallel ranks, and tensor parallelism.

In: optimizers and gradients of one rank. Out: steps in which each rank updates the parameters that it owns
(``optimizers``, ``divided_optimizers``), gradients reduced to their owners (``reducer``, ``bucket``, ``transfer``), and
states gathered on one rank (``gathered_states``). Under stage 3 each rank has rows of every parameter instead
(``model``, ``row_optimizers``, ``rows``), and each block gets its values when it is divided (``initialise``). For
tensor parallelism, ``divided_layers`` divides single layers over ranks that see the same rows. May import ``common``
and ``optim``, never Lightning.
"""
