"""Batches to micro-batches and back: splitting, packing of objects, merging of outputs.

In: whatever a model is called with. Out: micro-batches, or the merged value. May import ``common``.
"""
