"""Micro-batches: splitting a batch into them, packing objects, merging outputs.

In: whatever a model is called with. Out: one value per micro-batch, or the merged value. May import ``common``.
"""
