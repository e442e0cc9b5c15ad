"""Exact resumption: a resumed run gets the batches, random numbers and metrics that would have come next.

``loops`` extends Lightning's loops and saves the state of every process in each checkpoint. ``combined_loader`` and
``loader`` keep the position in the training data, ``replay``, ``sample_order`` and ``stateful_dataset`` restore it,
``epoch_results`` keeps the sums of logged values, and ``random_state`` and ``worker_random_state`` the random states.
In: a Trainer. Out: loops and connectors that it uses in place of Lightning's. May import
``strategies.common`` and ``strategies.lightning.compat``.
"""
