"""One stage: consecutive layers, and how a pass runs them.

``stage`` runs forward and backward passes of micro-batches through chunks, which ``edges`` connects; ``layers`` runs
layers, with seeds and recomputation, and ``calling`` calls one as ``Pipe`` does. ``weight_gradients``,
``batchnorm``, ``skip`` and ``side_outputs`` have one feature each, ``recorder`` records what a process did,
``microbatch`` splits batches. In: values of micro-batches. Out: outputs and gradients; the same code runs on the driver
and on workers. May import ``common``, ``schedule`` and ``transport``.
"""
