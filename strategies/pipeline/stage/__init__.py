"""One stage: consecutive layers, and how a pass runs them.

``stage`` runs forward and backward passes of micro-batches through chunks, which ``edges`` connects; ``layers`` runs
layers, with seeds and recomputation, and ``calling`` calls one as ``Pipe`` does; ``passes`` has what every stage must
know of a pass. ``weight_gradients``, ``batchnorm``, ``skip``, ``side_outputs`` and ``out_of_memory`` have one feature
each, ``action_recorder`` makes the ``records`` of what a process did, ``microbatch`` splits batches. In: values of
micro-batches. Out: outputs and gradients; the same code runs on the driver and on workers. May import ``common``,
``schedule`` and ``transport``.
"""
