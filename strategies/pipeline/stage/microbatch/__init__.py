"""Micro-batches: splitting a batch into them, packing objects, merging outputs.

In: the arguments of a model, or a batch. Out: one value per micro-batch, or the merged value. May import ``common``.
"""
