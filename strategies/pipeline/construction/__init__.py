"""Construction: builds a model whose layers fit into no single process, with the initial values of one process.

In: the user's code that builds the model (``without_memory``), run on the driver, where large tensors get no memory;
``initialise`` does the same for a model on the ``meta`` device. Out: for each of these tensors a recipe (``recipe``):
the operations that compute its values, replayed by the process that gets the layer, or the place of its values in a
file (``stored``). May import ``strategies.common``.
"""
