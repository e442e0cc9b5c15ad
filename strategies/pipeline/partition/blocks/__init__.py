"""Deferred blocks: pipelines a model that loops over an ``nn.ModuleList`` in its own ``forward``.

In: the calls of the blocks, recorded on the driver while the model's own code runs (``recorder``), which gets a
``output`` in place of what each block returns. Out: a plan of these calls and the tensors that they take (``calls``),
the value that travels through the stages. May import ``stage`` and ``common``.
"""
