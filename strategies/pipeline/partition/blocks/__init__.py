"""Deferred blocks: pipelines a model that loops over an ``nn.ModuleList`` in its own ``forward``.

In: the calls of the blocks, which ``deferred_blocks`` defers on the driver while the model's own code runs. That code
gets an ``output`` in place of what each block returns, whose shape ``expected`` finds. Out: a plan of these calls and
the tensors that they take (``calls``), the value that travels through the stages; ``deferred_calls`` holds it for one
pass, and ``batch_rows`` tells which tensors have a row for each sample. May import ``stage`` and ``common``.
"""
